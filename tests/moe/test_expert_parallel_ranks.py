"""Two real gloo ranks with batches of their own against one process that holds all experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from atom.engine.loading import load_config, load_model
from atom.moe.expert_parallel import moe_layers, run_empty
from atom.moe.mega_moe import create_mega_moe
from atom.moe.model_config import describe
from atom.wire.format import resolve_wire
from tests.moe.models import config_of, relative_error, save_random
from tests.ranks import run_ranks

STEPS = [[[3, 14, 15, 92, 65], [35, 89, 79]], [[3, 23, 84], None], [None, [62, 64, 33, 83, 27, 95]]]
"""For each step the tokens of each rank; None runs with an empty batch."""

CASES = {
    "float on an fp4 wire": ("qwen3_moe", "auto", {"MEGA_WIRE": "fp4"}),
    "biases on an fp8 wire": ("gpt_oss", "auto", {"MEGA_WIRE": "fp8", "AITER_FORCE_A8W4": "1"}),
    "dummy on a bf16 wire": ("qwen3_moe", "dummy", {}),
}


@torch.inference_mode()
def _run(rank: int, ranks: int, path: Path, load_format: str, environ: dict[str, str]) -> dict:
    group = dist.group.WORLD if ranks > 1 else None
    config = load_config(path)
    geometry, recipe = describe(config, ep_size=ranks, ep_rank=rank, max_tokens=64)
    mega = create_mega_moe(
        geometry, recipe, resolve_wire(environ), group=group, device=torch.device("cpu")
    )
    model = load_model(path, config, mega, load_format=load_format, group=group)
    first = moe_layers(model)[0]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 16, geometry.hidden, generator=generator).bfloat16()
    scores = torch.rand(2, 16, geometry.experts, generator=generator).softmax(-1)
    layer_outputs = []
    for row in range(2) if ranks == 1 else [rank]:
        weights, ids = scores[row].topk(geometry.topk)
        layer_outputs.append(first(hidden[row], ids, weights).float().numpy())
    logits = []
    for batches in STEPS:
        for tokens in batches if ranks == 1 else [batches[rank]]:
            if tokens is None:
                run_empty(model)
                logits.append(None)
            else:
                logits.append(model(torch.tensor([tokens])).logits.float().numpy())
    weights = [layer.weights for layer in moe_layers(model)]
    fields = ("w1", "w1_scale", "w2", "w2_scale", "bias1", "bias2")
    return {
        "layer": layer_outputs,
        "logits": logits,
        "experts": [
            [t.numpy().tobytes() for name in fields if (t := getattr(w, name)) is not None]
            for w in weights
        ],
        "dense": {k: v.float().numpy().tobytes() for k, v in model.state_dict().items()},
        "sent": mega.counters.rows,
    }


def _all_cases(rank: int, ranks: int, folder: Path) -> dict[str, dict]:
    return {
        name: _run(rank, ranks, folder / family, load_format, environ)
        for name, (family, load_format, environ) in CASES.items()
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[dict, list[dict]]:
    """What one process gave, and what each of two ranks gave, for every case."""
    folder = tmp_path_factory.mktemp("models")
    for family in {family for family, _, _ in CASES.values()}:
        save_random(config_of(family), folder / family)
    return _all_cases(0, 1, folder), run_ranks(2, _all_cases, 2, folder, timeout=150)


@pytest.mark.parametrize("case", CASES)
def test_weights_are_byte_for_byte_one_model(runs, case):
    alone, pair = runs[0][case], [run[case] for run in runs[1]]
    for layer, whole in enumerate(alone["experts"]):
        parts = [one["experts"][layer] for one in pair]
        assert whole == [first + second for first, second in zip(*parts, strict=True)]
    assert alone["dense"] == pair[0]["dense"] == pair[1]["dense"]


@pytest.mark.parametrize("case", CASES)
def test_a_layer_gives_what_one_process_gives(runs, case):
    """A token whose experts live on two ranks has its sum rounded to bf16 on each: three roundings of 2^-9, no more."""
    alone, pair = runs[0][case], [run[case] for run in runs[1]]
    assert all(one["sent"] > 0 for one in pair), "no row crossed between the ranks"
    for expected, one in zip(alone["layer"], pair, strict=True):
        error = relative_error(torch.from_numpy(one["layer"][0]), torch.from_numpy(expected))
        assert error < 3 * 2**-9


@pytest.mark.parametrize("case", CASES)
def test_different_batches_give_the_logits_of_one_process(runs, case):
    """Idle steps included. A layer's rounding flips some MX codes of the next layer's A operand, and with random weights
    that grows to several percent; logits of another model, or of another rank's tokens, differ by more than 100 %.
    """
    alone, pair = runs[0][case], [run[case] for run in runs[1]]
    together = [
        logits for step in zip(*(one["logits"] for one in pair), strict=True) for logits in step
    ]
    assert [x is None for x in together] == [x is None for x in alone["logits"]]
    for ours, expected in zip(together, alone["logits"], strict=True):
        if expected is not None:
            assert relative_error(torch.from_numpy(ours), torch.from_numpy(expected)) < 0.25
