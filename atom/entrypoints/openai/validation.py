"""From a request's fields to sampling parameters: what is honoured, and what is refused with its reason."""

from __future__ import annotations

from typing import Any

from atom.engine.protocol import SamplingParams
from atom.entrypoints.openai.errors import ApiError, bad_value
from atom.entrypoints.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
)

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's ``max_tokens`` of a completion that names none."""


ROLES = ("system", "developer", "user", "assistant")
"""Who may speak in a chat; tools may not, since none are offered to the model."""


def check_model(request: GenerationRequest, served: str) -> None:
    """Refuse (404) another model than the one that is served."""
    if request.model != served:
        raise ApiError(
            404,
            f"model {request.model!r} does not exist: this server serves {served!r}.",
            param="model",
            code="model_not_found",
        )


def check_unsupported(request: GenerationRequest) -> None:
    """Refuse (400) fields whose value would have to change something that this server does not do."""
    neutral: dict[str, tuple[Any, ...]] = {
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "repetition_penalty": (1,),
        "min_p": (0,),
        "min_tokens": (0,),
        "logit_bias": ({},),
    }
    match request:
        case CompletionRequest():
            neutral |= {"best_of": (request.n or 1,), "suffix": ("",)}
        case ChatRequest():
            neutral |= {
                "tools": ([],),
                "tool_choice": ("none", "auto"),
                "functions": ([],),
                "function_call": ("none",),
                "modalities": (["text"],),
                "store": (False,),
            }
    for field, accepted in neutral.items():
        value = getattr(request, field)
        if value is not None and value not in accepted:
            allowed = " or ".join(repr(value) for value in accepted)
            raise bad_value(
                f"{field}={value!r} is not supported: only {allowed} is accepted; leave it out.",
                field,
                "unsupported_parameter",
            )
    if request.response_format is not None and request.response_format.type != "text":
        raise bad_value(
            f"response_format.type={request.response_format.type!r} is not supported: only 'text' is.",
            "response_format",
            "unsupported_parameter",
        )
    if request.stream_options is not None and not request.stream:
        raise bad_value("stream_options is only allowed with stream=true.", "stream_options")


def check_count(prompts: int, n: int | None, max_queue: int) -> None:
    """Refuse (400) a request for more choices than the queue could ever hold."""
    choices = prompts * (n or 1)
    if choices > max_queue:
        raise bad_value(
            f"n={n or 1} choices of {prompts} prompts are {choices} requests, more than the queue holds ({max_queue}, "
            f"ATOM_MAX_QUEUE): ask for fewer at once.",
            "n",
        )


def stop_strings(request: GenerationRequest) -> tuple[str, ...]:
    """The request's stop strings."""
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


def completion_sampling(
    request: CompletionRequest, *, prompt_tokens: int, max_model_len: int
) -> SamplingParams:
    """Sampling of one completion; ``max_tokens`` 0 (``echo`` alone) becomes one token, for the caller to drop."""
    max_tokens = request.max_tokens
    if max_tokens == 0 and not request.echo:
        raise bad_value(
            "max_tokens=0: at least 1, or echo=true for the prompt alone.", "max_tokens"
        )
    if max_tokens is None:
        max_tokens = min(DEFAULT_COMPLETION_TOKENS, max(max_model_len - prompt_tokens, 1))
    prompt_logprobs = bool(request.echo) and request.logprobs is not None
    return _sampling(
        request,
        prompt_tokens=prompt_tokens,
        max_tokens=max(max_tokens, 1),
        max_model_len=max_model_len,
        logprobs=request.logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def chat_sampling(
    request: ChatRequest, *, prompt_tokens: int, max_model_len: int
) -> SamplingParams:
    """Sampling of one chat answer, which by default may take all that the prompt leaves."""
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise bad_value(
            f"max_tokens={old} and max_completion_tokens={new} are two names of one limit: give one of them.",
            "max_completion_tokens",
        )
    field = "max_tokens" if new is None else "max_completion_tokens"
    max_tokens = old if new is None else new
    if max_tokens == 0:
        raise bad_value(f"{field}=0: at least 1.", field)
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_value(f"top_logprobs={request.top_logprobs} needs logprobs=true.", "top_logprobs")
    return _sampling(
        request,
        prompt_tokens=prompt_tokens,
        max_tokens=max(max_model_len - prompt_tokens, 1) if max_tokens is None else max_tokens,
        max_model_len=max_model_len,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prompt_logprobs=False,
    )


def _sampling(
    request: GenerationRequest,
    *,
    prompt_tokens: int,
    max_tokens: int,
    max_model_len: int,
    logprobs: int | None,
    prompt_logprobs: bool,
) -> SamplingParams:
    if prompt_tokens + max_tokens > max_model_len:
        raise bad_value(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the prompt, {max_tokens} in the completion). "
            f"Shorten the prompt or lower max_tokens.",
            "messages" if isinstance(request, ChatRequest) else "prompt",
            "context_length_exceeded",
        )
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(request.top_k or 0, 0),
        seed=request.seed,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        ignore_eos=bool(request.ignore_eos),
    )


def seed_of_choice(sampling: SamplingParams, choice: int) -> int | None:
    """The seed of one of ``n`` choices: theirs are consecutive, so that they differ and repeat."""
    if sampling.seed is None:
        return None
    shifted = sampling.seed + choice
    return shifted if shifted < 2**63 else shifted - 2**64


def template_messages(messages: list[Message]) -> list[dict[str, str]]:
    """Messages as a chat template takes them: role and text.

    Raises:
        ApiError: 400 for what no template here can express (tools, names, other parts than text).
    """
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _template_message(message: Message, where: str) -> dict[str, str]:
    if message.role not in ROLES:
        raise bad_value(
            f"{where}.role={message.role!r} is not supported: use one of {', '.join(ROLES)}.",
            f"{where}.role",
        )
    for field in ("name", "refusal", "annotations", "tool_calls"):
        if getattr(message, field):
            raise bad_value(
                f"{where}.{field} is not supported: leave it out.",
                f"{where}.{field}",
                "unsupported_parameter",
            )
    content = message.content
    if content is None:
        raise bad_value(f"{where}.content: text is required.", f"{where}.content")
    if not isinstance(content, str):
        for part in content:
            if part.type != "text" or part.text is None:
                raise bad_value(
                    f"{where}.content has a part of type {part.type!r}: this model reads text parts only.",
                    f"{where}.content",
                )
        content = "".join(part.text or "" for part in content)
    # OpenAI's newer name of the same role; templates know the older one.
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": content}
