"""Choosing the next token of each request in a batch, reproducibly for each request alone.

Shape suffixes: N requests with a new token, V vocabulary.
"""

from __future__ import annotations

import secrets

import numpy as np
import torch

from atom.engine.protocol import SamplingParams, TokenLogprob

_ROWS_AT_ONCE = 64
"""Rows that are sampled together on a GPU: some 200 MB of float64 at a vocabulary of 150000."""


class RequestSampler:
    """The sampling of one request: its parameters and its own stream of uniform numbers.

    The stream depends on the seed alone, never on what else is in the batch, so a request with a seed gives the same
    tokens alone and in company (as far as its logits are the same).
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._uniform: np.random.Generator | None = None

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.params.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether ``top_k`` or ``top_p`` may leave tokens out."""
        return bool(self.params.top_k) or self.params.top_p < 1

    def uniform(self) -> float:
        """The next number of the stream, in [0, 1)."""
        if self._uniform is None:
            seed = secrets.randbits(64) if self.params.seed is None else self.params.seed % 2**64
            self._uniform = np.random.Generator(np.random.Philox(key=seed))
        return float(self._uniform.random())


def choose(
    logits_NV: torch.Tensor,
    samplers: list[RequestSampler],
    likeliest: list[int] | None = None,
) -> list[int]:
    """The next token of each request.

    Args:
        logits_NV: logits, one row a request; f32 on a CPU.
        samplers: one a row.
        likeliest: the likeliest token of each row where the caller knows it.

    Returns:
        Token ids, one a row.
    """
    if likeliest is None:
        # numpy's search is vectorized; torch's took eight times as long on CPU at 16 rows of 5120.
        rows = logits_NV.numpy() if logits_NV.device.type == "cpu" else logits_NV
        likeliest = rows.argmax(-1).tolist()
    tokens = list(likeliest)
    sampled = [row for row, sampler in enumerate(samplers) if not sampler.greedy]
    if logits_NV.device.type == "cpu":
        for row in sampled:
            tokens[row] = _sample_row(logits_NV[row], samplers[row])
        return tokens
    # Apart, as the order in which probabilities are added up must not depend on a request's company.
    for cut in (False, True):
        rows = [row for row in sampled if samplers[row].truncates == cut]
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            some = rows[first : first + _ROWS_AT_ONCE]
            drawn = sample_rows(logits_NV[some], [samplers[row] for row in some], cut=cut)
            for row, token in zip(some, drawn, strict=True):
                tokens[row] = token
    return tokens


def sample_rows(logits_NV: torch.Tensor, samplers: list[RequestSampler], *, cut: bool) -> list[int]:
    """Draw a token for each of several rows at once, for a device on which every operation has a price.

    Args:
        logits_NV: logits, one row a request.
        samplers: one a row.
        cut: whether probabilities are sorted and cut by ``top_k`` and ``top_p``.
    """
    count = len(samplers)
    if count == 1:
        # A lone row is added up by another algorithm than one of several.
        logits_NV = logits_NV.expand(2, -1)
    device, vocab = logits_NV.device, logits_NV.shape[1]

    def column(values: list[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
        values = values * 2 if count == 1 else values
        return torch.tensor(values, dtype=dtype, device=device)[:, None]

    temperatures = column([max(s.params.temperature, 1e-4) for s in samplers])
    probs_NV = torch.softmax(logits_NV.double() / temperatures, dim=-1)
    ids_NV = None
    kept = column([s.params.top_k or vocab for s in samplers], torch.int64).clamp(max=vocab)
    if cut:
        probs_NV, ids_NV = torch.sort(probs_NV, dim=-1, descending=True, stable=True)
    cumulative_NV = torch.cumsum(probs_NV, dim=-1)
    if cut:
        top_p = column([s.params.top_p for s in samplers])
        reached = torch.searchsorted(cumulative_NV, top_p * cumulative_NV.gather(1, kept - 1)) + 1
        kept = torch.where(top_p < 1, torch.minimum(kept, reached), kept)
    drawn = column([s.uniform() for s in samplers]) * cumulative_NV.gather(1, kept - 1)
    index = torch.searchsorted(cumulative_NV, drawn, right=True)
    index = torch.minimum(index, kept - 1)
    tokens = index if ids_NV is None else ids_NV.gather(1, index)
    return tokens[:count, 0].tolist()


def _sample_row(logits_V: torch.Tensor, sampler: RequestSampler) -> int:
    params = sampler.params
    # Below about 1e-4 the quotient overflows float32; the limit of the distribution is the likeliest token.
    scaled_V = logits_V.double() / max(params.temperature, 1e-4)
    probs_V = torch.softmax(scaled_V, dim=-1)
    sorted_V, ids_V = torch.sort(probs_V, descending=True, stable=True)
    keep = sorted_V.numel()
    if params.top_k:
        keep = min(keep, params.top_k)
    cumulative_V = torch.cumsum(sorted_V[:keep], dim=0)
    if params.top_p < 1:
        # The smallest set whose probability reaches top_p, so at least one token.
        limit = params.top_p * float(cumulative_V[-1])
        keep = min(keep, int(torch.searchsorted(cumulative_V, limit)) + 1)
        cumulative_V = cumulative_V[:keep]
    drawn = sampler.uniform() * float(cumulative_V[-1])
    index = int(torch.searchsorted(cumulative_V, drawn, right=True))
    return int(ids_V[min(index, keep - 1)])


def token_logprobs(
    logits_NV: torch.Tensor, tokens: list[int], counts: list[int | None]
) -> list[TokenLogprob | None]:
    """Log probabilities of chosen tokens and of the likeliest ones.

    Args:
        logits_NV: logits, one row a token. The distribution is that of the model: neither temperature nor top_p
            is applied, as OpenAI and vLLM report it.
        tokens: the chosen token of each row.
        counts: how many likeliest alternatives each row reports; None reports nothing for the row.

    Returns:
        One entry a row, None where ``counts`` says so.
    """
    wanted = [row for row, count in enumerate(counts) if count is not None]
    result: list[TokenLogprob | None] = [None] * len(tokens)
    if not wanted:
        return result
    logprobs = torch.log_softmax(logits_NV[wanted].float(), dim=-1)
    most = min(max(counts[row] or 0 for row in wanted), logprobs.shape[-1])
    top_values, top_ids = (part.tolist() for part in torch.topk(logprobs, most, dim=-1))
    chosen = torch.tensor([tokens[row] for row in wanted], device=logprobs.device)
    chosen_values = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
    for i, row in enumerate(wanted):
        count = counts[row] or 0
        top = list(zip(top_ids[i][:count], top_values[i][:count], strict=True))
        result[row] = TokenLogprob(tokens[row], chosen_values[i], top)
    return result
