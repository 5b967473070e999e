"""On gfx1250 GPUs with aiter and mori: the layer, its bits, and a real server. Everything here skips elsewhere.

What a rank computes is written for any device: one test without the mark runs it over the doubles, so that the first machine
to have the hardware does not meet code that never ran.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from atom.benchmarks.server_process import (
    ServerExited,
    ServerProcess,
    free_port,
    start_openai_server,
)
from atom.errors import REFUSED_EXIT_STATUS
from atom.moe.spec import ExpertRecipe, ExpertWeights, MoEGeometry
from atom.wire import mx
from tests.gfx1250.doubles import core
from tests.ranks import run_ranks

TOKENS = 64
GEOMETRY = MoEGeometry(
    hidden=1024, inter=512, experts=16, topk=4, ep_size=1, ep_rank=0, max_tokens=TOKENS
)
LARGEST_ERROR = {"fp4": 0.3, "fp8": 0.08}
"""Relative error that quantizing both GEMMs' activations may cause, with room: the doubles show 0.22 and 0.05."""


def _ranks() -> int:
    """How many gfx1250 GPUs there are to test on, four at most; 0 where the backend would not be chosen."""
    if torch.version.hip is None or not torch.cuda.is_available():
        return 0
    from atom.moe import mori_v2

    if mori_v2.why_not(torch.device("cuda", 0)) is not None:
        return 0
    return 1 << (min(4, torch.cuda.device_count()).bit_length() - 1)


@pytest.fixture(scope="module")
def ranks() -> int:
    found = _ranks()
    if not found:
        pytest.skip("no gfx1250 GPU with aiter and mori here")
    return found


def fp32_layer(
    x: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor, weights: ExpertWeights
) -> torch.Tensor:
    """The layer in float32 with these weights and unquantized activations: ``silu(gate) * up``, rows interleaved."""
    w1 = mx.dequantize(weights.w1, weights.w1_scale, "fp4")
    w2 = mx.dequantize(weights.w2, weights.w2_scale, "fp4")
    out = torch.zeros(x.shape, dtype=torch.float32)
    for token, (row, chosen) in enumerate(zip(x.float(), ids.tolist(), strict=True)):
        for k, expert in enumerate(chosen):
            gate, up = (w1[expert] @ row).view(-1, 2).unbind(1)
            out[token] += scores[token, k] * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
    return out


def run_layer(rank: int, ranks: int, device_type: str, libraries: Path | None) -> dict[str, dict]:
    """One rank: the same batch on both wires of each A operand; errors against fp32 and whether bits agree."""
    if libraries is None:
        torch.cuda.set_device(rank)
    else:
        from tests.gfx1250.test_mori_ranks import _enter

        _enter(libraries)
    from atom.moe import mori_v2
    from tests.gfx1250.test_mori_v2 import batch, layer_weights

    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    geometry = replace(GEOMETRY, ep_size=ranks, ep_rank=rank)
    whole = layer_weights(GEOMETRY)
    mine = slice(rank * geometry.local_experts, (rank + 1) * geometry.local_experts)
    local = ExpertWeights(
        **{
            name: getattr(whole, name)[mine].to(device)
            for name in ("w1", "w1_scale", "w2", "w2_scale")
        }
    )
    x, scores, ids = batch(TOKENS, GEOMETRY, seed=rank)
    reference = fp32_layer(x, scores, ids, whole)
    found: dict[str, dict] = {}
    for operand, force in (("fp4", "0"), ("fp8", "1")):
        os.environ["AITER_FORCE_A8W4"] = force
        outs, lines = [], []
        for wire in ("bf16", operand):
            os.environ["MEGA_WIRE"] = wire
            recipe = ExpertRecipe()
            mega = mori_v2.build(
                geometry,
                recipe,
                mori_v2.resolve_choice(recipe),
                group=dist.group.WORLD if ranks > 1 else None,
                device=device,
                free_bytes=None if libraries is None else 2**40,
            )
            out = mega(*(t.to(device) for t in (x, scores, ids)), mega.prepare(local))
            outs.append(out.cpu().clone())
            lines.append(mega.built.startup_line())
            mega.close()
        errors = [((out.float() - reference).norm() / reference.norm()).item() for out in outs]
        found[operand] = {"same": torch.equal(*outs), "errors": errors, "lines": lines}
    return found


def check_layer(found: list[dict[str, dict]]) -> None:
    """Errors small and equal, bits equal, lines right, on every rank."""
    for rank, operands in enumerate(found):
        for operand, result in operands.items():
            print(
                f"rank {rank}, A operand {operand}: error {result['errors'][0]:.6f} on both wires"
            )
            assert result["same"], f"rank {rank}: the {operand} wire changes bits"
            assert result["errors"][0] == result["errors"][1] < LARGEST_ERROR[operand]
            assert f"dispatch=mori wire={operand}" in result["lines"][1]


def test_what_the_hardware_tests_run_works_over_the_doubles(tmp_path: Path):
    libraries = core.assemble(tmp_path, aiter="current", mori="at_1_2_4")
    check_layer(run_ranks(2, run_layer, 2, "cpu", libraries, timeout=120))


@pytest.mark.gfx1250
def test_layer_against_fp32_and_bits_across_wires(ranks):
    check_layer(run_ranks(ranks, run_layer, ranks, "cuda", None, timeout=600))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with the config of a small MoE whose sizes fit aiter's tiles."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "moe_intermediate_size": 512,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def _server(ranks: int, model: Path, log: Path, **environ: str) -> ServerProcess:
    args = ["--model", str(model), "--load-format", "dummy", "-tp", str(ranks)]
    if ranks > 1:
        args += ["--enable-expert-parallel", "--enable-dp-attention"]
    env = {**os.environ, **environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return start_openai_server(args, port=free_port(), log=log, env=env)


@pytest.mark.gfx1250
@pytest.mark.timeout(900)
@pytest.mark.parametrize("wire, force", [("fp4", "0"), ("fp8", "1")])
def test_startup_lines_of_a_real_server(ranks, model, tmp_path, wire, force):
    with _server(
        ranks, model, tmp_path / "server.log", MEGA_WIRE=wire, AITER_FORCE_A8W4=force
    ) as server:
        server.wait_until_healthy(timeout=800)
        lines = server.startup_lines()
        assert len(lines) == ranks
        for rank in range(ranks):
            assert any(f"ep_rank={rank} ep_size={ranks} " in line for line in lines)
        assert all(f"dispatch=mori wire={wire} force_a8w4={force}" in line for line in lines)


@pytest.mark.gfx1250
@pytest.mark.timeout(300)
@pytest.mark.parametrize("wire, force", [("fp8", "0"), ("fp4", "1")])
def test_a_mismatched_pair_fails_to_start(ranks, model, tmp_path, wire, force):
    with (
        _server(
            ranks, model, tmp_path / "server.log", MEGA_WIRE=wire, AITER_FORCE_A8W4=force
        ) as server,
        pytest.raises(ServerExited) as exited,
    ):
        server.wait_until_healthy(timeout=200)
    assert exited.value.status == REFUSED_EXIT_STATUS
    log = "\n".join(server.log_lines())
    assert f"The {wire} wire does not fit" in log and "Traceback" not in log
