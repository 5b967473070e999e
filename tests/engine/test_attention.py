"""The CPU attention against torch's own, request by request."""

from types import SimpleNamespace

import pytest
import torch

from atom.engine.attention import LONG_QUERY, paged_attention
from tests.engine.paged import check_prompts, starts

HEADS, KV_HEADS, SIZE = 4, 2, 64
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ([1, 1, 1], [1, 17, 300]),
        ([5, 1, LONG_QUERY, 3], [5, 9, LONG_QUERY, 40]),
        ([LONG_QUERY + 9, 2], [LONG_QUERY + 50, 2]),
        ([64], [64]),
    ],
    ids=["decode", "mixed", "long prompt after a cached prefix", "prompt"],
)
def test_each_request_attends_to_its_own_keys(queries, keys):
    # bf16 keeps 8 bits: half a unit in the last place of values up to about 2, and a second rounding inside sdpa.
    close = {"atol": 2e-2, "rtol": 1e-2}
    check_prompts(paged_attention, HEADS, KV_HEADS, SIZE, queries, keys, CPU, **close)


def test_a_request_does_not_depend_on_its_company():
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(2, HEADS, SIZE, generator=generator).bfloat16()
    key = torch.randn(60, KV_HEADS, SIZE, generator=generator).bfloat16()
    value = torch.randn(60, KV_HEADS, SIZE, generator=generator).bfloat16()

    def run(first, last, lengths):
        return paged_attention(
            SimpleNamespace(),
            query[first:last].transpose(0, 1).unsqueeze(0),
            key[: sum(lengths)].transpose(0, 1).unsqueeze(0),
            value[: sum(lengths)].transpose(0, 1).unsqueeze(0),
            None,
            cu_seq_lens_q=starts([1] * (last - first), CPU),
            cu_seq_lens_k=starts(lengths, CPU),
            max_length_q=1,
        )[0]

    assert torch.equal(run(0, 1, [25])[0, 0], run(0, 2, [25, 35])[0, 0])
