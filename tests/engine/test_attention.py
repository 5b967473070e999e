"""The CPU attention against torch's own, request by request."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from atom.engine.attention import LONG_QUERY, paged_attention

HEADS, KV_HEADS, SIZE = 4, 2, 64


def starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)


def reference(query, key, value):
    queries, keys = query.shape[0], key.shape[0]
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    out = F.scaled_dot_product_attention(
        *(t.float().transpose(0, 1) for t in (query, key, value)), attn_mask=mask, enable_gqa=True
    )
    return out.transpose(0, 1)


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
    generator = torch.Generator().manual_seed(7)

    def draw(tokens, heads):
        return torch.randn(tokens, heads, SIZE, generator=generator).bfloat16()

    query = draw(sum(queries), HEADS)
    key, value = draw(sum(keys), KV_HEADS), draw(sum(keys), KV_HEADS)
    starts_q, starts_k = starts(queries), starts(keys)
    out, _ = paged_attention(
        SimpleNamespace(),
        *(t.transpose(0, 1).unsqueeze(0) for t in (query, key, value)),
        None,
        cu_seq_lens_q=starts_q,
        cu_seq_lens_k=starts_k,
        max_length_q=max(queries),
    )
    for i in range(len(queries)):
        rows, span = slice(starts_q[i], starts_q[i + 1]), slice(starts_k[i], starts_k[i + 1])
        expected = reference(query[rows], key[span], value[span])
        # bf16 keeps 8 bits: half a unit in the last place of values up to about 2, and a second rounding inside sdpa.
        torch.testing.assert_close(out[0, rows].float(), expected, atol=2e-2, rtol=1e-2)


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
            cu_seq_lens_q=starts([1] * (last - first)),
            cu_seq_lens_k=starts(lengths),
            max_length_q=1,
        )[0]

    assert torch.equal(run(0, 1, [25])[0, 0], run(0, 2, [25, 35])[0, 0])
