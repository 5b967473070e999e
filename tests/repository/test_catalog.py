"""The model catalog follows its schema, which refuses what it should, and agrees with the code."""

from __future__ import annotations

import ast
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atom import envs
from atom.entrypoints.openai.args import parse_args
from atom.wire.format import check_wire, resolve_wire
from tests.repository.commands import CATALOG, check_jsonschema

SCHEMA = CATALOG.with_name("models.schema.json")
HIDDEN = {
    "tiny-moe": 256,
    "Qwen/Qwen3-30B-A3B": 2048,
    "deepseek-ai/DeepSeek-V4-Pro": 7168,
    "openai/gpt-oss-120b": 2880,
}
"""``hidden_size`` in each catalog model's config.json."""


def _edit(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change of one field of the first entry, named by dots; ``...`` removes it."""

    def apply(catalog: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        target = catalog["models"][0]
        for key in parents:
            target = target[key]
        if value is ...:
            del target[last]
        else:
            target[last] = value

    return apply


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_edit("accuracy", ...), "accuracy"),
        (_edit("accuracy.threshold", 1.5), "threshold"),
        (_edit("accuracy.threshold", "0.5"), "threshold"),
        (_edit("accuracy.task", "vibes"), "task"),
        (_edit("env.MEGA_WIRE", "int8"), "MEGA_WIRE"),
        (_edit("env", {}), "MEGA_WIRE"),
        (_edit("env", {"MEGA_WIRE": "fp8"}), "AITER_FORCE_A8W4"),
        (_edit("env", {"MEGA_WIRE": "fp4", "AITER_FORCE_A8W4": "1"}), "AITER_FORCE_A8W4"),
        (_edit("env.LD_PRELOAD", "evil.so"), "LD_PRELOAD"),
        (_edit("args", ["--port", "80"]), "args"),
        (_edit("runner", ["ubuntu-latest"]), "runner"),
        (_edit("name", "Tiny MoE; rm"), "name"),
        (_edit("comment", "hello"), "comment"),
    ],
)
def test_broken_catalog_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], named: str
) -> None:
    catalog = copy.deepcopy(json.loads(CATALOG.read_text(encoding="utf-8")))
    change(catalog)
    broken = tmp_path / "models.json"
    broken.write_text(json.dumps(catalog), encoding="utf-8")
    result = check_jsonschema("--schemafile", SCHEMA, broken)
    assert result.returncode == 1, result.stdout
    assert named in result.stdout


def test_catalog_agrees_with_the_code() -> None:
    models = json.loads(CATALOG.read_text(encoding="utf-8"))["models"]
    names = [model["name"] for model in models]
    assert len(set(names)) == len(names)
    for model in models:
        assert set(model["env"]) <= set(envs.TABLE), model["name"]
        parse_args(["--model", model["path"], *model["args"]])
        hidden = HIDDEN[model["path"]]
        layout = check_wire(resolve_wire(model["env"]), hidden)
        if model["hardware"] == "gfx1250" and layout.wire.quantizing:
            assert hidden % 128 == 0, f"mori refuses the scale rows of {model['name']}"
    wires = {m["env"]["MEGA_WIRE"] for m in models if m["path"] == "tiny-moe"}
    assert wires == {"bf16", "fp8", "fp4"}
    heldout = sorted((CATALOG.parent / "heldout").glob("*.py"))
    assert heldout
    for path in heldout:
        ast.parse(path.read_text(encoding="utf-8"))
