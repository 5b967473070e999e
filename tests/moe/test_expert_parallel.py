"""The plug into transformers, one rank: every layout against transformers' own forward, and the order of calls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from atom.engine.loading import load_config, load_model
from atom.moe.expert_parallel import moe_layers, run_empty
from atom.moe.model_config import moe_layers_of
from tests.moe.models import (
    FAMILIES,
    config_of,
    mega_alone,
    put_dequantized,
    relative_error,
    save_random,
)


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_random(config_of(request.param), path)
    return path


@torch.inference_mode()
def test_family_matches_its_own_forward(saved):
    """With the same MXFP4 weights only the activations' quantization is left, twice e4m3: under 6 %.

    A wrong order of rows, axis, bias, activation or expert is an error of the order of 1.
    """
    config = load_config(saved)
    mega = mega_alone(config)
    model = load_model(saved, config, mega)
    original = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16)
    reference = AutoModelForCausalLM.from_pretrained(
        saved, dtype=torch.float32, experts_implementation="eager"
    )
    layers = moe_layers_of(config)
    assert len(moe_layers(model)) == len(layers) >= 2
    for layer, bound in zip(layers, moe_layers(model), strict=True):
        experts = reference.get_submodule(layer.name)
        put_dequantized(experts, layer, bound.weights, mega.built.recipe.gate_mode)
        hidden = torch.randn(60, layer.hidden).bfloat16()
        scores = torch.rand(60, layer.experts)
        weights, ids = scores.softmax(-1).topk(layer.topk)
        weights = weights.bfloat16()
        out = bound(hidden, ids, weights)
        assert out.dtype is torch.bfloat16
        assert relative_error(out, experts(hidden.float(), ids, weights.float())) < 0.06
        own = original.get_submodule(layer.name)(hidden, ids, weights)
        assert relative_error(out, own) < 0.3, "beyond the error of MXFP4 weights"

    tokens = torch.randint(3, 128, (2, 24))
    logits, expected = model(tokens).logits, reference(tokens).logits
    # A random router sends some tokens elsewhere after a small error; the layers above are the exact check.
    assert relative_error(logits, expected) < 0.4


@torch.inference_mode()
def test_parameters_are_freed_and_dense_modules_whole(saved):
    config = load_config(saved)
    model = load_model(saved, config, mega_alone(config))
    original = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16)
    names = {layer.name for layer in moe_layers_of(config)}
    dense = {
        name: value
        for name, value in original.state_dict().items()
        if name.rpartition(".")[0] not in names
    }
    assert dense.keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in dense.items())
    assert type(model) is type(original)
    assert not model.training and model._device_mesh is None


class Recorder:
    """A real MegaMoE that notes which layer was called, and with how many tokens."""

    def __init__(self, mega) -> None:
        self.mega = mega
        self.built = mega.built
        self.counters = mega.counters
        self.calls: list[tuple[int, int]] = []

    def prepare(self, weights):
        return self.mega.prepare(weights)

    def __call__(self, hidden_states, topk_weights, topk_ids, weights):
        self.calls.append((id(weights), hidden_states.shape[0]))
        assert topk_ids.dtype is torch.int32 and topk_weights.dtype is torch.float32
        assert all(t.is_contiguous() for t in (hidden_states, topk_weights, topk_ids))
        return self.mega(hidden_states, topk_weights, topk_ids, weights)


@torch.inference_mode()
def test_an_idle_rank_makes_the_calls_of_a_busy_one(saved):
    config = load_config(saved)
    mega = Recorder(mega_alone(config))
    model = load_model(saved, config, mega)
    model(torch.randint(3, 128, (1, 7)))
    busy, mega.calls = mega.calls, []
    run_empty(model)
    assert [layer for layer, _ in busy] == [layer for layer, _ in mega.calls]
    assert {tokens for _, tokens in busy} == {7}
    assert {tokens for _, tokens in mega.calls} == {0}
