"""Fixtures that put the doubles of aiter and mori where the real libraries would be."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gfx1250.doubles import core

VARIABLES = [
    "MEGA_WIRE",
    "MEGA_DISPATCH_WIRE",
    "AITER_FORCE_A8W4",
    "MEGA_DISPATCH",
    "MEGA_COMBINE_QUANT",
    "AITER_USE_GROUPED_GEMM",
    "AITER_DISABLE_GROUPED_A8W4",
    "ATOM_MOE_TRANSPORT",
    "GPU_ARCHS",
]

Install = Callable[..., Path]


def forget_libraries() -> None:
    """Drop aiter and mori from what is imported."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("aiter", "mori"):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test starts with the wire's variables unset."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """``install(aiter="current", mori="at_1_2_4")`` makes those versions importable, and this machine a gfx1250."""

    def put(*, aiter: str | None = None, mori: str | None = None) -> Path:
        forget_libraries()
        target = core.assemble(tmp_path / f"{aiter}-{mori}", aiter=aiter, mori=mori)
        monkeypatch.syspath_prepend(target)
        monkeypatch.setattr("atom.moe.mori_build.architecture", lambda device: "gfx1250")
        monkeypatch.setattr("atom.moe.mori_v2.architecture", lambda device: "gfx1250")
        return target

    yield put
    forget_libraries()
