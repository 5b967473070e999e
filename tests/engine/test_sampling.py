"""Sampling: the distribution that is drawn from, and that a request's tokens are its own affair."""

import math

import pytest
import torch

from atom.engine.protocol import SamplingParams
from atom.engine.sampling import RequestSampler, choose, sample_rows, token_logprobs

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -20.0]])


def draw(count: int, **params) -> torch.Tensor:
    sampler = RequestSampler(SamplingParams(max_tokens=1, **params))
    tokens = [choose(LOGITS, [sampler])[0] for _ in range(count)]
    return torch.bincount(torch.tensor(tokens), minlength=5).double() / count


def test_temperature_zero_is_the_likeliest():
    assert draw(10, temperature=0)[0] == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_scales_the_distribution(temperature):
    expected = torch.softmax(LOGITS[0].double() / temperature, 0)
    # 4000 draws: a share's standard deviation is at most 0.008; five of them.
    assert (draw(4000, temperature=temperature, seed=1) - expected).abs().max() < 0.04


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    probabilities = torch.softmax(LOGITS[0].double(), 0)
    assert probabilities[0] < 0.7 < probabilities[:2].sum()
    shares = draw(500, temperature=1.0, top_p=0.7, seed=2)
    assert shares[2:].sum() == 0 and shares[1] > 0


def test_a_tiny_top_p_still_leaves_one_token():
    assert draw(20, temperature=1.0, top_p=1e-9, seed=2)[0] == 1


def test_top_k_cuts_the_tail():
    shares = draw(500, temperature=5.0, top_k=2, seed=3)
    assert shares[2:].sum() == 0 and shares[1] > 0


def test_a_very_small_temperature_does_not_overflow():
    assert draw(20, temperature=1e-30, seed=3)[0] == 1


def test_a_seed_gives_the_same_tokens_alone_and_in_company():
    def params(seed):
        return SamplingParams(max_tokens=1, temperature=1.0, seed=seed)

    alone = RequestSampler(params(5))
    first = [choose(LOGITS, [alone])[0] for _ in range(30)]
    with_others = [RequestSampler(params(seed)) for seed in (9, 5, 11)]
    second = [choose(LOGITS.expand(3, -1), with_others)[1] for _ in range(30)]
    assert first == second
    assert len(set(first)) > 1


def test_without_a_seed_requests_differ():
    runs = {tuple(draw(40, temperature=3.0).tolist()) for _ in range(6)}
    assert len(runs) > 1


def test_logprobs_are_of_the_unscaled_distribution():
    log_softmax = torch.log_softmax(LOGITS[0], 0).tolist()
    none, some = token_logprobs(LOGITS.expand(2, -1), [1, 1], [None, 2])
    assert none is None
    assert math.isclose(some.logprob, log_softmax[1], rel_tol=1e-6)
    assert [token for token, _ in some.top] == [0, 1]
    assert math.isclose(some.top[0][1], log_softmax[0], rel_tol=1e-6)


def test_more_logprobs_than_tokens_are_cut():
    (some,) = token_logprobs(LOGITS, [0], [20])
    assert len(some.top) == 5


CUTS = [
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 0.5, "top_k": 3},
    {"temperature": 2.0, "top_k": 40, "top_p": 0.9},
    {"temperature": 1e-30, "top_p": 0.99},
    {"temperature": 1.0, "top_k": 1000},
]


def samplers(kinds: list[dict]) -> list[RequestSampler]:
    return [
        RequestSampler(SamplingParams(max_tokens=1, seed=i, **kind)) for i, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize("count", [1, 5])
def test_rows_drawn_together_are_those_drawn_one_by_one(count):
    logits = torch.randn(count, 300, generator=torch.Generator().manual_seed(2)) * 3
    alone, together = samplers(CUTS[:count]), samplers(CUTS[:count])
    for _ in range(50):
        assert sample_rows(logits, together, cut=True) == choose(logits, alone)


@pytest.mark.parametrize("cut", [False, True])
def test_rows_drawn_together_follow_the_distribution(cut):
    (sampler,) = samplers([{"temperature": 1.5}])
    tokens = [sample_rows(LOGITS, [sampler], cut=cut)[0] for _ in range(4000)]
    found = torch.bincount(torch.tensor(tokens), minlength=5).double() / 4000
    expected = torch.softmax(LOGITS[0].double() / 1.5, 0)
    assert (found - expected).abs().max() < 0.04


def test_likeliest_tokens_that_are_known_are_taken_as_they_are():
    greedy, sampled = samplers([{"temperature": 0}, {"temperature": 1.0, "top_k": 1}])
    assert choose(LOGITS.expand(2, -1), [greedy, sampled], [3, 3]) == [3, 0]
