"""Drive a load of streamed completions against an OpenAI server and sum up what it saw.

Definitions, those of vLLM's serving benchmark:

- TTFT: from sending a request to the first event that holds a choice.
- ITL: between two such events of a request; they may hold several tokens or none.
- TPOT: (end to end - TTFT) / (output tokens - 1), for requests of two and more output tokens.
- E2EL: from sending a request to its last such event.
- throughputs: over the time from the first request's start to the last one's end.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from atom.benchmarks.http_stream import Connection, Exchange, ExchangeFailed, Origin
from atom.benchmarks.prompts import Prompt

METRICS = ("ttft", "tpot", "itl", "e2el")
METRIC_NAMES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, kw_only=True)
class Target:
    """The server, and what every request to it says.

    Attributes:
        base_url: ``http://host:port``. model: name in the API. endpoint: its path; one that ends in
            ``/chat/completions`` gets the prompt as a user's message. api_key: sent as a bearer token.
        temperature: 0 is greedy. ignore_eos: ask for exactly the output length. extra_body: further fields, over the others.
        include_usage: ask for token counts; without them events are counted as tokens.
        timeout: seconds for one request.
    """

    base_url: str
    model: str
    endpoint: str = "/v1/completions"
    api_key: str | None = None
    temperature: float = 0.0
    ignore_eos: bool = False
    include_usage: bool = True
    extra_body: dict[str, Any] = field(default_factory=dict)
    timeout: float = 600.0

    def body(self, prompt: Prompt) -> bytes:
        """A request's JSON."""
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": prompt.output_tokens,
            "temperature": self.temperature,
            "stream": True,
        }
        if self.endpoint.endswith("/chat/completions"):
            fields["messages"] = [{"role": "user", "content": prompt.content}]
        else:
            fields["prompt"] = prompt.content
        if self.include_usage:
            fields["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return _encode(fields | self.extra_body)

    @property
    def headers(self) -> dict[str, str]:
        """Further HTTP headers."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}


@dataclass(frozen=True, kw_only=True)
class Record:
    """How one request went; times in seconds of ``time.perf_counter``.

    Attributes:
        started, first, last: when it was sent, and its first and last event with a choice.
        gaps: between those events. input_tokens, output_tokens: as the server counts them, else as far as known.
        text: what was generated. error: why it failed, None when it did not.
    """

    started: float
    first: float = 0.0
    last: float = 0.0
    gaps: tuple[float, ...] = ()
    input_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    error: str | None = None


def read_exchange(exchange: Exchange, prompt: Prompt) -> Record:
    """What an answer says. Failed: a status other than 200, an error among the events, or an answer without an end."""
    started = exchange.started
    if exchange.status != 200:
        said = bytes(exchange.body[:500]).decode(errors="replace")
        return Record(started=started, error=f"HTTP {exchange.status}: {said}")
    times: list[float] = []
    texts: list[str] = []
    usage, finished = _Usage(), False
    for at, data in exchange.events:
        try:
            event = _decode_event(data)
        except msgspec.MsgspecError as error:
            return Record(
                started=started, error=f"an event is not a completion ({error}): {data[:200]!r}"
            )
        if event.error is not None:
            return Record(started=started, error=f"error in the stream: {event.error}")
        if event.usage is not None:
            usage = event.usage
        for choice in event.choices:
            times.append(at)
            texts.append(choice.text or (choice.delta and choice.delta.content) or "")
            finished = finished or choice.finish_reason is not None
    if not times or not finished:
        return Record(started=started, error="the stream ended without a finish_reason")
    return Record(
        started=started,
        first=times[0],
        last=times[-1],
        gaps=tuple(b - a for a, b in itertools.pairwise(times)),
        input_tokens=usage.prompt_tokens or prompt.input_tokens or 0,
        output_tokens=len(times) if usage.completion_tokens is None else usage.completion_tokens,
        text="".join(texts),
    )


async def _send(connection: Connection, target: Target, prompt: Prompt, body: bytes) -> Record:
    started = time.perf_counter()
    try:
        exchange = await connection.post(
            target.endpoint, body, target.headers, timeout=target.timeout
        )
    except ExchangeFailed as error:
        return Record(started=started, error=str(error))
    return read_exchange(exchange, prompt)


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """All requests of a load, in the order of their prompts, and the seconds from its start to the last one's end."""

    records: list[Record]
    duration: float


async def run_load(
    target: Target,
    prompts: Sequence[Prompt],
    *,
    max_concurrency: int | None = None,
    request_rate: float = float("inf"),
    seed: int = 0,
    on_done: Callable[[Record], None] = lambda record: None,
) -> LoadResult:
    """Send every prompt and wait for all answers.

    Args:
        target: where to. prompts: what.
        max_concurrency: most requests in flight; None for no limit.
        request_rate: requests a second, arriving as a Poisson process; infinite sends all at once.
        seed: of the arrivals.
        on_done: called after each request.
    """
    origin = Origin.parse(target.base_url)
    bodies = [target.body(prompt) for prompt in prompts]
    slots = min(len(prompts), max_concurrency or len(prompts))
    free: asyncio.LifoQueue[Connection] = asyncio.LifoQueue()
    connections = [Connection(origin) for _ in range(slots)]
    for connection in connections:
        free.put_nowait(connection)
    rng = random.Random(seed)
    tasks: list[asyncio.Task[Record]] = []

    async def one(index: int, connection: Connection) -> Record:
        try:
            record = await _send(connection, target, prompts[index], bodies[index])
        finally:
            free.put_nowait(connection)
        on_done(record)
        return record

    start = due = time.perf_counter()
    try:
        for index in range(len(prompts)):
            if request_rate != float("inf"):
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                due += rng.expovariate(request_rate)
            tasks.append(asyncio.create_task(one(index, await free.get())))
        records = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        for connection in connections:
            connection.close()
    return LoadResult(records=records, duration=time.perf_counter() - start)


def summarize(
    result: LoadResult,
    *,
    metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = (99.0,),
) -> dict[str, Any]:
    """The figures of a load under the keys of vLLM's benchmark; times in milliseconds.

    Means of nothing (no request succeeded, say) are 0, as there.
    """
    good = [record for record in result.records if record.error is None]
    tokens_in = sum(record.input_tokens for record in good)
    tokens_out = sum(record.output_tokens for record in good)
    duration = result.duration
    summary: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(result.records) - len(good),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(good) / duration,
        "output_throughput": tokens_out / duration,
        "total_token_throughput": (tokens_in + tokens_out) / duration,
    }
    samples = {
        "ttft": [r.first - r.started for r in good],
        "tpot": [(r.last - r.first) / (r.output_tokens - 1) for r in good if r.output_tokens > 1],
        "itl": [gap for r in good for gap in r.gaps],
        "e2el": [r.last - r.started for r in good],
    }
    for name in metrics:
        values = np.array(samples[name] or [0.0]) * 1e3
        summary[f"mean_{name}_ms"] = float(values.mean())
        summary[f"median_{name}_ms"] = float(np.median(values))
        summary[f"std_{name}_ms"] = float(values.std())
        for p in percentiles:
            summary[f"p{p:g}_{name}_ms"] = float(np.percentile(values, p))
    return summary
