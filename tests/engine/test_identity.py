"""What the project promises: the wire changes the bytes sent and nothing else, through the whole model."""

from __future__ import annotations

import pytest
import torch

from atom.engine import loading
from tests.engine.cluster import MODEL, generate
from tests.ranks import run_ranks

PROMPTS = [
    *(
        f"def {name}("
        for name in ["parse", "load", "read_file", "__init__", "main", "encode", "close"]
    ),
    *(
        f"import {name}\n"
        for name in ["os", "re", "sys", "json", "typing", "collections", "threading"]
    ),
    *(
        f"class {name}"
        for name in ["Parser", "Queue", "Error(Exception):", "Node", "HTTPServer", "Counter"]
    ),
    "for key, value in",
    "    if not isinstance(",
    "try:\n    import",
    "with open(path) as f:\n",
    '"""',
    "    return self.",
    "# Copyright",
    "raise ValueError(",
    "if __name__ == '__main__':\n",
    "    @property\n    def",
    "while True:\n    line =",
    "from collections import",
]
MAX_TOKENS = 12


def token_ids(ranks: int) -> list[list[list[int]]]:
    tokenizer = loading.load_tokenizer(loading.resolve_model_path(MODEL))
    ids = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    return [ids[rank::ranks] for rank in range(ranks)]


def both_wires(rank: int, prompts: list[list[list[int]]], operand: str) -> tuple:
    quantized = "fp8" if operand == "1" else "fp4"
    environ = {"AITER_FORCE_A8W4": operand}
    return tuple(
        generate(rank, prompts, {**environ, "MEGA_WIRE": wire}, MAX_TOKENS)
        for wire in ("bf16", quantized)
    )


@pytest.mark.parametrize("operand", ["0", "1"], ids=["bf16 and fp4", "bf16 and fp8"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_and_logits_are_the_same_on_both_wires(ranks, operand):
    assert len(PROMPTS) >= 32
    prompts = token_ids(ranks)
    if ranks == 1:
        results = [both_wires(0, prompts, operand)]
    else:
        results = run_ranks(ranks, both_wires, prompts, operand, timeout=120)
    hidden = loading.load_config(loading.resolve_model_path(MODEL)).hidden_size
    for (tokens, logits, counters), (q_tokens, q_logits, q_counters) in results:
        assert tokens == q_tokens
        assert all(len(ids) == MAX_TOKENS for ids in tokens.values())
        assert len(logits) == len(q_logits) > 0
        assert all(torch.equal(a, b) for a, b in zip(logits, q_logits, strict=True))
        assert counters["rows"] == q_counters["rows"]
        assert counters["payload"] == counters["rows"] * hidden * 2
        assert q_counters["payload"] == q_counters["rows"] * hidden // (1 if operand == "1" else 2)
        assert (counters["rows"] > 0) == (ranks > 1)


def test_a_rank_without_requests_serves_the_others_experts():
    prompts = [token_ids(1)[0][:4], []]
    results = run_ranks(2, both_wires, prompts, "0", timeout=120)
    for (busy, logits, _), (q_busy, q_logits, _) in results[:1]:
        assert busy == q_busy and len(busy) == 4
        assert all(torch.equal(a, b) for a, b in zip(logits, q_logits, strict=True))
    for tokens, logits, counters in results[1]:
        assert tokens == {} and logits == []
        assert counters["combine"] > 0 and counters["rows"] == 0
