"""The batcher against transformers' own generate: whatever the attention, the same greedy tokens."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

from atom.engine.attention import NAME
from atom.engine.batching import BatchLimits, ContinuousBatcher
from atom.engine.paged_cache import check_cacheable
from atom.engine.protocol import SamplingParams
from atom.errors import LaunchRefused

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(
        **COMMON, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "mixtral": MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": GptOssConfig(
        **COMMON, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
    ),
    "deepseek_v3": DeepseekV3Config(
        **{**COMMON, "num_key_value_heads": 4},
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=24,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
    ),
}


def limits(**changes: int) -> BatchLimits:
    sizes = {
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "kv_tokens": 2048,
    }
    return BatchLimits(**{**sizes, **changes})


def build(name: str):
    torch.manual_seed(1)
    # float32, so that a different order of additions does not change the likeliest token.
    model = AutoModelForCausalLM.from_config(deepcopy(CONFIGS[name]), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


def greedy(batcher: ContinuousBatcher, prompts: list[list[int]], count: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    tokens: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        batcher.add(str(i), prompt, params)
    with torch.inference_mode():
        while batcher.has_requests:
            assert batcher.prepare()
            for output in batcher.step():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return [tokens[str(i)] for i in range(len(prompts))]


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_generate(name):
    model = build(name)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 96, (n,), generator=generator).tolist() for n in (3, 40, 17, 70)]
    expected = []
    for prompt in prompts:
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=12,
                do_sample=False,
                pad_token_id=0,
            )
        expected.append(out[0, len(prompt) :].tolist())
    assert greedy(ContinuousBatcher(model, limits(), []), prompts, 12) == expected


def test_one_token_a_batch_still_serves():
    model = build("qwen3_moe")
    prompts = [[5, 6, 7, 8], [9, 10]]
    alone = greedy(
        ContinuousBatcher(model, limits(max_num_seqs=1, max_num_batched_tokens=1), []), prompts, 4
    )
    assert alone == greedy(ContinuousBatcher(model, limits(), []), prompts, 4)


def test_an_attention_that_the_cache_cannot_hold_is_refused_by_name():
    config = deepcopy(CONFIGS["qwen3_moe"])
    check_cacheable(config)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(LaunchRefused, match=r"qwen3_moe.*linear_attention"):
        check_cacheable(config)


def test_the_paged_attention_is_for_bf16_on_cpu():
    model = build("qwen3_moe").bfloat16()
    ContinuousBatcher(model, limits(), [])
    assert model.config._attn_implementation == NAME


def test_limits_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="max_num_seqs=8"):
        limits(max_num_batched_tokens=4)
    with pytest.raises(ValueError, match="KV cache of 100 tokens"):
        limits(kv_tokens=100)


def test_a_request_that_cannot_fit_is_refused_with_its_numbers():
    batcher = ContinuousBatcher(build("qwen3_moe"), limits(), [])
    with pytest.raises(ValueError, match="120 tokens and max_tokens=9"):
        batcher.add("x", [1] * 120, SamplingParams(max_tokens=9))
    assert not batcher.has_requests
