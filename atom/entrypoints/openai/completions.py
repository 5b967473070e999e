"""``POST /v1/completions``."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from atom.entrypoints.openai.context import Context
from atom.entrypoints.openai.detokenize import Vocabulary
from atom.entrypoints.openai.errors import bad_value
from atom.entrypoints.openai.exchange import read_json_body
from atom.entrypoints.openai.generation import (
    ChoicePlan,
    Generation,
    Piece,
    Prompt,
    Token,
    choices_of,
)
from atom.entrypoints.openai.logprobs import LOWEST, token_name
from atom.entrypoints.openai.protocol import CompletionRequest, parse
from atom.entrypoints.openai.streaming import Usage, collect, stream
from atom.entrypoints.openai.tokenizer import ModelText
from atom.entrypoints.openai.validation import (
    check_count,
    check_model,
    check_unsupported,
    completion_sampling,
    stop_strings,
)

_json = msgspec.json.Encoder().encode


async def create_completion(request: Request, context: Context) -> Response:
    """Answer a request for completions.

    Raises:
        ApiError, EngineFailed, QueueFull, ClientGone: it cannot be answered.
    """
    received_at = time.monotonic()
    asked = parse(await read_json_body(request, context.max_body_bytes), CompletionRequest)
    check_model(asked, context.args.model_name)
    check_unsupported(asked)
    parts = _split(asked.prompt)
    check_count(len(parts), asked.n, context.router.max_queue)
    text, longest = context.serving()
    prompts = [await _prompt(part, where, text, asked, longest) for where, part in parts]
    plans: list[ChoicePlan] = []
    for prompt in prompts:
        sampling = completion_sampling(
            asked, prompt_tokens=len(prompt.token_ids), max_model_len=longest
        )
        plan = ChoicePlan(
            prompt=prompt,
            sampling=sampling,
            stops=stop_strings(asked),
            echo=bool(asked.echo),
            generates=asked.max_tokens != 0,
        )
        plans += choices_of(plan, asked.n or 1)
    generation = Generation(
        plans,
        router=context.router,
        vocabulary=text.vocabulary,
        streaming=bool(asked.stream),
        received_at=received_at,
    )
    prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    context.metrics.count_prompt(prompt_tokens)
    answer = _Answer(context.args.model_name, text.vocabulary)
    if not asked.stream:
        pieces = await collect(request, generation)
        usage = Usage.of(prompt_tokens, generation)
        return Response(answer.whole(pieces, usage), media_type="application/json")
    wants_usage = asked.stream_options is not None and asked.stream_options.include_usage
    answer.shows_usage = wants_usage
    return await stream(
        request,
        generation,
        encode=answer.chunk,
        usage=(
            (lambda: answer.usage_chunk(Usage.of(prompt_tokens, generation)))
            if wants_usage
            else None
        ),
    )


def _split(prompt: str | list[Any]) -> list[tuple[str, str | list[int]]]:
    """The prompts of a request with their names: one text, one list of tokens, or a list of either."""
    if isinstance(prompt, str):
        return [("prompt", prompt)]
    if not prompt:
        raise bad_value("prompt=[]: at least one prompt or token.", "prompt")
    if all(isinstance(item, int) for item in prompt):
        return [("prompt", prompt)]
    if any(isinstance(item, int) for item in prompt):
        raise bad_value("prompt mixes tokens with texts or lists: give one kind.", "prompt")
    return [(f"prompt[{n}]", item) for n, item in enumerate(prompt)]


async def _prompt(
    part: str | list[int], where: str, text: ModelText, asked: CompletionRequest, longest: int
) -> Prompt:
    if isinstance(part, str):
        ids = await text.encode(part, special=True, max_model_len=longest, param="prompt")
        prompt = Prompt(token_ids=ids, text=part)
    else:
        for id in part:
            if not 0 <= id < text.vocab_size:
                raise bad_value(
                    f"{where} holds token {id}: the model's tokens are 0 to {text.vocab_size - 1}.",
                    "prompt",
                )
        prompt = Prompt(token_ids=part, text=text.vocabulary.decode(part) if asked.echo else "")
    if not prompt.token_ids:
        raise bad_value(f"{where} is empty: at least one token.", "prompt")
    return prompt


class _Answer:
    """The JSON of one completion, whole or in chunks."""

    def __init__(self, model: str, vocabulary: Vocabulary) -> None:
        self._head: dict[str, Any] = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._vocabulary = vocabulary
        self._chunk_head = b"data: " + _json(self._head)[:-1] + b',"choices":['
        self.shows_usage = False

    def whole(self, pieces: dict[int, list[Piece]], usage: Usage) -> bytes:
        """The answer at once."""
        choices = [
            {
                "index": index,
                "text": "".join(piece.text for piece in own),
                "logprobs": self._logprobs([t for piece in own for t in piece.tokens or ()], own),
                "finish_reason": own[-1].finish_reason,
            }
            for index, own in pieces.items()
        ]
        return _json({**self._head, "choices": choices, "usage": usage})

    def chunk(self, piece: Piece) -> bytes:
        """The event of one piece."""
        logprobs = b"null" if piece.tokens is None else _json(self._logprobs(piece.tokens, [piece]))
        return b"".join(
            (
                self._chunk_head,
                b'{"index":%d,"text":' % piece.index,
                _json(piece.text),
                b',"logprobs":',
                logprobs,
                b',"finish_reason":',
                _json(piece.finish_reason),
                b'}],"usage":null}\n\n' if self.shows_usage else b"}]}\n\n",
            )
        )

    def usage_chunk(self, usage: Usage) -> bytes:
        """The event after all pieces."""
        return self._chunk_head + b'],"usage":' + _json(usage) + b"}\n\n"

    def _logprobs(self, tokens: list[Token], pieces: list[Piece]) -> dict[str, Any] | None:
        if all(piece.tokens is None for piece in pieces):
            return None
        name = self._vocabulary
        return {
            "tokens": [token_name(name, token.token_id) for token in tokens],
            "token_logprobs": [
                token.logprob and max(token.logprob.logprob, LOWEST) for token in tokens
            ],
            "top_logprobs": [
                token.logprob
                and {
                    token_name(name, id): max(logprob, LOWEST)
                    for id, logprob in reversed(
                        [*token.logprob.top, (token.token_id, token.logprob.logprob)]
                    )
                }
                for token in tokens
            ],
            "text_offset": [token.offset for token in tokens],
        }
