"""Commands and places that the tests of the repository's plumbing share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CATALOG = ROOT / ".github" / "benchmark" / "models.json"
WORKFLOWS = ROOT / ".github" / "workflows"


def run(
    *command: str | Path,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Run a command with stdout and stderr captured together in ``stdout``; ``env`` goes on top of this one's."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )


def check_jsonschema(*args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the same checker as the pre-checkin workflow."""
    return run(sys.executable, "-m", "check_jsonschema", *args)
