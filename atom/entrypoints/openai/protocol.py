"""The bodies of requests, as OpenAI defines them, with the extensions ``top_k`` and ``ignore_eos``.

A field that is here is honoured or refused by :mod:`atom.entrypoints.openai.validation`; one that is not here is
refused by name. Fields whose only accepted value changes nothing (``best_of`` equal to ``n``, a penalty of 0) are here
because clients send them.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from atom.entrypoints.openai.errors import ApiError, bad_value

MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_CHOICES = 128

Count = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
StopString = Annotated[str, Meta(min_length=1)]
Stops = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
Temperature = Annotated[float, Meta(ge=0, le=2)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """``include_usage`` asks for a last chunk with the usage."""

    include_usage: bool = False


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """Only plain text is generated."""

    type: str
    json_schema: Any = None


class GenerationRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both kinds of request share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Count | None = None
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    seed: Seed | None = None
    stop: Stops | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None


class CompletionRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[str | int | list[int]]
    logprobs: Logprobs | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message's content."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One turn of a conversation. An earlier answer may be sent back as it came: its empty fields are accepted."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: str | None = None
    audio: None = None
    annotations: list[Any] | None = None
    function_call: None = None
    tool_calls: list[Any] | None = None


class ChatRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    store: bool | None = None


T = TypeVar("T", bound=GenerationRequest)


def parse(body: bytes, kind: type[T]) -> T:
    """A request from its JSON.

    Raises:
        ApiError: 400, naming the field, the value that was given and what is allowed.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), body) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply.", code="invalid_json") from None


def _explain(text: str, body: bytes) -> ApiError:
    """Turn msgspec's "Expected `int`, got `str` - at `$.n`" into an error that names field and value."""
    reason, _, path = text.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    if reason.startswith("Object contains unknown field"):
        field = reason.split("`")[1]
        name = f"{path}.{field}" if path else field
        return bad_value(
            f"{name}: this server does not know the field, and ignores none silently: leave it out.",
            name,
            "unknown_parameter",
        )
    if reason.startswith("Object missing required field"):
        field = reason.split("`")[1]
        name = f"{path}.{field}" if path else field
        return bad_value(f"{name}: the field is required.", name, "missing_required_parameter")
    reason = reason.replace("`", "")
    if not path:
        return bad_value(f"the body must be a JSON object: {reason}", None)
    return bad_value(f"{path}{_shown(body, path)}: {reason[0].lower()}{reason[1:]}.", path)


def _shown(body: bytes, path: str) -> str:
    """``=VALUE`` for the value at a path such as ``messages[0].role``, shortened; empty where the body breaks off later."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        try:
            value = value[name] if name else value[int(index)]
        except (KeyError, IndexError, TypeError):
            # An ellipsis stands for a mapping's key; what holds it is shown.
            break
    text = msgspec.json.encode(value).decode()
    return "=" + (text if len(text) <= 80 else text[:77] + "...")
