"""The directory that ``--model`` means."""

from __future__ import annotations

import importlib.resources
import re
from pathlib import Path

from atom.errors import LaunchRefused

BUNDLED = {"tiny-moe": "tiny_moe"}
"""Models that come with the package, by the name that ``--model`` knows them by, with their folder in ``assets``."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_model_path(name: str, *, load_format: str = "dummy") -> Path:
    """The directory that ``--model`` means.

    Args:
        name: a bundled model or a local directory.
        load_format: with ``"auto"`` the directory must hold weights as well.

    Raises:
        LaunchRefused: there is no such directory, or it lacks what is needed; the message says what to do.
    """
    if name in BUNDLED:
        path = Path(str(importlib.resources.files("atom") / "assets" / BUNDLED[name]))
    else:
        path = Path(name).expanduser()
    bundled = ", ".join(BUNDLED)
    if not path.exists():
        if _HUB_ID.fullmatch(name):
            raise LaunchRefused(
                f"--model {name}: there is no such directory here, and models are not downloaded. Download it first: "
                f"`hf download {name} --local-dir {name.rpartition('/')[2]}`, then pass that directory."
            )
        raise LaunchRefused(
            f"--model {name}: there is no such directory. Pass a local Hugging Face directory or a bundled model "
            f"({bundled})."
        )
    if not (path / "config.json").is_file():
        raise LaunchRefused(
            f"--model {name}: {path} holds no config.json, so it is not a Hugging Face model directory. Pass the "
            f"directory that holds it, or a bundled model ({bundled})."
        )
    if load_format == "auto":
        # Reading safetensors takes torch; who only needs the path does not wait for it.
        from atom.engine.checkpoint import Checkpoint

        Checkpoint(path)
    return path
