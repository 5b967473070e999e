"""The torch.distributed backend on real gloo ranks: bit identity across wires, the reference, bytes, and refusals.

Each rank count is started once; its ranks run every case and send home what they got.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from atom.errors import LaunchRefused
from atom.moe import distributed, exchange
from atom.moe.distributed import DistributedMegaMoE
from atom.moe.mega_moe import MegaMoE
from atom.moe.reference import exact_layer, quantized_layer
from atom.moe.rows import RowFormat, TorchRows
from atom.moe.spec import ExpertRecipe, ExpertWeights, MoEGeometry
from atom.wire import mx_reference
from atom.wire.format import AOperand, Wire, WireChoice, WireLayout
from tests.moe.layers import (
    RECIPES,
    geometry,
    kernel_activation,
    random_experts,
    random_tokens,
    relative_error,
)
from tests.ranks import run_ranks

CPU = torch.device("cpu")
RANKS = (1, 2, 4)
TOKENS = 21
"""Tokens of a rank that has some."""

ROUTINGS = ("random", "skewed", "empty", "uneven", "own", "next", "one rank each")
PAIRS = (
    (Wire.BF16, AOperand.FP4),
    (Wire.FP4, AOperand.FP4),
    (Wire.BF16, AOperand.FP8),
    (Wire.FP8, AOperand.FP8),
)


@dataclass(frozen=True)
class Case:
    """One layer on all ranks."""

    recipe: str
    routing: str
    wire: Wire
    operand: AOperand

    def __str__(self) -> str:
        return f"{self.recipe}, {self.routing}, {self.wire} wire, {self.operand} operand"


# Every recipe with one routing, and every routing with one recipe.
CASES = [
    Case(recipe, routing, *pair)
    for pair in PAIRS
    for recipe, routing in (
        *itertools.product(RECIPES, ["random"]),
        *itertools.product(["silu, clamped, biased"], ROUTINGS[1:]),
    )
]


def choice(wire: Wire, operand: AOperand) -> WireChoice:
    return WireChoice(wire=wire, a_operand=operand, wire_found="", a_operand_found="")


def tokens_of(
    rank: int, ranks: int, routing: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A rank's tokens; the same numbers whichever wire carries them."""
    shape = geometry(ranks=ranks)
    count = TOKENS
    if rank == ranks - 1 and routing in ("empty", "uneven"):
        count = 0 if routing == "empty" else 3
    x, weights, ids = random_tokens(shape, count, 100 * ranks + rank)
    local = shape.local_experts
    if routing == "skewed":
        ids = ids % local
    elif routing == "own":
        ids = ids % local + rank * local
    elif routing == "next":
        ids = ids % local + (rank + 1) % ranks * local
    elif routing == "one rank each":
        ids = ids % local + (torch.arange(count) % ranks * local).int().unsqueeze(1)
    return x, weights, ids


def local_part(
    weights: ExpertWeights, shape: MoEGeometry, device: torch.device = CPU
) -> ExpertWeights:
    here = slice(shape.ep_rank * shape.local_experts, (shape.ep_rank + 1) * shape.local_experts)
    return ExpertWeights(
        **{
            field.name: None if value is None else value[here].clone().to(device)
            for field in dataclasses.fields(weights)
            for value in [getattr(weights, field.name)]
        }
    )


@dataclass
class Outcome:
    """What a rank got: its tokens' results, what its experts worked on, and the bytes it sent."""

    out: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    counters: dict[str, int]


def every_case(rank: int, ranks: int) -> dict[Case, Outcome]:
    """Run by each rank."""
    shape = geometry(ranks=ranks, rank=rank)
    group = dist.group.WORLD if ranks > 1 else None
    outcomes = {}
    for case in CASES:
        recipe = RECIPES[case.recipe]
        mega = DistributedMegaMoE(shape, recipe, choice(case.wire, case.operand), group, CPU)
        assert isinstance(mega, MegaMoE)
        weights = mega.prepare(local_part(random_experts(shape, recipe, 0), shape))
        x, topk_weights, topk_ids = tokens_of(rank, ranks, case.routing)
        arrived, _ = mega.dispatch(x, topk_weights, topk_ids)
        parts = (arrived.codes, arrived.scales, arrived.topk_ids, arrived.topk_weights)
        kept = [part.clone() for part in parts]
        before = mega.counters.snapshot()
        # Other tokens in between: nothing may be left over from them. Routers give int64 ids.
        mega(*random_layer_input(shape, rank), weights)
        between = mega.counters.snapshot()
        out = mega(x, topk_weights, topk_ids.long(), weights)
        after = mega.counters.snapshot()
        counters = {name: after[name] - between[name] for name in after}
        assert before["calls"] == 0 and counters["rows"] == before["rows"]
        mega.close()
        mega.close()
        outcomes[case] = Outcome(out, *kept, counters)
    return outcomes


@contextmanager
def messages(shared: bool, fit: int | None):
    """What carries short messages of a MegaMoE that is built inside, and the bytes of rows that fit into one."""
    with ExitStack() as stack:
        environ = {"ATOM_SHARED_MEMORY": str(int(shared))}
        stack.enter_context(mock.patch.dict(os.environ, environ))
        if fit is not None:
            stack.enter_context(mock.patch.object(exchange, "EAGER_BYTES", fit))
            stack.enter_context(mock.patch.object(distributed, "MAILBOX_BYTES", fit))
        yield


def with_small_messages(rank: int, ranks: int) -> tuple[list[str], int]:
    """Cases whose results or bytes changed with what carries messages, or when fewer rows, or none, fit into one.

    Also how often a layer had begun with mailboxes when others' rows turned out not to fit into them.
    """
    shape = geometry(ranks=ranks, rank=rank)
    recipe = RECIPES["silu"]
    weights = local_part(random_experts(shape, recipe, 0), shape)
    changed = []
    late = mock.patch.object(
        DistributedMegaMoE, "_late", autospec=True, side_effect=DistributedMegaMoE._late
    )
    interrupted = late.start()
    for routing, wire in itertools.product(ROUTINGS, (Wire.BF16, Wire.FP4)):
        outs, counters = [], []
        for shared, fit in itertools.product((True, False), (None, 900, 0)):
            with messages(shared, fit):
                pair = choice(wire, AOperand.FP4)
                mega = DistributedMegaMoE(shape, recipe, pair, dist.group.WORLD, CPU)
            assert mega.built.transport == ("gloo+shm" if shared else "gloo")
            prepared = mega.prepare(weights)
            for _ in range(2):
                outs.append(mega(*tokens_of(rank, ranks, routing), prepared))
            counters.append(mega.counters)
            mega.close()
        if not all(torch.equal(out, outs[0]) for out in outs) or counters[1:] != counters[:-1]:
            changed.append(f"{routing}, {wire} wire")
    late.stop()
    return changed, interrupted.call_count


def random_layer_input(shape: MoEGeometry, rank: int):
    return random_tokens(shape, 3 + 2 * rank, 999 + rank)


@pytest.fixture(scope="module", params=RANKS, ids=lambda n: f"{n} ranks")
def outcomes(request) -> list[dict[Case, Outcome]]:
    if request.param == 1:
        return [every_case(0, 1)]
    return run_ranks(request.param, every_case, request.param, timeout=120)


@pytest.fixture
def one_thread():
    """Small operations on many threads wait for each other where the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tokens_of_all(outcomes, routing: str):
    ranks = len(outcomes)
    parts = zip(*(tokens_of(rank, ranks, routing) for rank in range(ranks)), strict=True)
    return tuple(torch.cat(part) for part in parts)


def test_layer_outputs_are_equal_across_wires(outcomes):
    for case in CASES:
        if case.wire is Wire.BF16:
            quantizing = dataclasses.replace(case, wire=case.operand.wire)
            for rank, found in enumerate(outcomes):
                one, other = found[case], found[quantizing]
                assert torch.equal(one.out, other.out), f"rank {rank}, {case}"
                assert torch.equal(one.codes, other.codes), f"rank {rank}, {case}"
                assert torch.equal(one.scales, other.scales), f"rank {rank}, {case}"


def test_layer_outputs_are_the_references_to_the_bit(outcomes, one_thread):
    shape = geometry(ranks=len(outcomes))
    for case in CASES:
        if case.wire is not Wire.BF16:
            continue  # equal to the bf16 wire's, as the test above has found
        recipe = RECIPES[case.recipe]
        wanted = quantized_layer(
            *tokens_of_all(outcomes, case.routing),
            random_experts(shape, recipe, 0),
            shape,
            recipe,
            case.operand,
            activation=kernel_activation,
        )
        assert torch.equal(torch.cat([found[case].out for found in outcomes]), wanted), str(case)


def test_layer_error_is_the_same_on_both_wires(outcomes):
    shape, recipe = geometry(ranks=len(outcomes)), RECIPES["silu"]
    wanted = exact_layer(
        *tokens_of_all(outcomes, "random"), random_experts(shape, recipe, 0), recipe
    )
    errors = {
        (wire, operand): relative_error(
            torch.cat([o[Case("silu", "random", wire, operand)].out for o in outcomes]), wanted
        )
        for wire, operand in PAIRS
    }
    for (wire, operand), error in errors.items():
        print(f"{len(outcomes)} ranks, {operand} A operand, {wire} wire: layer error {error:.6f}")
    for operand in AOperand:
        assert errors[Wire.BF16, operand] == errors[operand.wire, operand]
    assert 0 < errors[Wire.BF16, AOperand.FP8] < 0.07
    assert errors[Wire.BF16, AOperand.FP8] < errors[Wire.BF16, AOperand.FP4] < 0.3


def test_a_token_goes_at_most_once_to_a_rank_and_quantized_once(outcomes):
    ranks = len(outcomes)
    shape = geometry(ranks=ranks)
    for case in CASES:
        tokens = [tokens_of(rank, ranks, case.routing) for rank in range(ranks)]
        for rank, found in enumerate(outcomes):
            senders = [rank, *(r for r in range(ranks) if r != rank)]
            expected: list[list[torch.Tensor]] = [[], [], [], []]
            for sender in senders:
                x, topk_weights, topk_ids = tokens[sender]
                here = (topk_ids // shape.local_experts == rank).any(dim=1)
                codes, scales = mx_reference.quantize(x[here], case.operand.wire)
                parts = (codes, scales, topk_ids[here], topk_weights[here])
                for all_of, part in zip(expected, parts, strict=True):
                    all_of.append(part)
            got = found[case]
            arrived = (got.codes, got.scales, got.ids, got.weights)
            for part, wanted in zip(arrived, expected, strict=True):
                assert torch.equal(part, torch.cat(wanted)), f"rank {rank}, {case}"


def test_counted_bytes_are_what_arithmetic_says(outcomes):
    ranks = len(outcomes)
    shape = geometry(ranks=ranks)
    # hidden 96: 192, 96 or 48 bytes of payload; 3 scales, sent as 4 bytes; 4 ids and 4 weights of 4 bytes.
    payload = {Wire.BF16: 192, Wire.FP8: 96, Wire.FP4: 48}
    for case in CASES:
        pairs = torch.zeros(ranks, ranks, dtype=torch.int64)
        for sender in range(ranks):
            topk_ids = tokens_of(sender, ranks, case.routing)[2]
            for receiver in range(ranks):
                goes = (topk_ids // shape.local_experts == receiver).any(dim=1)
                pairs[sender, receiver] = goes.sum()
        pairs.fill_diagonal_(0)
        for rank, found in enumerate(outcomes):
            sent, received = int(pairs[rank].sum()), int(pairs[:, rank].sum())
            assert found[case].counters == {
                "payload": sent * payload[case.wire],
                "scales": sent * (4 if case.wire.quantizing else 0),
                "routing": sent * 32 + 8 * (ranks - 1),
                "combine": received * 192,
                "rows": sent,
                "calls": 1,
            }, f"rank {rank}, {case}"


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_that_do_not_fit_beside_their_number_follow(ranks):
    found = run_ranks(ranks, with_small_messages, ranks)
    assert [changed for changed, _ in found] == [[]] * ranks
    assert sum(interrupted for _, interrupted in found) > 0


# Rows in torch operations, as a GPU packs them.


def both_ways(rank: int, ranks: int) -> list[str]:
    """Cases in which torch operations gave other results than the compiled kernels."""
    shape = geometry(ranks=ranks, rank=rank)
    recipe = RECIPES["silu"]
    wrong = []
    for (wire, operand), routing in itertools.product(PAIRS, ROUTINGS):
        outs = []
        for torch_rows in (False, True):
            pair = choice(wire, operand)
            mega = DistributedMegaMoE(shape, recipe, pair, dist.group.WORLD, CPU)
            if torch_rows:
                form = RowFormat.of(WireLayout.of(wire, shape.hidden), shape.topk)
                mega._rows = TorchRows(shape, wire, form)
                mega._exchange = exchange.Exchange(dist.group.WORLD, CPU)
                mega._few = None
            weights = mega.prepare(local_part(random_experts(shape, recipe, 0), shape))
            outs.append(mega(*tokens_of(rank, ranks, routing), weights))
        if not torch.equal(*outs):
            wrong.append(f"{routing}, {wire} wire")
    return wrong


def test_torch_operations_pack_and_add_the_same():
    assert run_ranks(2, both_ways, 2) == [[], []]


# One rank.


def alone(
    max_tokens: int = 64, recipe: ExpertRecipe = RECIPES["silu"]
) -> tuple[DistributedMegaMoE, ExpertWeights]:
    shape = geometry(max_tokens=max_tokens)
    mega = DistributedMegaMoE(shape, recipe, choice(Wire.FP4, AOperand.FP4), None, CPU)
    return mega, mega.prepare(random_experts(shape, recipe, 0))


def test_startup_line_says_what_was_built():
    mega, _ = alone()
    assert mega.built.startup_line() == (
        "[MORI-V2] Created MegaMoE: ep_rank=0 ep_size=1 hidden=96 inter=64 experts=16 topk=4 M=64 act=silu "
        "gate=concat quant=per_1x32 pad=(0,0) swiglu_limit=0.0 dispatch=local wire=fp4 force_a8w4=0"
    )


def test_more_tokens_than_agreed_are_refused():
    mega, weights = alone(max_tokens=4)
    with pytest.raises(ValueError, match=r"5 tokens.*max_tokens=4.*--max-num-batched-tokens"):
        mega(*random_tokens(geometry(), 5, 1), weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w, i: (x.float(), w, i), r"hidden_states is torch.float32 \(5, 96\)"),
        (lambda x, w, i: (x[:, :64], w, i), r"\(5, 64\): give bfloat16 \[tokens, 96\]"),
        (lambda x, w, i: (x, w[:4], i), r"topk_weights \(4, 4\) must both be \(5, 4\)"),
        (lambda x, w, i: (x, w, i[:, :3]), r"topk_ids \(5, 3\)"),
        (lambda x, w, i: (x, w, i + 1), r"topk_ids holds 16"),
    ],
)
def test_tensors_of_another_kind_are_named(change, message):
    mega, weights = alone()
    x, topk_weights, topk_ids = random_tokens(geometry(), 5, 1)
    topk_ids[4, 3] = 15
    with pytest.raises(ValueError, match=message):
        mega(*change(x, topk_weights, topk_ids), weights)


def test_a_wire_that_does_not_fit_is_refused_before_weights():
    with pytest.raises(LaunchRefused, match="The fp8 wire does not fit"):
        DistributedMegaMoE(geometry(), RECIPES["silu"], choice(Wire.FP8, AOperand.FP4), None, CPU)


def test_a_geometry_without_its_group_is_refused():
    with pytest.raises(ValueError, match="rank 1 of 2, but there is no group"):
        DistributedMegaMoE(
            geometry(ranks=2, rank=1), RECIPES["silu"], choice(Wire.FP4, AOperand.FP4), None, CPU
        )


# A peer that does not come.


def wait_for_nobody(rank: int) -> float | None:
    group = dist.new_group(timeout=timedelta(seconds=2))
    shape = geometry(ranks=2, rank=rank)
    mega = DistributedMegaMoE(shape, RECIPES["silu"], choice(Wire.FP4, AOperand.FP4), group, CPU)
    weights = mega.prepare(local_part(random_experts(shape, RECIPES["silu"], 0), shape))
    if rank == 1:
        time.sleep(6)
        return None
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"[Tt]imed out|[Tt]imeout"):
        mega(*random_tokens(shape, 3, 0), weights)
    return time.monotonic() - start


def test_a_missing_peer_is_waited_for_as_long_as_the_groups_timeout():
    waited, _ = run_ranks(2, wait_for_nobody)
    assert 1 < waited < 6
