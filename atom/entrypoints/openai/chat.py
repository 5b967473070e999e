"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec
from jinja2 import TemplateError
from starlette.requests import Request
from starlette.responses import Response

from atom.entrypoints.openai.context import Context
from atom.entrypoints.openai.detokenize import Vocabulary
from atom.entrypoints.openai.errors import bad_value
from atom.entrypoints.openai.exchange import read_json_body
from atom.entrypoints.openai.generation import ChoicePlan, Generation, Piece, Prompt, choices_of
from atom.entrypoints.openai.logprobs import chat_logprobs
from atom.entrypoints.openai.protocol import ChatRequest, parse
from atom.entrypoints.openai.streaming import Usage, collect, stream
from atom.entrypoints.openai.tokenizer import ModelText
from atom.entrypoints.openai.validation import (
    chat_sampling,
    check_count,
    check_model,
    check_unsupported,
    stop_strings,
    template_messages,
)

_json = msgspec.json.Encoder().encode


async def create_chat_completion(request: Request, context: Context) -> Response:
    """Answer a conversation's last turn.

    Raises:
        ApiError, EngineFailed, QueueFull, ClientGone: it cannot be answered.
    """
    received_at = time.monotonic()
    asked = parse(await read_json_body(request, context.max_body_bytes), ChatRequest)
    check_model(asked, context.args.model_name)
    check_unsupported(asked)
    check_count(1, asked.n, context.router.max_queue)
    messages = template_messages(asked.messages)
    text, longest = context.serving()
    prompt_ids = await text.encode(
        render(messages, text), special=False, max_model_len=longest, param="messages"
    )
    if not prompt_ids:
        raise bad_value("messages: the chat template makes an empty prompt of them.", "messages")
    sampling = chat_sampling(asked, prompt_tokens=len(prompt_ids), max_model_len=longest)
    plan = ChoicePlan(
        prompt=Prompt(token_ids=prompt_ids), sampling=sampling, stops=stop_strings(asked)
    )
    generation = Generation(
        choices_of(plan, asked.n or 1),
        router=context.router,
        vocabulary=text.vocabulary,
        streaming=bool(asked.stream),
        received_at=received_at,
    )
    context.metrics.count_prompt(len(prompt_ids))
    answer = _Answer(context.args.model_name, text.vocabulary, streaming=bool(asked.stream))
    if not asked.stream:
        pieces = await collect(request, generation)
        usage = Usage.of(len(prompt_ids), generation)
        return Response(answer.whole(pieces, usage), media_type="application/json")
    wants_usage = asked.stream_options is not None and asked.stream_options.include_usage
    answer.shows_usage = wants_usage
    return await stream(
        request,
        generation,
        encode=answer.chunk,
        usage=(
            (lambda: answer.usage_chunk(Usage.of(len(prompt_ids), generation)))
            if wants_usage
            else None
        ),
    )


def render(messages: list[dict[str, str]], text: ModelText) -> str:
    """The prompt that the tokenizer's chat template makes."""
    if not text.tokenizer.chat_template:
        raise bad_value(
            "the model's tokenizer has no chat template: use /v1/completions with a prompt.",
            "messages",
            "no_chat_template",
        )
    try:
        rendered = text.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:
        raise bad_value(
            f"messages: the model's chat template refuses them: {error}", "messages"
        ) from None
    assert isinstance(rendered, str)
    return rendered


class _Answer:
    """The JSON of one chat answer, whole or in chunks."""

    def __init__(self, model: str, vocabulary: Vocabulary, *, streaming: bool) -> None:
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if streaming else "chat.completion",
            "created": int(time.time()),
            "model": model,
        }
        self._vocabulary = vocabulary
        self._chunk_head = b"data: " + _json(self._head)[:-1] + b',"choices":['
        self._introduced: set[int] = set()
        self.shows_usage = False

    def whole(self, pieces: dict[int, list[Piece]], usage: Usage) -> bytes:
        """The answer at once."""
        choices = []
        for index, own in pieces.items():
            tokens = [token for piece in own for token in piece.tokens or ()]
            reports = any(piece.tokens is not None for piece in own)
            message = {
                "role": "assistant",
                "content": "".join(piece.text for piece in own),
                "refusal": None,
            }
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": chat_logprobs(self._vocabulary, tokens) if reports else None,
                    "finish_reason": own[-1].finish_reason,
                }
            )
        return _json({**self._head, "choices": choices, "usage": usage})

    def chunk(self, piece: Piece) -> bytes:
        """The events of one piece; a choice's first one says who speaks."""
        first = b""
        if piece.index not in self._introduced:
            self._introduced.add(piece.index)
            first = self._event(piece.index, b'{"role":"assistant","content":""}', b"null", b"null")
        if not piece.text and not piece.tokens and piece.finish_reason:
            delta = b"{}"
        else:
            delta = b'{"content":' + _json(piece.text) + b"}"
        logprobs = (
            b"null"
            if piece.tokens is None
            else _json(chat_logprobs(self._vocabulary, piece.tokens))
        )
        return first + self._event(piece.index, delta, logprobs, _json(piece.finish_reason))

    def _event(self, index: int, delta: bytes, logprobs: bytes, finish_reason: bytes) -> bytes:
        return b"".join(
            (
                self._chunk_head,
                b'{"index":%d,"delta":' % index,
                delta,
                b',"logprobs":',
                logprobs,
                b',"finish_reason":',
                finish_reason,
                b'}],"usage":null}\n\n' if self.shows_usage else b"}]}\n\n",
            )
        )

    def usage_chunk(self, usage: Usage) -> bytes:
        """The event after all pieces."""
        return self._chunk_head + b'],"usage":' + _json(usage) + b"}\n\n"
