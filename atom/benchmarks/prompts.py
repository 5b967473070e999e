"""The prompts of a load: random tokens of a given length, or lines of a file. The same seed gives the same prompts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAFE_VOCABULARY = 1000
"""Ids below this exist in practically every model's vocabulary; used where the vocabulary is not known."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One request of a load.

    Attributes:
        content: token ids, or text.
        input_tokens: how many tokens it is; None when only the server can tell.
        output_tokens: how many are asked for.
    """

    content: list[int] | str
    input_tokens: int | None
    output_tokens: int


def check_range_ratio(ratio: float) -> None:
    """Refuse a ``--random-range-ratio`` that is not a share.

    Raises:
        ValueError: it is not in [0, 1).
    """
    if not 0 <= ratio < 1:
        raise ValueError(
            f"--random-range-ratio {ratio} is not in [0, 1): 0 makes all lengths equal"
        )


def random_prompts(
    count: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    vocab_size: int = SAFE_VOCABULARY,
    seed: int = 0,
) -> list[Prompt]:
    """Prompts of uniformly drawn token ids.

    Args:
        count: how many.
        input_len, output_len: tokens in and out.
        range_ratio: lengths are drawn uniformly from ``len * (1 - ratio)`` to ``len * (1 + ratio)``.
        vocab_size: ids are below it.
        seed: of the draw.

    Raises:
        ValueError: a length, the ratio or the vocabulary cannot be.
    """
    check_range_ratio(range_ratio)
    for name, value in (("input", input_len), ("output", output_len), ("vocabulary", vocab_size)):
        if value < 1:
            raise ValueError(f"{name} length {value} is not greater than zero")
    rng = random.Random(seed)

    def length(mean: int) -> int:
        low = max(1, int(mean * (1 - range_ratio)))
        return rng.randint(low, max(low, round(mean * (1 + range_ratio))))

    prompts = []
    for _ in range(count):
        n_in, n_out = length(input_len), length(output_len)
        ids = rng.choices(range(vocab_size), k=n_in)
        prompts.append(Prompt(content=ids, input_tokens=n_in, output_tokens=n_out))
    return prompts


def as_text(prompts: Sequence[Prompt], tokenizer_file: Path) -> list[Prompt]:
    """The prompts as text that has the same number of tokens, for servers that take no token ids.

    Random ids decode to text that seldom encodes to as many tokens, so tokens are added, then characters cut.

    Args:
        prompts: of token ids. tokenizer_file: a ``tokenizer.json``.

    Raises:
        ValueError: no text of the right length was found.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    return [
        Prompt(
            content=_text_of(prompt, encode, tokenizer.decode),
            input_tokens=prompt.input_tokens,
            output_tokens=prompt.output_tokens,
        )
        for prompt in prompts
    ]


def _text_of(
    prompt: Prompt, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str]
) -> str:
    assert isinstance(prompt.content, list)
    want, rng = len(prompt.content), random.Random(repr(prompt.content))
    # Halves of characters do not survive decoding.
    text = decode(prompt.content).replace("\ufffd", "")
    for _ in range(100):
        while len(encode(text)) < want:
            text += decode([rng.choice(prompt.content)]).replace("\ufffd", "") or " a"
        while len(encode(text)) > want:
            text = text[:-1]
        if len(encode(text)) == want:
            return text
    raise ValueError(f"no text of exactly {want} tokens was found for a random prompt")


def read_jsonl(path: Path, *, output_len: int) -> list[Prompt]:
    """The prompts of a file with one JSON object a line.

    An object has ``prompt`` (text or a list of token ids) and may have ``output_len``.

    Raises:
        ValueError: the file cannot be read, a line is not such an object, or there is none.
    """
    prompts = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"--dataset-path {path}: {error.strerror or error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompts.append(_prompt_of(json.loads(line), output_len))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{path}:{number}: not a JSON object with `prompt` (a text or a list of token ids) and optionally "
                f"`output_len`: {error}"
            ) from None
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


def _prompt_of(record: Any, output_len: int) -> Prompt:
    content = record["prompt"] if isinstance(record, dict) and "prompt" in record else None
    is_ids = isinstance(content, list) and content and all(type(x) is int for x in content)
    if not (is_ids or (isinstance(content, str) and content)):
        raise ValueError("no usable `prompt`")
    asked = record.get("output_len", output_len)
    if type(asked) is not int or asked < 1:
        raise ValueError(f"output_len {asked!r} is not a whole number greater than zero")
    return Prompt(
        content=content, input_tokens=len(content) if is_ids else None, output_tokens=asked
    )
