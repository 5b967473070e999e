"""One call for ranks on several GPUs: its stages between two gloo ranks, its time limits, and how it judges what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from atom.benchmarks import bench_multi_gpu, check_ranks, link_limit
from atom.benchmarks.dispatch_peers import all_to_all_rows
from atom.benchmarks.multi_gpu_report import report
from atom.benchmarks.multi_gpu_stages import (
    FULL,
    SMALL,
    VIRTUAL,
    Part,
    Setup,
    fitting_requests,
    parts,
)
from atom.benchmarks.multi_gpu_targets import MET, MISSED, REAL, UNMEASURED, judge
from atom.benchmarks.timed_stage import run_within
from atom.moe import distributed
from tests.ranks import run_ranks

pytest.importorskip("matplotlib", reason="the extra bench is not installed")

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Every stage between two gloo ranks: exit status, output, results."""
    out = tmp_path_factory.mktemp("multi") / "out"
    done = subprocess.run(
        [ROOT / "scripts" / "bench_multi_gpu.sh", "--device", "cpu", "--ranks", "2", "--out", out],
        env={**os.environ, "PYTHON": sys.executable, "GLOO_SOCKET_IFNAME": "lo", "MEGA_WIRE": "no"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    return done, json.loads((out / "results.json").read_text())


@pytest.mark.timeout(420)
def test_every_stage_runs(whole):
    done, results = whole
    assert done.returncode == 0, done.stdout + done.stderr
    states = {name: part["status"] for name, part in results["parts"].items()}
    assert states == dict.fromkeys(("correctness-gloo", "layer", "server"), "done")
    assert results["ranks_are"] == "processes on CPUs" and results["seconds_taken"] < 540
    cases = {(r["a_operand"], r["case"]) for r in results["parts"]["correctness-gloo"]["records"]}
    assert len(cases) == 2 * len(check_ranks.CASES)


def test_the_layer_is_beside_its_limit_and_peers(whole):
    records = whole[1]["parts"]["layer"]["records"]
    assert {(r["tokens"], r["a_operand"], r["wire"]) for r in records} == {
        (tokens, operand, wire)
        for tokens in (64, 4096)
        for operand in ("fp8", "fp4")
        for wire in ("bf16", operand)
    }
    for r in records:
        assert r["identical"] and r["link_gb_per_s"] > 0 and r["dispatch_share_of_link"] > 0
        assert set(r["dispatch_peers_ms"]) == {
            "all-to-all of bf16 rows",
            "transformers AllToAllEP",
        }
        assert ("total_of_bf16" in r) and ("dispatch_of_bf16" in r)


def test_the_server_answers_the_load_in_turn_on_both_wires(whole):
    data = whole[1]["parts"]["server"]["report"]
    assert data["repeats"] == data["repeats_asked"] == 3 and data["servers_kept"]
    assert data["differing_probes"] == [] and data["probes"] == 2
    for wire, item in data["wires"].items():
        assert len(item["figures"]["duration"]["all"]) == 3 and item["failed"] == 0
        assert all(f"wire={wire}" in line for line in item["startup_lines"])
    assert data["wires"]["fp4"]["bytes"]["payload"] < data["wires"]["bf16"]["bytes"]["payload"] / 3
    assert "| Total token throughput (tok/s) |" in whole[0].stdout


def test_figures_of_other_links_meet_no_target(whole):
    verdicts = {target.name: target.verdict for target in judge(whole[1])}
    assert verdicts["equal to the bit across wires, gloo"] == MET
    ratio = verdicts["layer of 4096 tokens a rank, fp4 wire over bf16 wire"]
    assert ratio == f"{UNMEASURED} (processes on CPUs)"


def wrong_on_rank_1(rank: int, on_both_wires: bool) -> list[dict[str, object]]:
    """Records of a backend that returns one wrong row on rank 1, on a quantizing wire or on both."""
    group = dist.group.WORLD
    args = check_ranks._parser().parse_args(SMALL.check.split())
    args.large = 8

    def build(shape, choice):
        mega = distributed.build(shape, check_ranks.RECIPE, choice, group=group, device=CPU)
        mega._few = None
        if rank == 1 and (on_both_wires or choice.wire.quantizing):
            combine = mega.combine

            def wrong(results, handle):
                out = combine(results, handle)
                out[:1] += 1
                return out

            mega.combine = wrong
        return mega

    checks = check_ranks.Checks(args, group, CPU)
    checks.run("gloo", build)
    return checks.records


@pytest.mark.parametrize("on_both_wires", [False, True])
def test_a_wrong_row_on_one_rank_is_found(on_both_wires):
    """By the other wire, or by the reference where the wires agree."""
    records = run_ranks(2, wrong_on_rank_1, on_both_wires, timeout=100)[0]
    assert len(records) == 2 * len(check_ranks.CASES)
    assert not any(r["passed"] for r in records)
    assert all(r["identical"] == on_both_wires for r in records)
    results = {
        "ranks_are": "processes on CPUs",
        "parts": {"c": {"stage": "correctness", "status": "done", "records": records}},
    }
    assert MISSED in {t.verdict for t in judge(results) if t.correctness}
    assert bench_multi_gpu.exit_status(results, ["correctness"]) == 1


def rows_that_arrive(rank: int) -> bool:
    group = dist.group.WORLD
    tokens = [torch.full((3, 4), 10.0 * r).bfloat16() + torch.arange(3)[:, None] for r in (0, 1)]
    # Two experts a rank: token 0 goes to rank 0, token 1 to rank 1, token 2 to both.
    ids = torch.tensor([[0, 1], [3, 2], [1, 2]])
    peer = all_to_all_rows(group, tokens[rank], ids, 2)
    mine = [0, 2] if rank == 0 else [1, 2]
    return torch.equal(peer.dispatch(), torch.cat([t[mine] for t in tokens]))


def test_an_all_to_all_carries_each_token_once_to_each_rank():
    assert run_ranks(2, rows_that_arrive) == [True, True]


def test_memory_at_an_address():
    held = torch.arange(16, dtype=torch.uint8)
    seen = link_limit._memory_at(held.data_ptr() + 4, 8, CPU)
    assert seen.tolist() == list(range(4, 12))
    seen.copy_(torch.zeros(8, dtype=torch.uint8))
    assert held.tolist() == [0, 1, 2, 3, *[0] * 8, 12, 13, 14, 15]


def test_a_command_that_overruns_is_gone_with_what_it_started(tmp_path):
    pids = tmp_path / "pids"
    child = "import time; time.sleep(60)"
    code = (
        "import subprocess, sys, os, time\n"
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{p.pid}}')\n"
        "print('said', flush=True)\n"
        "time.sleep(60)\n"
    )
    log = tmp_path / "log"
    ran = run_within(3, [sys.executable, "-c", code], log=log)
    assert ran.killed and ran.limit == 3 and ran.seconds < 30
    assert log.read_text() == "said\n"
    for pid in map(int, pids.read_text().split()):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    done = run_within(30, [sys.executable, "-c", "raise SystemExit(3)"], log=log)
    assert done.exit_status == 3 and not done.killed


def scripted(name: str, code: str, stage: str = "layer", **more) -> Part:
    return Part(
        stage=stage,
        name=name,
        share=1.0,
        command=lambda seconds: [sys.executable, "-c", code],
        result=lambda: None,
        **more,
    )


def run_scripted(monkeypatch, tmp_path, listed, *argv):
    monkeypatch.setattr(bench_multi_gpu, "parts", lambda setup: listed)
    status = bench_multi_gpu.main(["--device", "cpu", "--out", str(tmp_path / "out"), *argv])
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    return status, results


def test_a_stage_that_overruns_leaves_the_later_ones_their_time(monkeypatch, tmp_path, capsys):
    seen = tmp_path / "out" / "results.json"
    later = f"import json; assert json.load(open({str(seen)!r}))['parts']['slow']['seconds'] > 1"
    listed = [scripted("slow", "import time; time.sleep(60)"), scripted("later", later)]
    status, results = run_scripted(monkeypatch, tmp_path, listed, "--seconds", "19")
    assert status == 1, "the checks of correctness were asked for and not made"
    assert results["parts"]["slow"]["status"] == "killed at its limit"
    assert results["parts"]["later"]["status"] == "done"
    assert "| slow | killed at its limit |" in capsys.readouterr().out


def test_a_part_that_fails_is_tried_another_way(monkeypatch, tmp_path):
    listed = [
        scripted("first", "raise SystemExit(1)"),
        scripted("other way", "pass", instead_of="first"),
        scripted("not needed", "raise SystemExit(1)", instead_of="other way"),
        scripted("impossible", "pass", why_not="no such GPU"),
    ]
    status, results = run_scripted(monkeypatch, tmp_path, listed, "--stages", "layer")
    states = {name: part["status"] for name, part in results["parts"].items()}
    assert states == {"first": "failed", "other way": "done", "impossible": "left out"}
    assert status == 1


def layers(**ratios) -> list[dict[str, object]]:
    """Records of fp4 operands at 16384 tokens."""
    wide = {"tokens": 16384, "a_operand": "fp4", "wire": "bf16", "identical": True}
    return [
        {**wide, "dispatch_share_of_link": ratios["bf16_share"], "total_of_bf16": 1.0},
        {
            **wide,
            "wire": "fp4",
            "dispatch_share_of_link": ratios["fp4_share"],
            "dispatch_of_bf16": ratios["dispatch"],
            "total_of_bf16": ratios["total"],
        },
    ]


def test_targets_are_met_or_missed_on_gpus_only():
    found = layers(bf16_share=0.70, fp4_share=0.69, dispatch=0.35, total=1.0)
    results = {
        "ranks_are": REAL,
        "parts": {"layer": {"stage": "layer", "status": "done", "records": found}},
    }
    verdicts = {t.name: t.verdict for t in judge(results)}
    dispatch = "dispatch of 16384 tokens a rank"
    assert verdicts[f"{dispatch}, bf16 wire, share of the copy between GPUs"] == MET
    assert verdicts[f"{dispatch}, fp4 wire, share of the copy between GPUs"] == MISSED
    assert verdicts[f"{dispatch}, fp8 wire, share of the copy between GPUs"] == UNMEASURED
    assert verdicts[f"{dispatch}, fp4 wire over bf16 wire"] == MET
    assert verdicts["layer of 16384 tokens a rank, fp4 wire over bf16 wire"] == MISSED
    assert bench_multi_gpu.exit_status(results, ["layer"]) == 0, "slow is not wrong"
    found[1]["identical"] = False
    assert bench_multi_gpu.exit_status(results, ["layer"]) == 1
    results["ranks_are"] = VIRTUAL
    verdicts = {t.name: t.verdict for t in judge(results)}
    assert verdicts[f"{dispatch}, fp4 wire over bf16 wire"] == f"{UNMEASURED} ({VIRTUAL})"


def test_parts_follow_the_gpus(tmp_path):
    setup = Setup(ranks=4, gpus=4, sizes=FULL, out=tmp_path, gpu_bytes=150 * 10**9)
    real = {part.name: part for part in parts(setup)}
    assert list(real) == [
        "correctness-symmetric",
        "correctness-nccl",
        "layer",
        "layer without peers",
        "server",
    ]
    assert all(part.why_not is None and not part.env for part in real.values())
    command = real["server"].command(300)
    assert command[command.index("-tp") + 1] == "4"
    assert command[command.index("--input-len") + 1] == command[command.index("--output-len") + 1]
    assert command[command.index("--output-len") + 1] == "1024"
    in_flight = int(command[command.index("--max-concurrency") + 1])
    assert in_flight == int(command[command.index("--max-num-seqs") + 1]) * 4
    assert json.loads((tmp_path / "model" / "config.json").read_text())["num_experts"] == 128
    assert "--dispatch-peers" in real["layer"].command(9)
    assert "--dispatch-peers" not in real["layer without peers"].command(9)
    shared = {part.name: part for part in parts(replace(setup, gpus=1, ranks=2))}
    assert dict(shared["correctness-symmetric"].env)
    assert "torch.distributed.run" not in shared["layer"].command(9)
    assert shared["server"].why_not and shared["correctness-nccl"].why_not


def test_requests_fit_into_a_gpu_beside_two_servers(tmp_path):
    setup = Setup(ranks=2, gpus=2, sizes=FULL, out=tmp_path, gpu_bytes=150 * 10**9)
    fitting = fitting_requests(FULL, setup)
    # 98304 bytes of keys and values a token.
    assert 100 <= fitting <= 256 and 2 * fitting * 2112 * 98304 < 0.9 * setup.gpu_bytes
    assert fitting_requests(FULL, replace(setup, gpu_bytes=80 * 10**9)) < fitting


def test_no_stage_inherits_a_launch_or_multicast(monkeypatch):
    for name in ("MEGA_WIRE", "RANK", "WORLD_SIZE", "ATOM_FAKE_EPLB", "NCCL_NVLS_ENABLE"):
        monkeypatch.setenv(name, "1")
    env = bench_multi_gpu.environment(scripted("any", "pass"))
    assert not {"MEGA_WIRE", "RANK", "WORLD_SIZE", "ATOM_FAKE_EPLB"} & set(env)
    assert env["NCCL_NVLS_ENABLE"] == "0" and env["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"


def test_a_report_of_nothing_says_so():
    results = {"ranks": 2, "ranks_are": REAL, "machine": "m", "sizes": "full", "seconds": 540}
    results["parts"] = {}
    text = report(results, judge(results))
    assert text.count(f"| {UNMEASURED} |") == len(judge(results))


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--ranks", "1"], "two ranks or more"),
        (["--seconds", "1"], "must be more than"),
        (["--stages", "server", "all"], "invalid choice"),
    ],
)
def test_wrong_usage(argv, message, capsys):
    with pytest.raises(SystemExit) as exit:
        bench_multi_gpu.main(["--device", "cpu", *argv])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err
