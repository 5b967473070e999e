"""The openai client against a real server of two ranks."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import MAX_MODEL_LEN
from tests.server.running import MODEL, RunningServer, gone, wait_for

PROMPT = "def read_file(path):\n"
MESSAGES: list[Any] = [{"role": "user", "content": "Write a function."}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with server.http() as http:
        yield http


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    """A greedy completion of 24 tokens that ignores end tokens, unless the fields say otherwise."""
    extra = {"ignore_eos": True, **fields.pop("extra_body", {})}
    fields = {**GREEDY, "prompt": prompt, "max_tokens": 24, **fields, "extra_body": extra}
    return client.completions.create(**fields)


def joined(chunks: Any) -> tuple[str, list[str], Any]:
    """Text, finish reasons and usage of a streamed completion with one choice."""
    text, reasons, usage = "", [], None
    for chunk in chunks:
        if chunk.usage is not None:
            assert chunk.choices == []
            usage = chunk.usage
        for choice in chunk.choices:
            text += choice.text
            reasons += [choice.finish_reason] if choice.finish_reason else []
    return text, reasons, usage


def test_each_rank_says_what_it_built(server: RunningServer) -> None:
    lines = [line for line in server.log.splitlines() if "[MORI-V2] Created MegaMoE" in line]
    assert sorted(re.findall(r"ep_rank=\d", "".join(lines))) == ["ep_rank=0", "ep_rank=1"]
    for line in lines:
        assert "dispatch=gloo+shm wire=fp4 force_a8w4=0" in line


def test_a_completion_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = complete(client)
    choice = whole.choices[0]
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert choice.text
    assert whole.usage.completion_tokens == 24
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 24
    streamed = complete(client, stream=True, stream_options={"include_usage": True})
    assert joined(streamed) == (choice.text, ["length"], whole.usage)
    assert joined(complete(client, stream=True)) == (choice.text, ["length"], None)


def test_a_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {**GREEDY, "messages": MESSAGES, "max_completion_tokens": 100}
    whole = client.chat.completions.create(**fields)
    choice = whole.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    # The model ends its answers; the token that does so is counted, and not in the text.
    assert choice.finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.completion_tokens < 100
    assert "<|" not in choice.message.content
    text, roles, reasons, usage = "", [], [], None
    options: Any = {"include_usage": True}
    for chunk in client.chat.completions.create(**fields, stream=True, stream_options=options):
        usage = chunk.usage or usage
        for part in chunk.choices:
            text += part.delta.content or ""
            roles += [part.delta.role] if part.delta.role else []
            reasons += [part.finish_reason] if part.finish_reason else []
    assert (text, roles, reasons) == (choice.message.content, ["assistant"], ["stop"])
    assert usage == whole.usage


def test_a_conversation_goes_on_with_the_answer_as_it_came(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(**GREEDY, messages=MESSAGES, max_tokens=8)
    messages = [*MESSAGES, first.choices[0].message.model_dump(), *MESSAGES]
    second = client.chat.completions.create(**GREEDY, messages=messages, max_tokens=8)
    assert second.usage.prompt_tokens > first.usage.prompt_tokens + 8  # type: ignore[union-attr]


def test_the_raw_stream_ends_as_openai_s_does(http: httpx.Client) -> None:
    body = {**GREEDY, "prompt": PROMPT, "max_tokens": 3, "stream": True}
    response = http.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])


def test_prompts_in_every_form(client: openai.OpenAI) -> None:
    # Batches of another size may round differently, so one long batch is compared with itself.
    echoed = complete(client, echo=True, max_tokens=0, logprobs=0)
    assert echoed.choices[0].text == PROMPT
    many = complete(client, prompt=[PROMPT, "import os\n"], n=2)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert many.choices[0].text == many.choices[1].text
    assert many.choices[2].text == many.choices[3].text
    assert many.usage.completion_tokens == 4 * 24
    ids = list(range(100, 110))
    one = complete(client, prompt=ids, echo=True, max_tokens=0)
    both = complete(client, prompt=[ids, ids[:3]], echo=True, max_tokens=0)
    assert both.choices[0].text == one.choices[0].text
    assert one.choices[0].text.startswith(both.choices[1].text)
    assert both.usage.prompt_tokens == 13
    assert both.usage.completion_tokens == 0


def test_seeds_make_sampling_repeatable(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_tokens": 12}
    first = [choice.text for choice in complete(client, n=4, **fields).choices]
    again = [choice.text for choice in complete(client, n=4, **fields).choices]
    assert first == again
    assert len(set(first)) > 1
    # Choice i has the seed of a request of its own with seed + i.
    alone = complete(client, **{**fields, "seed": 13}).choices[0].text
    assert alone == first[2]
    unseeded = {complete(client, temperature=1.0, max_tokens=12).choices[0].text for _ in range(4)}
    assert len(unseeded) > 1


def test_top_k_1_is_greedy_at_any_temperature(client: openai.OpenAI) -> None:
    greedy = complete(client).choices[0].text
    assert complete(client, temperature=2.0, extra_body={"top_k": 1}).choices[0].text == greedy
    assert complete(client, temperature=2.0, top_p=1e-9).choices[0].text == greedy


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_across_tokens(client: openai.OpenAI, stream: bool) -> None:
    reported = complete(client, logprobs=0).choices[0]
    text, offsets = reported.text, reported.logprobs.text_offset
    # From the middle of one token into the next.
    start = next(n for n in range(6, 20) if len(reported.logprobs.tokens[n].strip()) > 1)
    stop = text[offsets[start] + 1 : offsets[start + 1] + 1]
    expected = text[: text.index(stop)]
    answer = complete(client, stop=[stop, "never in the text"], stream=stream)
    if stream:
        assert joined(answer)[:2] == (expected, ["stop"])
        return
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")
    assert 0 < answer.usage.completion_tokens < 24
    unharmed = complete(client, stop="never in the text").choices[0]
    assert (unharmed.text, unharmed.finish_reason) == (text, "length")


def test_logprobs_of_a_completion(client: openai.OpenAI) -> None:
    choice = complete(client, logprobs=3).choices[0]
    reported = choice.logprobs
    assert "".join(reported.tokens) == choice.text
    assert len(reported.token_logprobs) == 24
    bounds = [*reported.text_offset, len(choice.text)]
    for token, start, end in zip(reported.tokens, bounds, bounds[1:], strict=False):
        assert choice.text[start:end] == token
    for token, logprob, top in zip(
        reported.tokens, reported.token_logprobs, reported.top_logprobs, strict=True
    ):
        assert logprob <= 0
        # Greedy: the chosen token is the likeliest.
        assert top[token] == logprob == max(top.values())
        assert len(top) == 3
    pieces = list(complete(client, logprobs=3, stream=True))
    tokens = [t for chunk in pieces for c in chunk.choices for t in c.logprobs.tokens]
    assert tokens == reported.tokens


def test_echo_reports_the_prompt_too(client: openai.OpenAI) -> None:
    plain = complete(client, logprobs=1)
    choice = complete(client, logprobs=1, echo=True).choices[0]
    reported = choice.logprobs
    assert choice.text == PROMPT + plain.choices[0].text
    assert "".join(reported.tokens) == choice.text
    assert reported.token_logprobs[0] is None
    assert all(logprob <= 0 for logprob in reported.token_logprobs[1:])
    assert len(reported.tokens) == plain.usage.total_tokens
    # What was generated, given back as a prompt, has the log probabilities it was generated with, as far as 4-bit
    # activations allow in batches of another size; off by one token it would be nats away.
    again = complete(client, prompt=choice.text, logprobs=1, echo=True, max_tokens=0).choices[0]
    assert again.logprobs.tokens == reported.tokens
    pairs = zip(again.logprobs.token_logprobs[1:], reported.token_logprobs[1:], strict=True)
    differences = [abs(one - other) for one, other in pairs]
    assert sum(differences) / len(differences) < 0.25
    streamed = joined(complete(client, echo=True, stream=True))
    assert streamed[0] == choice.text


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {**GREEDY, "messages": MESSAGES, "max_tokens": 8}
    choice = client.chat.completions.create(**fields, logprobs=True, top_logprobs=2).choices[0]
    content = choice.logprobs.content  # type: ignore[union-attr]
    assert content is not None
    assert b"".join(bytes(t.bytes or []) for t in content).decode() == choice.message.content
    for token in content:
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].logprob == token.logprob
    bare = client.chat.completions.create(**fields, logprobs=True).choices[0]
    assert bare.logprobs.content[0].top_logprobs == []  # type: ignore[union-attr, index]


def test_64_streams_of_mixed_length_and_a_rank_that_runs_dry(server: RunningServer) -> None:
    """One long request keeps its rank busy; the short ones go to the other, which then has nothing left to do."""
    before = server.metrics()

    async def run() -> list[tuple[int, int]]:
        async with server.async_client() as client:

            async def stream(number: int) -> tuple[int, int]:
                asked = 250 if number == 0 else 1 + number % 9
                answer = await client.completions.create(
                    **GREEDY,
                    prompt=PROMPT if number == 0 else "x = " + "1 + " * (number % 13),
                    max_tokens=asked,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_body={"ignore_eos": True},
                )
                usage = None
                async for chunk in answer:
                    usage = chunk.usage or usage
                assert usage is not None
                return asked, usage.completion_tokens

            return list(await asyncio.gather(*map(stream, range(64))))

    results = asyncio.run(run())
    assert [asked for asked, _ in results] == [generated for _, generated in results]
    after = server.metrics()

    def grown(name: str, **labels: str) -> float:
        return after.sum(name, **labels) - before.sum(name, **labels)

    generated = [grown("atom_generation_tokens_total", rank=str(rank)) for rank in range(2)]
    assert sum(generated) == sum(asked for asked, _ in results)
    assert min(generated) > 0
    assert after.sum("atom_requests_running") == after.sum("atom_requests_waiting") == 0
    # Both ranks step together to the end, the one without work too.
    wait_for(
        lambda: server.metrics().sum("atom_steps_total", rank="0")
        == server.metrics().sum("atom_steps_total", rank="1"),
        what="equal step counts",
    )


def test_one_request_leaves_the_other_rank_idle_but_stepping(
    server: RunningServer, client: openai.OpenAI
) -> None:
    def counts(name: str) -> list[float]:
        metrics = server.metrics()
        return [metrics.sum(name, rank=str(rank)) for rank in range(2)]

    generated, combined = counts("atom_generation_tokens_total"), counts("atom_combine_bytes_total")
    complete(client, max_tokens=40)
    grown = [b - a for a, b in zip(generated, counts("atom_generation_tokens_total"), strict=True)]
    assert sorted(grown) == [0, 40]
    idle = grown.index(0)
    # It ran its experts for the other's tokens and sent results back.
    wait_for(lambda: counts("atom_combine_bytes_total")[idle] > combined[idle], what="results")


def test_a_client_that_leaves_frees_its_request(server: RunningServer, http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 490, "ignore_eos": True}

    def cancelled() -> float:
        return server.metrics().sum("atom_choices_total", finish_reason="cancelled")

    before = cancelled()
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        next(response.iter_bytes())
    wait_for(lambda: cancelled() == before + 1, 10, "the streaming request's cancellation")
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json={**body, "n": 2}, timeout=0.3)
    wait_for(lambda: cancelled() == before + 3, 10, "the other request's cancellation")

    def idle() -> bool:
        metrics = server.metrics()
        names = ("atom_requests_running", "atom_requests_waiting", "atom_tokens_in_flight")
        return sum(map(metrics.sum, names)) == 0

    wait_for(idle, 10, "an idle server")


def test_errors_as_the_openai_client_sees_them(
    server: RunningServer, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        complete(client, model="gpt-5")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        complete(client.with_options(api_key="wrong"))
    with pytest.raises(openai.BadRequestError) as bad:
        complete(client, temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        complete(client, prompt=[5] * MAX_MODEL_LEN, max_tokens=1)
    assert long.value.code == "context_length_exceeded"
    assert str(MAX_MODEL_LEN) in long.value.message
    assert str(MAX_MODEL_LEN + 1) in long.value.message
    assert (
        complete(client, prompt=[5] * (MAX_MODEL_LEN - 1), max_tokens=1).usage.total_tokens == 512
    )
    with pytest.raises(openai.BadRequestError, match="token 5120"):
        complete(client, prompt=[5120])
    with pytest.raises(openai.BadRequestError, match="empty"):
        complete(client, prompt="")
    with pytest.raises(openai.BadRequestError, match="101") as many:
        complete(client, n=101)
    assert many.value.param == "n"
    with pytest.raises(openai.APIStatusError) as large:
        complete(client, prompt="x" * 100_001)
    assert large.value.status_code == 413
    with pytest.raises(openai.BadRequestError) as tools:
        tool: Any = {"type": "function", "function": {"name": "f"}}
        client.chat.completions.create(**GREEDY, messages=MESSAGES, tools=[tool])
    assert tools.value.param == "tools"


def test_a_full_queue_takes_no_more(client: openai.OpenAI) -> None:
    with complete(client, n=100, max_tokens=490, stream=True) as filling:
        next(iter(filling))
        with pytest.raises(openai.RateLimitError) as full:
            complete(client, stream=True)
        assert full.value.code == "queue_full"
        assert full.value.response.headers["retry-after"] == "1"

    def taken() -> bool:
        try:
            return bool(complete(client, max_tokens=1).choices)
        except openai.RateLimitError:
            return False

    wait_for(taken, what="an emptier queue")


def test_a_body_in_chunks_that_never_ends_is_refused(http: httpx.Client) -> None:
    chunks = (b" " * 65536 for _ in range(64))
    headers = {"content-type": "application/json"}
    response = http.post("/v1/completions", content=chunks, headers=headers)
    assert response.status_code == 413
    assert http.get("/health").status_code == 200


def test_models_and_version(client: openai.OpenAI, http: httpx.Client) -> None:
    (listed,) = client.models.list().data
    assert (listed.id, listed.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL) == listed
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    version = http.get("/version").json()
    assert (version["wire"], version["a_operand"], version["transport"]) == (
        "fp4",
        "fp4",
        "gloo+shm",
    )
    assert set(version) >= {"version", "torch", "transformers"}


def test_metrics_say_what_happened(server: RunningServer, client: openai.OpenAI) -> None:
    before = server.metrics()
    usage = complete(client, n=2, max_tokens=5).usage
    after = server.metrics()

    def grown(name: str, **labels: str) -> float:
        return after.sum(name, **labels) - before.sum(name, **labels)

    assert grown("atom_requests_total", endpoint="/v1/completions", status="200") == 1
    assert grown("atom_prompt_tokens_total") == usage.prompt_tokens
    assert grown("atom_generation_tokens_total") == usage.completion_tokens == 10
    for histogram in ("time_to_first_token", "time_per_output_token", "e2e_request_latency"):
        assert grown(f"atom_{histogram}_seconds_count") == 2
        assert grown(f"atom_{histogram}_seconds_sum") > 0
    for rank in ("0", "1"):
        # hidden 256 in fp4: 128 B and 8 scales, laid down in 128 B.
        assert after.sum("atom_wire_row_bytes", rank=rank) == 256
        assert grown("atom_steps_total", rank=rank) > 0
        rows = after.sum("atom_dispatch_rows_total", rank=rank)
        assert after.sum("atom_dispatch_bytes_total", rank=rank, part="payload") == 128 * rows > 0
        assert after.sum("atom_dispatch_bytes_total", rank=rank, part="scales") == 8 * rows
        assert after.sum("atom_dispatch_bytes_total", rank=rank, part="routing") > 0
        assert after.sum("atom_combine_bytes_total", rank=rank) > 0
    assert sorted(after.labels("atom_rank_info"), key=lambda labels: labels["rank"]) == [
        {"rank": rank, "wire": "fp4", "transport": "gloo+shm", "a_operand": "fp4"} for rank in "01"
    ]


def test_a_killed_rank_ends_everything_in_time(server: RunningServer) -> None:
    """Last in this module, for it ends the server that the others share."""
    endless: dict[str, Any] = {
        **GREEDY,
        "prompt": "x",
        "max_tokens": 500,
        "extra_body": {"ignore_eos": True},
    }
    with ThreadPoolExecutor() as pool:
        client, ranks = server.client(), server.rank_pids()
        assert len(ranks) == 2
        started = threading.Event()

        def stream() -> str:
            with pytest.raises(openai.APIError) as caught:
                for _ in client.completions.create(**endless, stream=True):
                    started.set()
            return str(caught.value)

        def whole() -> openai.APIStatusError:
            with pytest.raises(openai.APIStatusError) as caught:
                client.completions.create(**endless)
            return caught.value

        streaming, waiting = pool.submit(stream), pool.submit(whole)
        assert started.wait(60)
        wait_for(lambda: server.metrics().sum("atom_requests_running") == 2, what="two requests")
        killed_at = time.monotonic()
        os.kill(ranks[1], signal.SIGKILL)
        cause = "rank 1 was ended by SIGKILL"
        assert cause in streaming.result(10)
        error = waiting.result(10)
        assert error.status_code == 503
        assert cause in error.message
        with server.http() as http:
            health = http.get("/health")
            assert health.status_code == 503
            assert health.json() == {"status": "failed", "error": cause}
            refused = http.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
            assert refused.status_code == 503
        assert server.wait_end(10) == 1
        assert time.monotonic() - killed_at < 10
    assert cause in server.log
    assert all(map(gone, ranks))
