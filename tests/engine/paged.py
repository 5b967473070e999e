"""Batches of prompts, and of decode steps over a paged cache, for tests of attention, and plain torch to compare with."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F

PAGE = 32


def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention in float32 of one request's last queries ``[q, heads, size]`` over its keys ``[k, kv_heads, size]``."""
    queries, keys = query.shape[0], key.shape[0]
    mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    out = F.scaled_dot_product_attention(
        *(t.float().transpose(0, 1) for t in (query, key, value)), attn_mask=mask, enable_gqa=True
    )
    return out.transpose(0, 1)


def check_prompts(
    attention: Callable[..., tuple[torch.Tensor, None]],
    heads: int,
    kv_heads: int,
    size: int,
    queries: list[int],
    keys: list[int],
    device: torch.device,
    *,
    atol: float,
    rtol: float,
) -> None:
    """Assert that each request attends to its own keys and to no other's.

    Args:
        attention: the function under test.
        heads, kv_heads, size: of the attention.
        queries: of each request, the last tokens of its ``keys``.
        device: of all tensors. atol, rtol: how far from :func:`reference` an output may be.
    """
    generator = torch.Generator(device).manual_seed(7)

    def draw(tokens: int, heads: int) -> torch.Tensor:
        shape = (tokens, heads, size)
        return torch.randn(*shape, generator=generator, device=device).bfloat16()

    query = draw(sum(queries), heads)
    key, value = draw(sum(keys), kv_heads), draw(sum(keys), kv_heads)
    starts_q, starts_k = starts(queries, device), starts(keys, device)
    out, _ = attention(
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
        torch.testing.assert_close(out[0, rows].float(), expected, atol=atol, rtol=rtol)


class PagedBatch:
    """One new token for each of several requests, whose cached keys lie in scattered pages.

    Args:
        heads, kv_heads, size: of the attention.
        lengths: keys of each request, the new one included; 0 is padding.
        device: of all tensors.
    """

    def __init__(
        self, heads: int, kv_heads: int, size: int, lengths: list[int], device: torch.device
    ) -> None:
        generator = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, size, generator=generator).bfloat16().to(device)

        needed = [-(-n // PAGE) for n in lengths]
        pages = sum(needed) + 3
        order = torch.randperm(pages, generator=generator).tolist()
        self.lengths = lengths
        self.query = draw(len(lengths), heads)
        self.table = torch.full((len(lengths), max(needed) + 1), -1, dtype=torch.int32)
        # Unused slots hold what must never be read.
        self.k_cache, self.v_cache = (
            torch.full(
                (pages, PAGE, kv_heads, size), torch.nan, dtype=torch.bfloat16, device=device
            )
            for _ in range(2)
        )
        self.keys, self.values = ([draw(n, kv_heads) for n in lengths] for _ in range(2))
        self._slots = []
        for i, count in enumerate(needed):
            own = [order.pop() for _ in range(count)]
            self.table[i, :count] = torch.tensor(own, dtype=torch.int32)
            slots = [own[j // PAGE] * PAGE + j % PAGE for j in range(lengths[i])]
            self._slots.append(slots)
            for cache, rows in ((self.k_cache, self.keys[i]), (self.v_cache, self.values[i])):
                cache.view(-1, kv_heads, size)[slots[:-1]] = rows[:-1]
        self.table = self.table.to(device)
        self.untouched = self.k_cache.isnan().sum().item()

    def run(self, attention, **more) -> torch.Tensor:
        """Outputs ``[requests, heads, size]`` of an attention function, which writes the new keys into the cache."""
        device = self.query.device

        def last(rows: list[torch.Tensor]) -> torch.Tensor:
            zero = self.query.new_zeros(1, *self.k_cache.shape[2:])
            return torch.cat([each[-1:] if len(each) else zero for each in rows])

        count = len(self.lengths)
        live = [min(n, 1) for n in self.lengths]
        out, _ = attention(
            SimpleNamespace(),
            *(
                t.transpose(0, 1).unsqueeze(0)
                for t in (self.query, last(self.keys), last(self.values))
            ),
            None,
            cu_seq_lens_q=starts(live, device),
            cu_seq_lens_k=starts(self.lengths, device),
            max_length_q=1,
            block_table=self.table,
            k_cache=self.k_cache,
            v_cache=self.v_cache,
            **more,
        )
        assert out.shape == (1, count, *self.query.shape[1:])
        return out[0]

    def expected(self) -> torch.Tensor:
        """What :meth:`run` must give, float32; zero for padding."""
        rows = [
            (
                reference(self.query[i : i + 1], self.keys[i], self.values[i])
                if n
                else torch.zeros_like(self.query[i : i + 1], dtype=torch.float32)
            )
            for i, n in enumerate(self.lengths)
        ]
        return torch.cat(rows)

    def cache_is_as_it_should_be(self) -> bool:
        """Whether every key and value is in its slot and nothing else was written."""
        kv_heads, size = self.k_cache.shape[2:]
        right = True
        for slots, keys, values in zip(self._slots, self.keys, self.values, strict=True):
            for cache, rows in ((self.k_cache, keys), (self.v_cache, values)):
                right &= torch.equal(cache.view(-1, kv_heads, size)[slots], rows)
        written = sum(min(n, 1) for n in self.lengths) * kv_heads * size
        return right and self.k_cache.isnan().sum().item() == self.untouched - written


def starts(lengths: list[int], device: torch.device) -> torch.Tensor:
    """Where each request's rows start and the last one's end, int32 ``[requests + 1]``."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
