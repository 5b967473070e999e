"""The load generator: what it sends, how it reads streams, and that no failure is hidden."""

from __future__ import annotations

import asyncio
import itertools
import json
import random

import pytest

from atom.benchmarks import benchmark_serving
from atom.benchmarks.http_stream import Origin
from atom.benchmarks.load import LoadResult, Record, Target, run_load, summarize
from atom.benchmarks.prompts import Prompt, as_text, random_prompts, read_jsonl
from atom.engine.loading import resolve_model_path
from tests.benchmarks.scripted import END, HEAD, chunk, scripted_server, sse, token, usage

PROMPT = Prompt(content=[1, 2, 3], input_tokens=3, output_tokens=2)
GOOD = sse(token("a"), token("b", "length"), usage(3, 2))


def load(url: str, prompts: list[Prompt], **options: object) -> LoadResult:
    """A load against ``url``; the timeout of its requests is short."""
    target = Target(base_url=url, model="m", ignore_eos=True, timeout=5.0)
    return asyncio.run(run_load(target, prompts, **options))


@pytest.mark.parametrize("size", [1, 2, 7, 64, 4096])
def test_reads_events_however_they_are_cut(size):
    pieces = [chunk(GOOD[at : at + size]) for at in range(0, len(GOOD), size)]
    with scripted_server(lambda body: [HEAD, *pieces, END]) as (url, bodies):
        (record,) = load(url, [PROMPT]).records
    assert record.error is None
    assert (record.text, record.input_tokens, record.output_tokens) == ("ab", 3, 2)
    assert record.started < record.first <= record.last
    assert bodies == [
        {
            "model": "m",
            "prompt": [1, 2, 3],
            "max_tokens": 2,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    ]


def test_measures_times_between_events():
    first, second = chunk(sse(token("a"))), chunk(sse(token("b", "length")))
    with scripted_server(lambda body: [HEAD, 0.05, first, 0.1, second, END]) as (url, _):
        (record,) = load(url, [PROMPT]).records
    # Sleeps end late, never early.
    assert record.first - record.started >= 0.05
    assert record.gaps[0] >= 0.09
    assert record.output_tokens == 2, "events are counted where there is no usage"


NOT_OK = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 4\r\n\r\nfull"


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ([NOT_OK], "HTTP 429: full"),
        ([HEAD, chunk(sse({"error": {"message": "rank 1 is gone"}})), END], "rank 1 is gone"),
        ([HEAD, chunk(sse(token("a"))), END], "without a finish_reason"),
        ([HEAD, chunk(sse(usage(3, 0))), END], "without a finish_reason"),
        ([HEAD, chunk(b"data: {oops\n\n"), END], "not a completion"),
        ([HEAD, chunk(sse(token("a"))), b"close"], "lost before the answer was complete"),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], "not HTTP"),
        ([HEAD, 30.0], "no complete answer in 0.3 s"),
    ],
)
def test_failures_are_counted_with_their_reason(reply, reason):
    target_timeout = 0.3 if 30.0 in reply else 5.0

    def answer(body):
        return reply if body["prompt"] == [9] else [HEAD, chunk(GOOD), END]

    bad = Prompt(content=[9], input_tokens=1, output_tokens=2)
    with scripted_server(answer) as (url, _):
        target = Target(base_url=url, model="m", timeout=target_timeout)
        result = asyncio.run(run_load(target, [PROMPT, bad, PROMPT], max_concurrency=1))
    assert [record.error is None for record in result.records] == [True, False, True]
    assert reason in result.records[1].error
    summary = summarize(result)
    assert (summary["completed"], summary["failed"]) == (2, 1)
    assert summary["total_output_tokens"] == 4


def test_a_server_that_is_not_there_fails_every_request():
    result = load("http://127.0.0.1:9", [PROMPT, PROMPT])
    assert summarize(result)["failed"] == 2
    assert summarize(result)["total_token_throughput"] == 0


def test_never_more_in_flight_than_allowed():
    running, most = 0, 0

    def answer(body):
        nonlocal running, most
        running += 1
        most = max(most, running)
        yield HEAD
        yield 0.02
        running -= 1
        yield chunk(GOOD)
        yield END

    with scripted_server(answer) as (url, bodies):
        result = load(url, [PROMPT] * 12, max_concurrency=3)
    assert summarize(result)["completed"] == len(bodies) == 12
    assert most == 3


def test_arrivals_are_the_seeds_poisson_process():
    rng = random.Random(3)
    drawn = [rng.expovariate(100.0) for _ in range(7)]
    with scripted_server(lambda body: [HEAD, chunk(GOOD), END]) as (url, _):
        records = load(url, [PROMPT] * 8, request_rate=100.0, seed=3).records
    # Each is sent when it is due, or a little later, never before.
    for record, due in zip(records[1:], itertools.accumulate(drawn), strict=True):
        assert record.started - records[0].started >= due - 0.005


def test_figures_by_hand():
    records = [
        Record(started=0, first=1, last=3, gaps=(1, 1), input_tokens=10, output_tokens=3),
        Record(started=1, first=3, last=6, gaps=(3,), input_tokens=20, output_tokens=2),
        Record(started=1, error="HTTP 500: "),
    ]
    s = summarize(LoadResult(records=records, duration=5.0), percentiles=(50, 99))
    assert s["mean_ttft_ms"] == 1500 and s["median_ttft_ms"] == 1500
    assert s["mean_tpot_ms"] == 2000, "(3-1)/2 and (6-3)/1 seconds"
    assert s["mean_itl_ms"] == pytest.approx(5000 / 3)
    assert s["mean_e2el_ms"] == 4000 and s["p50_e2el_ms"] == 4000
    assert s["p99_ttft_ms"] == pytest.approx(1990)
    assert s["output_throughput"] == 1 and s["total_token_throughput"] == 7
    assert s["request_throughput"] == 0.4


def test_random_prompts_are_the_seeds_and_of_the_right_length():
    same = [random_prompts(20, input_len=64, output_len=8, seed=5, range_ratio=0.5)] * 2
    assert same[0] == same[1] != random_prompts(20, input_len=64, output_len=8, seed=6)
    lengths = {prompt.input_tokens for prompt in same[0]}
    assert all(32 <= n <= 96 for n in lengths) and len(lengths) > 5
    assert all(len(prompt.content) == prompt.input_tokens for prompt in same[0])
    exact = random_prompts(5, input_len=64, output_len=8, vocab_size=7)
    assert {p.input_tokens for p in exact} == {64} and max(max(p.content) for p in exact) < 7


def test_text_prompts_have_as_many_tokens():
    from tokenizers import Tokenizer

    file = resolve_model_path("tiny-moe") / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    prompts = random_prompts(8, input_len=48, output_len=4, vocab_size=2000)
    for prompt in as_text(prompts, file):
        assert len(tokenizer.encode(prompt.content, add_special_tokens=False).ids) == 48


def test_jsonl(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "import os"}\n\n{"prompt": [1, 2], "output_len": 9}\n')
    first, second = read_jsonl(path, output_len=4)
    assert (first.content, first.output_tokens) == ("import os", 4)
    assert (second.content, second.input_tokens, second.output_tokens) == ([1, 2], 2, 9)


@pytest.mark.parametrize(
    "line",
    ["[]", "{}", '{"prompt": ""}', '{"prompt": [1, "a"]}', "{", '{"prompt": "a", "output_len": 0}'],
)
def test_jsonl_names_the_bad_line(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"prompts\.jsonl:2"):
        read_jsonl(path, output_len=4)


def test_origin():
    assert Origin.parse("127.0.0.1:80/x/") == Origin("127.0.0.1", 80, False, "/x")
    assert Origin.parse("https://[::1]").authority == "[::1]:443"
    for url in ("ftp://a", "http://", ""):
        with pytest.raises(ValueError, match="not a URL"):
            Origin.parse(url)


@pytest.mark.parametrize("fails", [False, True])
def test_command_line(tmp_path, capsys, fails):
    out = tmp_path / "result.json"

    def answer(body):
        if fails and len(bodies) == 4:
            return [NOT_OK]
        return [HEAD, chunk(sse(token("a"), token("b", "length"), usage(5, 2))), END]

    argv = ["--model", "m", "--random-input-len", "5", "--random-output-len", "2"]
    argv += ["--num-prompts", "6", "--max-concurrency", "2", "--save-result"]
    argv += ["--result-filename", str(out), "--percentile-metrics", "ttft,e2el"]
    with scripted_server(answer) as (url, bodies):
        status = benchmark_serving.main([*argv, "--base-url", url])
    saved = json.loads(out.read_text())
    printed = capsys.readouterr()
    assert status == (1 if fails else 0)
    assert (saved["completed"], saved["failed"]) == ((5, 1) if fails else (6, 0))
    assert len(bodies) == 7, "a warm-up request came before the load"
    assert saved["total_input_tokens"] == 5 * saved["completed"]
    assert {"mean_tpot_ms", "p99_itl_ms", "median_ttft_ms", "duration"} <= saved.keys()
    assert f"Failed requests:                         {saved['failed']}" in printed.out
    assert "P99 E2EL (ms):" in printed.out and "TPOT" not in printed.out
    assert ("1 failed: HTTP 429: full" in printed.err) == fails


def test_a_warm_up_that_fails_ends_the_run(capsys):
    with scripted_server(lambda body: [NOT_OK]) as (url, bodies):
        assert benchmark_serving.main(["--model", "m", "--base-url", url]) == 1
    assert len(bodies) == 1
    assert "warm-up requests failed: HTTP 429: full" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["--num-prompts", "0"],
        ["--random-range-ratio", "1"],
        ["--request-rate", "0"],
        ["--dataset-name", "jsonl"],
        ["--percentile-metrics", "speed"],
        ["--prompt-format", "text"],
        ["--base-url", "ftp://a"],
        ["--extra-body", "{"],
    ],
)
def test_wrong_usage(argv, capsys):
    with pytest.raises(SystemExit) as exit:
        benchmark_serving.main(argv)
    assert exit.value.code == 2
    assert "error:" in capsys.readouterr().err
