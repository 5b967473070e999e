"""Every combination of versions and settings, three ways: what the checks say, what building does, what would really happen.

Run with ``-s`` to see the table.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from pathlib import Path

import pytest
import torch

from atom.errors import LaunchRefused
from atom.moe import mori_libs, mori_v2
from atom.moe.mori_checks import dispatch_backend
from atom.wire.format import resolve_wire
from tests.gfx1250 import matrix
from tests.gfx1250.doubles import core
from tests.gfx1250.matrix import Combination

PAIRS = list(itertools.product(core.AITER_VERSIONS, core.MORI_VERSIONS))
CPU = torch.device("cpu")


def would_work(combination: Combination) -> Exception | None:
    """Do what a launch without any check would do, as far as a layer's first call; what is raised on the way."""
    aiter = importlib.import_module("aiter")
    mega_module = importlib.import_module(mori_libs.MEGA_MODULE)
    shuffle = importlib.import_module("aiter.ops.shuffle")
    cco = importlib.import_module("mori.cco")
    g = combination.geometry
    knows_wire = "dispatch_wire" in inspect.signature(mega_module.MegaMoEGfx1250).parameters
    communicator = cco.Communicator.init(1, 0, cco.Communicator.get_unique_id())
    try:
        mega = mega_module.MegaMoEGfx1250(
            communicator=communicator,
            rank=0,
            world_size=1,
            model_dim=g.hidden,
            inter_dim=g.inter,
            experts=g.experts,
            topk=g.topk,
            max_tokens_per_rank=g.max_tokens,
            gate_mode="interleave" if combination.gate_mode == "interleave" else "separated",
            dispatch_backend=dispatch_backend(combination.wire, combination.environ),
            **(
                {"dispatch_wire": str(combination.wire)}
                if combination.wire.quantizing or knows_wire
                else {}
            ),
        )
        packed = torch.uint8 if combination.force_a8w4 else aiter.dtypes.fp4x2

        def weight(*shape: int) -> torch.Tensor:
            shuffled = shuffle.shuffle_weight(
                torch.zeros(g.experts, *shape, dtype=torch.uint8)
            ).view(packed)
            shuffled.is_shuffled = True
            return shuffled

        def scale(*shape: int) -> torch.Tensor:
            plain = torch.zeros(g.experts, *shape, dtype=torch.uint8)
            return shuffle.moe_shuffle_scale(plain, experts_cnt=g.experts)

        mega(
            torch.zeros(0, g.hidden, dtype=torch.bfloat16),
            torch.ones(0, g.topk),
            torch.zeros(0, g.topk, dtype=torch.int32),
            w1=weight(2 * g.inter, g.hidden // 2),
            w2=weight(g.hidden, g.inter // 2),
            w1_scale=scale(2 * g.inter, g.hidden // 32),
            w2_scale=scale(g.hidden, g.inter // 32),
        )
    except Exception as error:
        return error
    finally:
        communicator.destroy()
    return None


@pytest.mark.parametrize("aiter, mori", PAIRS)
def test_every_combination(install, monkeypatch, aiter, mori):
    install(aiter=aiter, mori=mori)
    caps = mori_libs.capabilities()
    from mori.cco import Communicator

    wrong = []
    for combination in matrix.combinations(aiter, mori):
        with monkeypatch.context() as environment:
            for name, value in combination.environ.items():
                environment.setenv(name, value)
            said = combination.refusals(caps)
            real = would_work(combination)
            try:
                built = mori_v2.build(
                    combination.geometry,
                    combination.recipe,
                    resolve_wire(),
                    group=None,
                    device=CPU,
                    free_bytes=2**40,
                )
            except LaunchRefused as refusal:
                outcome = str(refusal)
                expected = "\n".join(said)
            else:
                outcome, expected = built.built.startup_line(), "wire=" + combination.wire
                built.close()
                expected = outcome if expected in outcome else expected
        verdict = "accepted" if not said else "refused: " + " ".join(matrix.codes(said))
        print(f"{combination.environ} {combination.hidden} {combination.gate_mode}: {verdict}")
        if bool(said) != (real is not None):
            wrong.append((combination, said, f"without checks: {real!r}"))
        elif outcome != expected:
            wrong.append((combination, said, outcome))
        elif Communicator.alive:
            wrong.append((combination, "left a communicator open", Communicator.alive))
            Communicator.alive.clear()
    assert not wrong, "\n".join(map(str, wrong[:5]))


def test_the_table_in_the_docs_is_up_to_date():
    assert matrix.render() == matrix.DOCUMENT.read_text(), "run python -m tests.gfx1250.matrix"


def test_there_are_enough_combinations():
    judged = sum(len(list(matrix.combinations(*pair))) for pair in PAIRS)
    assert judged == 648
    assert f"Combinations judged: {judged}" in Path(matrix.DOCUMENT).read_text()
