"""The directory that ``--model`` means."""

from __future__ import annotations

import importlib.resources
import json
import re
from pathlib import Path
from typing import Any

from atom.errors import LaunchRefused

BUNDLED = {"tiny-moe": "tiny_moe"}
"""Models that come with the package, by the name that ``--model`` knows them by, with their folder in ``assets``."""

_JSON_NAMES = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}

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


def read_config_json(path: Path) -> dict[str, Any]:
    """A model directory's config.json as it is written there. It takes no library that is slow to import.

    Raises:
        LaunchRefused: it cannot be read, or is not a JSON object.
    """
    file = path / "config.json"
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise LaunchRefused(
            f"{file} cannot be read as JSON: {error}. Download it again."
        ) from error
    if not isinstance(config, dict):
        raise LaunchRefused(
            f"{file} holds {_JSON_NAMES[type(config)]}, where a model's config is a JSON object ({{...}}). Download it again."
        )
    return config
