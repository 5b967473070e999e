"""What every GPU test needs: a GPU and Triton."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    missing = None
    if not torch.cuda.is_available():
        missing = "no GPU that torch can see"
    else:
        try:
            import triton  # noqa: F401
        except ImportError:
            missing = "Triton is not installed"
    for item in items:
        if HERE in Path(item.fspath).parents:
            item.add_marker(pytest.mark.gpu)
            if missing:
                item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)
