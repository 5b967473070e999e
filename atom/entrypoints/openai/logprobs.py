"""How a token is named where its log probability is reported."""

from __future__ import annotations

from typing import Any

from atom.entrypoints.openai.detokenize import Vocabulary
from atom.entrypoints.openai.generation import Token

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def token_name(vocabulary: Vocabulary, token_id: int) -> str:
    """The token's text; ``bytes:\\xe2\\x82`` where its bytes are no whole characters."""
    data = vocabulary.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(vocabulary: Vocabulary, tokens: list[Token]) -> dict[str, Any]:
    """The ``logprobs`` of a chat choice."""
    content = []
    for token in tokens:
        assert token.logprob is not None, "a chat answer echoes no prompt"
        entry = _entry(vocabulary, token.token_id, token.logprob.logprob)
        entry["top_logprobs"] = [
            _entry(vocabulary, id, logprob) for id, logprob in token.logprob.top
        ]
        content.append(entry)
    return {"content": content, "refusal": None}


def _entry(vocabulary: Vocabulary, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_name(vocabulary, token_id),
        "logprob": max(logprob, LOWEST),
        "bytes": list(vocabulary.token_bytes(token_id)),
    }
