"""A whole transformers model whose MoE layers run on the gfx1250 backend over doubles: the gloo backend's logits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from atom.engine.loading import load_model
from atom.engine.model_files import load_config
from atom.moe import expert_parallel, mori_v2
from atom.moe.distributed import DistributedMegaMoE
from atom.moe.model_config import describe

CPU = torch.device("cpu")


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 256,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 128,
        "max_position_embeddings": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("wire, force", [("bf16", "0"), ("fp4", "0"), ("fp8", "1")])
def test_logits_are_the_gloo_backend_s(install, monkeypatch, model_folder, wire, force):
    install(aiter="current", mori="at_1_2_4")
    monkeypatch.setenv("MEGA_WIRE", wire)
    monkeypatch.setenv("AITER_FORCE_A8W4", force)
    config = load_config(model_folder)
    geometry, recipe = describe(config, ep_size=1, ep_rank=0, max_tokens=64)
    choice = mori_v2.resolve_choice(recipe)
    ids = torch.randint(0, 128, (1, 40), generator=torch.Generator().manual_seed(0))
    logits = []
    for mega in (
        DistributedMegaMoE(geometry, recipe, choice, group=None, device=CPU),
        mori_v2.build(geometry, recipe, choice, group=None, device=CPU, free_bytes=2**40),
    ):
        model = load_model(
            model_folder, config, mega, load_format="dummy", group=None, device=CPU, seed=0
        )
        with torch.inference_mode():
            logits.append(model(ids).logits)
            expert_parallel.run_empty(model)
        mega.close()
    assert torch.isfinite(logits[0]).all()
    assert torch.equal(*logits)
