"""The messages between the router and the workers, one msgpack frame each.

Down, router to one worker: :class:`Submit`, :class:`Cancel`, :class:`Wake`, :class:`Stop`.
Up, worker to router: :class:`Ready`, :class:`Step`, :class:`Failed`.

Sockets (ZMQ, one frame a message). The router binds all of them; a worker connects a PUSH socket to ``up``, which all
workers share, and a PULL socket to the ``down`` of its own rank. Both keep the order in which messages were sent. A
worker connects before it does anything that can fail, and closes with a linger of a few seconds, so that its
:class:`Failed` arrives. It exits 0 after :class:`Stop`, 2 after a refused launch, 1 otherwise.

A worker gets its :class:`WorkerConfig` as one line of JSON on standard input: :mod:`atom.engine.bootstrap`.
"""

from __future__ import annotations

import msgspec


class RouterAddresses(msgspec.Struct, frozen=True, kw_only=True):
    """Where the router listens.

    Attributes:
        up: of the PULL socket that all workers send to.
        down: of the PUSH socket of each rank, in rank order.
        lifeline: ``host:port`` of a TCP socket that a worker on another host keeps open while it lives, so that
            either side notices the other's end; None when all workers are the router's own child processes.
    """

    up: str
    down: list[str]
    lifeline: str | None = None


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that one rank's process is told at its start.

    Attributes:
        rank: which. world_size: number of ranks.
        local_rank: which on this host. local_world_size: number of ranks on this host.
        model: directory of the model in Hugging Face layout, or the name of a bundled one.
        load_format: "auto" reads the weights, "dummy" draws random ones from the config alone.
        max_model_len: longest prompt plus generation; None takes the model's own limit.
        max_num_seqs: requests in one rank's batch. max_num_batched_tokens: tokens in one rank's step.
        device: "auto", "cpu" or "cuda".
        seed: of dummy weights, and of requests that bring none.
        log_level: least severity that is logged: "debug", "info", "warning" or "error".
        enforce_eager: run decode steps without CUDA graphs.
        store_port: port of the rendezvous store on this host, hosted by rank 0; None takes torchrun's environment.
        store_fd: inherited listening socket of that store, for rank 0.
        router: where the router listens; None asks the store, to which rank 0 publishes it.
        prints_refusal: no router runs on this host, so the worker itself writes a refused launch to stderr.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    model: str
    load_format: str
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    device: str
    seed: int
    log_level: str
    enforce_eager: bool = False
    store_port: int | None = None
    store_fd: int | None = None
    router: RouterAddresses | None = None
    prints_refusal: bool = False


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one request are chosen.

    Attributes:
        max_tokens: most tokens to generate, at least 1.
        temperature: 0 is greedy.
        top_p: nucleus of the distribution that is sampled from, in (0, 1].
        top_k: most likely tokens that are sampled from; 0 means all.
        seed: makes the request's sampling reproducible, whatever else is in the batch; None draws one.
        logprobs: most likely alternatives to report for each token, None for no log probabilities at all.
        prompt_logprobs: also report the prompt tokens' log probabilities (``echo`` with ``logprobs``).
        ignore_eos: go on after an end-of-sequence token.
        stop_token_ids: further ids that end the request, beside the model's own.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: bool = False
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log probability of the token that was chosen (natural log, of the unscaled distribution) and the likeliest ones."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class TokenOutput(msgspec.Struct, kw_only=True):
    """What one step gave one request.

    Attributes:
        request_id: which.
        token_ids: new tokens, in order; an end-of-sequence token that ended the request is included.
        logprobs: one a new token where the request asked for them.
        prompt_logprobs: once, with the first token: one a prompt token, None for the first of them.
        finish_reason: None while it goes on; "stop" (an end token), "length", "cancelled" or "error".
        error: why, for "error".
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    error: str | None = None


class RankStats(msgspec.Struct, kw_only=True):
    """State of one rank after a step.

    Attributes:
        running: requests in its batch.
        waiting: requests not scheduled yet.
        kv_used: share of the KV cache in use, 0 to 1.
        steps: steps since start, idle ones included.
        wire_bytes: the byte counters (payload, scales, routing, combine, rows, calls) since start.
    """

    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    steps: int = 0
    wire_bytes: dict[str, int] = {}


class Submit(msgspec.Struct, tag=True, kw_only=True):
    """Router to the rank that shall run a request. ``epoch`` counts submissions over all ranks: see lockstep."""

    request_id: str
    epoch: int
    prompt_ids: list[int]
    sampling: SamplingParams


class Cancel(msgspec.Struct, tag=True, kw_only=True):
    """Router to the rank that runs a request: free it. Answered by a TokenOutput with finish_reason "cancelled"."""

    request_id: str


class Wake(msgspec.Struct, tag=True, kw_only=True):
    """Router to every other rank when one gets a request: submissions up to ``epoch`` exist somewhere."""

    epoch: int


class Stop(msgspec.Struct, tag=True, kw_only=True):
    """Router to every rank: leave the loop once no rank has work, then exit 0."""


class Ready(msgspec.Struct, tag=True, kw_only=True):
    """A worker can take requests.

    Attributes:
        rank: which.
        startup_lines: its ``[MORI-V2] Created MegaMoE`` lines.
        wire: bf16, fp8 or fp4. row_bytes: of one token row. transport: as ``dispatch=``. a_operand: fp8 or fp4.
        max_model_len: longest prompt plus generation. max_num_seqs: of one rank. kv_tokens: KV capacity of one rank.
        eos_token_ids: the model's end-of-sequence tokens.
    """

    rank: int
    startup_lines: list[str]
    wire: str
    row_bytes: int
    transport: str
    a_operand: str
    max_model_len: int
    max_num_seqs: int
    kv_tokens: int
    eos_token_ids: list[int]


class Step(msgspec.Struct, tag=True, kw_only=True):
    """A worker's step gave these tokens; at most one message a step."""

    rank: int
    outputs: list[TokenOutput]
    stats: RankStats


class Failed(msgspec.Struct, tag=True, kw_only=True):
    """A worker cannot go on. ``refused``: the launch itself is at fault (exit status 2), else an error at run time."""

    rank: int
    message: str
    refused: bool


Down = Submit | Cancel | Wake | Stop
Up = Ready | Step | Failed

encode = msgspec.msgpack.Encoder().encode
decode_down = msgspec.msgpack.Decoder(Down).decode
decode_up = msgspec.msgpack.Decoder(Up).decode
