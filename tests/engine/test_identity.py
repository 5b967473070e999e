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


def every_case(rank: int, shared: list, lopsided: list) -> dict[str, tuple]:
    return {
        "0": both_wires(rank, shared, "0"),
        "1": both_wires(rank, shared, "1"),
        "idle": both_wires(rank, lopsided, "0"),
    }


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, tuple]]:
    """What each rank gave in each case; one start of two ranks serves them all."""
    return run_ranks(2, every_case, token_ids(2), [token_ids(1)[0][:4], []], timeout=170)


@pytest.mark.parametrize("operand", ["0", "1"], ids=["bf16 and fp4", "bf16 and fp8"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_and_logits_are_the_same_on_both_wires(ranks, operand, request):
    assert len(PROMPTS) >= 32
    if ranks == 1:
        results = [both_wires(0, token_ids(1), operand)]
    else:
        results = [rank[operand] for rank in request.getfixturevalue("two_ranks")]
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


def test_a_rank_without_requests_serves_the_others_experts(two_ranks):
    busy, idle = (rank["idle"] for rank in two_ranks)
    (tokens, logits, _), (q_tokens, q_logits, _) = busy
    assert tokens == q_tokens and len(tokens) == 4
    assert all(torch.equal(a, b) for a, b in zip(logits, q_logits, strict=True))
    for tokens, logits, counters in idle:
        assert tokens == {} and logits == []
        assert counters["combine"] > 0 and counters["rows"] == 0
