"""Balanced routing: equal loads, distinct experts, the expected spread over ranks, and no way into an accuracy run."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from atom.errors import LaunchRefused
from atom.moe import balance
from atom.moe.balance import BalancedRouting
from atom.moe.spec import MoEGeometry
from atom.wire.traffic import expected_ranks

ROOT = Path(__file__).resolve().parent.parent.parent


def geometry(experts: int, topk: int, ranks: int = 1, rank: int = 0, tokens: int = 512):
    """Sizes of a layer; those that routing does not depend on are small."""
    return MoEGeometry(
        hidden=64,
        inter=32,
        experts=experts,
        topk=topk,
        ep_size=ranks,
        ep_rank=rank,
        max_tokens=tokens,
    )


SIZES = [(16, 4), (384, 6), (256, 8), (8, 8), (5, 1), (10, 4), (7, 3)]


@pytest.mark.parametrize(("experts", "topk"), SIZES)
def test_every_expert_has_the_same_load(experts, topk):
    routing = BalancedRouting(geometry(experts, topk, tokens=1000))
    for tokens in (0, 1, 3, routing.cycle, 5 * routing.cycle, 100, 1000):
        ids = routing(torch.zeros(tokens, topk, dtype=torch.int32))
        assert ids.shape == (tokens, topk) and ids.dtype == torch.int32
        assert all(len(set(row)) == topk for row in ids.tolist()), "a token's experts are distinct"
        load = torch.bincount(ids.flatten(), minlength=experts)
        assert len(load) == experts
        assert load.max() - load.min() <= (0 if tokens % routing.cycle == 0 else 1)


def test_ranks_get_the_same_and_tokens_go_to_as_many_as_expected():
    experts, topk, ranks, tokens = 384, 6, 8, 64 * 64
    received = torch.zeros(ranks)
    visited = 0.0
    for rank in range(ranks):
        routing = BalancedRouting(geometry(experts, topk, ranks, rank, tokens))
        owners = routing(torch.zeros(tokens, topk, dtype=torch.int64)) // (experts // ranks)
        received += torch.bincount(owners.flatten(), minlength=ranks)
        visited += sum(len(set(row)) for row in owners.tolist()) / tokens / ranks
    assert received.max() == received.min() == tokens * topk
    assert visited == pytest.approx(
        expected_ranks(experts=experts, topk=topk, ep_size=ranks), rel=0.01
    )


def test_is_the_same_every_time_and_another_on_each_rank():
    ids = torch.zeros(64, 4, dtype=torch.int32)
    first, again = (BalancedRouting(geometry(16, 4, 2, 0))(ids) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, BalancedRouting(geometry(16, 4, 2, 1))(ids))


def test_wrapped_layer_gets_everything_else_as_it_came():
    seen = []
    routing = BalancedRouting(geometry(16, 4))
    layer = routing.wrap(lambda x, ids, weights: seen.append((x, ids, weights)) or x)
    x, ids, weights = torch.ones(5, 64), torch.zeros(5, 4, dtype=torch.int64), torch.rand(5, 4)
    assert layer(x, ids, weights) is x
    assert seen[0][0] is x and seen[0][2] is weights
    assert torch.equal(seen[0][1], routing(ids)) and not torch.equal(seen[0][1], ids)


def test_is_off_unless_asked_for_and_loud_once_a_rank(monkeypatch, caplog):
    sizes = geometry(16, 4, tokens=77)
    monkeypatch.delenv("ATOM_FAKE_EPLB", raising=False)
    assert balance.configured(sizes) is None
    monkeypatch.setenv("ATOM_FAKE_EPLB", "1")
    with caplog.at_level(logging.WARNING):
        assert balance.configured(sizes) is balance.configured(sizes) is not None
    assert len(caplog.records) == 1 and "nonsense" in caplog.text
    monkeypatch.setenv("ATOM_FAKE_EPLB", "yes")
    with pytest.raises(LaunchRefused, match="ATOM_FAKE_EPLB='yes'"):
        balance.configured(sizes)


def test_accuracy_runs_refuse_it(monkeypatch):
    monkeypatch.setenv("ATOM_FAKE_EPLB", "1")
    command = [sys.executable, str(ROOT / "scripts" / "accuracy.py"), "tiny-moe-fp4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "the environment has ATOM_FAKE_EPLB" in done.stderr and "Unset it" in done.stderr
