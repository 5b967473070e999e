"""What can be refused before any process starts, so that a mistake costs no waiting.

Everything here is checked again by the ranks, who know more; this only says no sooner.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from atom import envs
from atom.engine.model_path import read_config_json, resolve_model_path
from atom.wire.format import check_wire, resolve_wire


def preflight(model: str) -> None:
    """Check the environment, that the model is there with a readable config, and that the wire fits its A operand.

    Args:
        model: ``--model`` as given.

    Raises:
        LaunchRefused: the launch cannot work.
    """
    for name in envs.TABLE:
        envs.read(name)
    choice = resolve_wire()
    hidden = _hidden_size(read_config_json(resolve_model_path(model)))
    # Where aiter is installed it may know better which A operand it takes, and only a rank asks it.
    if hidden is not None and importlib.util.find_spec("aiter") is None:
        check_wire(choice, hidden)


def _hidden_size(config: dict[str, Any]) -> int | None:
    """The width of a token row as config.json has it, None where it does not say so in the usual place."""
    text = config.get("text_config", config)
    hidden = text.get("hidden_size") if isinstance(text, dict) else None
    return hidden if isinstance(hidden, int) and hidden > 0 else None
