"""What ``--model`` may be, what is wrong with it when it is refused, and random weights from a config alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig

from atom.engine.byte_tokenizer import byte_tokenizer
from atom.engine.checkpoint import Checkpoint
from atom.engine.loading import (
    eos_token_ids,
    load_config,
    load_generation_config,
    load_model,
    load_tokenizer,
    resolve_model_path,
)
from atom.errors import LaunchRefused
from atom.moe.expert_parallel import moe_layers, run_empty
from atom.moe.expert_weights import random_weights
from atom.moe.model_config import describe, moe_layers_of
from atom.moe.spec import GateMode
from atom.wire import mx
from tests.moe.models import config_of, mega_alone, relative_error, save_random


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("qwen")
    save_random(config_of("qwen3_moe"), path)
    return path


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


def test_bundled_model():
    path = resolve_model_path("tiny-moe", load_format="auto")
    config = load_config(path)
    assert config.model_type == "qwen3_moe"
    tokenizer = load_tokenizer(path)
    assert tokenizer.decode(tokenizer("def main():").input_ids) == "def main():"
    assert eos_token_ids(path, config)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nobody/nothing", r"Download it first: `hf download nobody/nothing"),
        ("./nowhere/at/all", r"no such directory.*tiny-moe"),
        ("tiny_moe", r"no such directory.*tiny-moe"),
    ],
)
def test_no_such_directory(name, says):
    with pytest.raises(LaunchRefused, match=says):
        resolve_model_path(name)


def test_directory_without_config(tmp_path):
    with pytest.raises(LaunchRefused, match=r"no config\.json"):
        resolve_model_path(str(tmp_path))


def test_directory_without_weights(copy):
    (copy / "model.safetensors").unlink()
    assert resolve_model_path(str(copy), load_format="dummy") == copy
    with pytest.raises(LaunchRefused, match=r"no model\.safetensors.*--load-format dummy"):
        resolve_model_path(str(copy), load_format="auto")


def test_broken_config(copy):
    (copy / "config.json").write_text("{")
    with pytest.raises(LaunchRefused, match=r"config\.json cannot be read"):
        load_config(copy)
    (copy / "config.json").write_text("[]")
    with pytest.raises(LaunchRefused, match=r"config\.json holds an array"):
        load_config(copy)
    (copy / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(LaunchRefused, match="no_such_model"):
        load_config(copy)


def test_broken_weights(copy):
    (copy / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(LaunchRefused, match="not a whole safetensors file"):
        resolve_model_path(str(copy), load_format="auto")


def test_missing_shard(copy):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LaunchRefused, match=r"lists model-00001-of-00002\.safetensors"):
        resolve_model_path(str(copy), load_format="auto")


def _without(path: Path, lost: list[str]) -> None:
    tensors = load_file(path / "model.safetensors")
    assert set(lost) <= tensors.keys()
    save_file(
        {name: value for name, value in tensors.items() if name not in lost},
        path / "model.safetensors",
        metadata={"format": "pt"},
    )


@pytest.mark.parametrize("expert", [0, 3, 7])
def test_incomplete_experts_are_named(copy, expert):
    lost = f"model.layers.2.mlp.experts.{expert}.up_proj.weight"
    _without(copy, [lost])
    config = load_config(copy)
    with pytest.raises(LaunchRefused, match=rf"these experts are missing: {lost}\."):
        load_model(copy, config, mega_alone(config))


def test_missing_layer_and_dense_weight_are_named(copy):
    experts = [
        f"model.layers.0.mlp.experts.{i}.{p}_proj.weight"
        for i in range(8)
        for p in ("gate", "up", "down")
    ]
    _without(copy, [*experts, "model.layers.1.mlp.up_proj.weight"])
    config = load_config(copy)
    with pytest.raises(LaunchRefused) as refusal:
        load_model(copy, config, mega_alone(config))
    for name in (
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.down_proj",
        "model.layers.1.mlp.up_proj.weight",
    ):
        assert name in str(refusal.value)


def test_weights_of_another_shape_are_refused(copy):
    config = json.loads((copy / "config.json").read_text()) | {"vocab_size": 256}
    (copy / "config.json").write_text(json.dumps(config))
    config = load_config(copy)
    with pytest.raises(LaunchRefused, match=r"another shape.*embed_tokens"):
        load_model(copy, config, mega_alone(config))


def test_sharded_checkpoint_is_the_same_model(saved, copy):
    tensors = load_file(copy / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for part in range(3):
        file = f"model-{part + 1:05}-of-00003.safetensors"
        mine = {name: tensors[name] for name in names[part::3]}
        save_file(mine, copy / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    (copy / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": weight_map}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert sorted(Checkpoint(copy).names()) == names
    config = load_config(saved)
    one, three = (load_model(path, config, mega_alone(config)) for path in (saved, copy))
    tokens = torch.arange(3, 30)[None]
    with torch.inference_mode():
        assert torch.equal(one(tokens).logits, three(tokens).logits)


def test_dummy_needs_a_config_only(tmp_path):
    config_of("gpt_oss").save_pretrained(tmp_path)
    config = load_config(tmp_path)
    first, same, other = (
        load_model(tmp_path, config, mega_alone(config), load_format="dummy", seed=seed)
        for seed in (0, 0, 1)
    )
    tokens = torch.arange(3, 30)[None]
    with torch.inference_mode():
        logits = first(tokens).logits
        assert torch.equal(logits, same(tokens).logits)
        assert not torch.equal(logits, other(tokens).logits)
    assert torch.isfinite(logits).all() and logits.std() > 0
    generation = load_generation_config(tmp_path, config)
    assert generation.eos_token_id == 2 and eos_token_ids(tmp_path, config) == [2]


def test_dummy_leaves_the_random_state_alone(tmp_path):
    config_of("qwen3_moe").save_pretrained(tmp_path)
    config = load_config(tmp_path)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load_model(tmp_path, config, mega_alone(config), load_format="dummy")
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_dummy_experts_are_the_same_for_any_number_of_ranks(family):
    config = config_of(family)
    layer = moe_layers_of(config)[0]

    def experts(ep_size: int, mode: GateMode = GateMode.INTERLEAVE):
        parts = [
            random_weights(
                layer,
                describe(config, ep_size=ep_size, ep_rank=rank, max_tokens=8)[0],
                mode,
                index=2,
                seed=9,
                std=0.02,
                device=torch.device("cpu"),
            )
            for rank in range(ep_size)
        ]
        names = [name for name in ("w1", "w1_scale", "w2", "w2_scale", "bias1", "bias2")]
        found = {name: [getattr(part, name) for part in parts] for name in names}
        return {name: torch.cat(v) for name, v in found.items() if v[0] is not None}

    one = experts(1)
    for ranks in (2, 4):
        many = experts(ranks)
        assert all(torch.equal(one[name], many[name]) for name in one)
    w1 = mx.dequantize(one["w1"], one["w1_scale"], "fp4")
    w2 = mx.dequantize(one["w2"], one["w2_scale"], "fp4")
    real = w1.unflatten(1, (-1, 2))
    assert 0.015 < real[:, : layer.inter].std() < 0.03
    assert not real[:, layer.inter :].any() and not w2[..., layer.inter :].any(), "padding is zero"
    assert len({expert.numpy().tobytes() for expert in one["w1"]}) == layer.experts
    concat = mx.dequantize(*(experts(1, GateMode.CONCAT)[n] for n in ("w1", "w1_scale")), "fp4")
    assert torch.equal(concat.unflatten(1, (2, -1)).transpose(1, 2), real)


def test_unknown_load_format(saved):
    config = load_config(saved)
    with pytest.raises(
        LaunchRefused, match="--load-format fast does not exist: use one of auto, dummy"
    ):
        load_model(saved, config, mega_alone(config), load_format="fast")


def test_tokenizer_of_a_config_alone(tmp_path):
    Qwen3MoeConfig(vocab_size=300, eos_token_id=7).save_pretrained(tmp_path)
    with pytest.raises(LaunchRefused, match="no tokenizer"):
        load_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path, load_format="dummy")
    text = "naïve  text,\n\ttabs, 日本語 🙂 and <3"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.encode()) and max(ids) < 300
    assert tokenizer.eos_token_id == 7 and len(tokenizer) == 300
    assert all(tokenizer.decode([i]) for i in range(300)), "every id can be read"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "user: hi\nassistant:"


def test_vocabulary_too_small_for_bytes():
    with pytest.raises(LaunchRefused, match="vocab_size=256 is too small"):
        byte_tokenizer(Qwen3MoeConfig(vocab_size=256, eos_token_id=0))


def test_layers_answer_in_order(saved):
    config = load_config(saved)
    model = load_model(saved, config, mega_alone(config))
    assert len(moe_layers(model)) == 2, "the layer between is dense"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@torch.inference_mode()
def test_a_gpu_holds_the_same_model(saved):
    config = load_config(saved)
    device = torch.device("cuda", torch.cuda.current_device())
    on_cpu = load_model(saved, config, mega_alone(config))
    on_gpu = load_model(saved, config, mega_alone(config, device=device), device=device)
    for cpu, gpu in zip(moe_layers(on_cpu), moe_layers(on_gpu), strict=True):
        for name in ("w1", "w1_scale", "w2", "w2_scale"):
            assert torch.equal(getattr(cpu.weights, name), getattr(gpu.weights, name).cpu())
    tokens = torch.arange(3, 30)[None]
    logits = on_gpu(tokens.to(device)).logits.cpu()
    assert relative_error(logits, on_cpu(tokens).logits) < 0.4
    run_empty(on_gpu)
