"""MXFP4 checkpoints in gpt-oss's layout: taken as they are, and a layer left in bf16 gets a MegaMoE of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from atom.engine.checkpoint import Checkpoint
from atom.engine.loading import load_config, load_model
from atom.errors import LaunchRefused
from atom.moe.expert_parallel import moe_layers
from atom.moe.expert_weights import from_mxfp4
from atom.moe.mega_moe import create_mega_moe
from atom.moe.model_config import LayerGroup, describe, group_layers, moe_layers_of
from atom.moe.spec import GateMode
from atom.wire.format import Wire, resolve_wire
from tests.moe.models import A8W4, config_of, mega_alone, relative_error, save_random

HIDDEN, INTER, EXPERTS = 64, 96, 8


def _write_mxfp4(path: Path, layers: list[int]) -> None:
    """Turn the experts of these layers of a saved gpt-oss into random MXFP4 blocks and scales."""
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(1)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)

    for layer in layers:
        name = f"model.layers.{layer}.mlp.experts"
        for projection, rows, columns in (
            ("gate_up_proj", 2 * INTER, HIDDEN),
            ("down_proj", HIDDEN, INTER),
        ):
            del tensors[f"{name}.{projection}"]
            tensors[f"{name}.{projection}_blocks"] = draw(0, 256, EXPERTS, rows, columns // 32, 16)
            tensors[f"{name}.{projection}_scales"] = draw(120, 125, EXPERTS, rows, columns // 32)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "lm_head",
        ]
        + [f"model.layers.{i}.mlp.experts" for i in range(3) if i not in layers],
    }
    (path / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("mxfp4")
    save_random(config_of("gpt_oss"), path)
    _write_mxfp4(path, [0, 1, 2])
    return path


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("mixed")
    save_random(config_of("gpt_oss"), path)
    _write_mxfp4(path, [0, 1])
    return path


@torch.inference_mode()
def test_bytes_are_those_of_the_file(mxfp4):
    tensors = load_file(mxfp4 / "model.safetensors")
    config = load_config(mxfp4)
    mega = mega_alone(config)
    assert mega.built.recipe.gate_mode is GateMode.INTERLEAVE, "as gpt-oss stores them"
    layers = moe_layers(load_model(mxfp4, config, mega))
    for index, layer in enumerate(layers):
        name = f"model.layers.{index}.mlp.experts"
        for ours, theirs in (
            (layer.weights.w1, "gate_up_proj_blocks"),
            (layer.weights.w1_scale, "gate_up_proj_scales"),
            (layer.weights.w2, "down_proj_blocks"),
            (layer.weights.w2_scale, "down_proj_scales"),
        ):
            assert ours.numpy().tobytes() == tensors[f"{name}.{theirs}"].numpy().tobytes()
        assert torch.equal(layer.weights.bias1, tensors[f"{name}.gate_up_proj_bias"].float())
        assert torch.equal(layer.weights.bias2, tensors[f"{name}.down_proj_bias"].float())


@pytest.mark.parametrize("mode", list(GateMode))
def test_each_rank_reads_its_own_experts(mxfp4, mode):
    config = load_config(mxfp4)
    layer = moe_layers_of(config)[1]
    tensors = load_file(mxfp4 / "model.safetensors")
    read: list[tuple[int, int]] = []
    checkpoint = Checkpoint(mxfp4)

    def reading(name: str, start: int, stop: int) -> torch.Tensor:
        read.append((start, stop))
        return checkpoint.read(name, start, stop)

    parts = [
        from_mxfp4(
            layer,
            describe(config, ep_size=4, ep_rank=rank, max_tokens=8)[0],
            mode,
            reading,
            device=torch.device("cpu"),
        )
        for rank in range(4)
    ]
    assert set(read) == {(0, 2), (2, 4), (4, 6), (6, 8)}
    whole = tensors[f"{layer.name}.gate_up_proj_blocks"].flatten(2)
    if mode is GateMode.CONCAT:
        whole = torch.cat((whole[:, 0::2], whole[:, 1::2]), 1)
    assert torch.equal(torch.cat([part.w1 for part in parts]), whole)
    bias2 = tensors[f"{layer.name}.down_proj_bias"].float()
    assert torch.equal(torch.cat([part.bias2 for part in parts]), bias2)


@torch.inference_mode()
def test_matches_transformers_dequantized_forward(mxfp4):
    """transformers dequantizes to bf16, exactly; what is left is the activations' quantization and bf16 sums."""
    config = load_config(mxfp4)
    model = load_model(mxfp4, config, mega_alone(config))
    reference = AutoModelForCausalLM.from_pretrained(
        mxfp4, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    )
    for layer, bound in zip(moe_layers_of(config), moe_layers(model), strict=True):
        experts = reference.get_submodule(layer.name)
        hidden = torch.randn(60, HIDDEN).bfloat16()
        weights, ids = torch.rand(60, EXPERTS).softmax(-1).topk(layer.topk)
        out = bound(hidden, ids, weights.bfloat16())
        assert relative_error(out, experts(hidden, ids, weights.bfloat16())) < 0.06
    tokens = torch.randint(3, 128, (2, 24))
    assert relative_error(model(tokens).logits, reference(tokens).logits) < 0.4


def test_a_layer_in_another_format_is_a_group_of_its_own(mixed):
    main, other = group_layers(
        moe_layers_of(load_config(mixed)), ep_size=2, ep_rank=1, max_tokens=64
    )
    assert [layer.name for layer in main.layers] == [
        f"model.layers.{i}.mlp.experts" for i in (0, 1)
    ]
    assert main.wire is None, "the launch chooses"
    assert [layer.name for layer in other.layers] == ["model.layers.2.mlp.experts"]
    assert other.wire is Wire.BF16
    assert other.geometry == main.geometry and other.geometry.ep_rank == 1


@torch.inference_mode()
def test_it_gets_its_own_mega_moe_on_a_bf16_wire(mixed):
    config = load_config(mixed)
    mega = mega_alone(config, {"MEGA_WIRE": "fp8", "AITER_FORCE_A8W4": "1"})
    built = []

    def make_mega(group: LayerGroup):
        choice = resolve_wire(A8W4 | {"MEGA_WIRE": str(group.wire)})
        built.append(
            create_mega_moe(
                group.geometry, group.recipe, choice, group=None, device=torch.device("cpu")
            )
        )
        return built[-1]

    model = load_model(mixed, config, mega, make_mega=make_mega)
    assert [layer.mega for layer in moe_layers(model)] == [mega, mega, *built]
    assert "wire=bf16" in built[0].built.startup_line()
    assert "wire=fp8" in mega.built.startup_line()
    tensors = load_file(mixed / "model.safetensors")
    blocks = tensors["model.layers.1.mlp.experts.down_proj_blocks"]
    assert torch.equal(moe_layers(model)[1].weights.w2, blocks.flatten(2))
    assert torch.isfinite(model(torch.randint(3, 128, (1, 9))).logits).all()

    with pytest.raises(LaunchRefused, match=r"model\.layers\.2\.mlp\.experts"):
        load_model(mixed, config, mega)


def test_a_missing_block_is_named(mxfp4, tmp_path):
    tensors = load_file(mxfp4 / "model.safetensors")
    lost = "model.layers.1.mlp.experts.down_proj_scales"
    save_file(
        {name: value for name, value in tensors.items() if name != lost},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = load_config(mxfp4)
    with pytest.raises(LaunchRefused, match=lost):
        load_model(tmp_path, config, mega_alone(config))


def test_other_quantizations_are_refused_by_name(mxfp4):
    config = load_config(mxfp4)
    config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(LaunchRefused, match=r"'fp8' is not supported.*mxfp4"):
        moe_layers_of(config)
