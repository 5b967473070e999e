"""Runs the files interpreted_*.py in a process in which Triton interprets kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed (pip install 'atom[gpu]')")

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name", ["interpreted_cases.py", "interpreted_attention.py", "interpreted_ranks.py"]
)
def test_kernels_under_the_interpreter(name):
    cases = Path(__file__).with_name(name)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore",
            str(cases),
        ],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=390,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout or "." in done.stdout
