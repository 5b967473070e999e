"""The text side of the model: its tokenizer and chat template. Nothing here touches its weights."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atom.entrypoints.openai.detokenize import Vocabulary, byte_level_alphabet, is_byte_level
from atom.entrypoints.openai.errors import bad_value
from atom.errors import LaunchRefused

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

LONG_TEXT = 10_000
"""Characters from which a prompt is tokenized in a thread, so that other requests' tokens do not wait for it."""

_NFC_LONGEST = 4
"""Characters that NFC makes one of, at most: no character's canonical decomposition has more (Unicode 16.0)."""

_KEEP_ALL = frozenset({"Sequence", "ByteLevel", "Split", "Digits"})
"""Pre-tokenizers that lose no character, as long as none of their behaviors is "Removed"."""


@dataclass(frozen=True)
class ModelText:
    """A loaded tokenizer.

    Attributes:
        tokenizer: with its chat template, if it has one.
        vocabulary: its tokens.
        vocab_size: tokens that may be in a prompt: those that the tokenizer knows and the model has embeddings for.
        longest_token: see :func:`longest_token`.
    """

    tokenizer: PreTrainedTokenizerFast
    vocabulary: Vocabulary
    vocab_size: int
    longest_token: int | None = None

    async def encode(
        self, text: str, *, special: bool, max_model_len: int, param: str
    ) -> list[int]:
        """Tokens of a prompt.

        Args:
            text: the prompt.
            special: whether to add the tokens that the tokenizer puts around a prompt.
            max_model_len: tokens over which it need not be tokenized to be refused.
            param: the request's field that it comes from, for the error.

        Raises:
            ApiError: 400, there is no way to write the text in ``max_model_len`` tokens.
        """
        self._check_length(text, max_model_len, param)
        backend = self.tokenizer.backend_tokenizer
        if len(text) < LONG_TEXT:
            # A request may have thousands of short prompts: others get their turn between them.
            await asyncio.sleep(0)
            return backend.encode(text, add_special_tokens=special).ids
        # encode() keeps the interpreter's lock while it works, encode_batch() does not.
        (encoding,) = await asyncio.to_thread(
            backend.encode_batch, [text], add_special_tokens=special
        )
        return encoding.ids

    def _check_length(self, text: str, max_model_len: int, param: str) -> None:
        if self.longest_token is None:
            return
        least = -(-len(text) // self.longest_token)
        if least > max_model_len:
            raise bad_value(
                f"This model's maximum context length is {max_model_len} tokens. However, the prompt has {len(text)} "
                f"characters, which are at least {least} tokens (no token stands for more than {self.longest_token} "
                f"characters). Shorten the prompt.",
                param,
                "context_length_exceeded",
            )


def longest_token(backend: Tokenizer) -> int | None:
    """Characters of a prompt that one token stands for, at most; None where a tokenizer may drop or merge characters.

    Known for byte-level tokenizers, whose tokens' bytes make up the whole text: a token of n bytes is written with n
    characters in the vocabulary, and stands for no more than n of the prompt's.
    """
    state = json.loads(backend.to_str())
    normalizer = state["normalizer"] or {"type": "Sequence", "normalizers": []}
    if normalizer not in ({"type": "Sequence", "normalizers": []}, {"type": "NFC"}):
        return None
    steps = [state["pre_tokenizer"] or {"type": None}]
    for step in steps:
        if step["type"] not in _KEEP_ALL or step.get("behavior") == "Removed":
            return None
        steps += step.get("pretokenizers", [])
    vocab = backend.get_vocab(with_added_tokens=True)
    # A byte without a token of its own would be dropped, or join its neighbours in one unknown token.
    whole = state["model"]["type"] == "BPE" and vocab.keys() >= byte_level_alphabet().keys()
    if not is_byte_level(backend) or not whole:
        return None
    if any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"]):
        return None
    return max(map(len, vocab)) * (_NFC_LONGEST if normalizer["type"] == "NFC" else 1)


def load_model_text(path: Path, *, load_format: str = "auto") -> ModelText:
    """Load the tokenizer of a model's directory.

    Args:
        path: the directory.
        load_format: with "dummy", a directory without a tokenizer gets one that reads bytes.

    Raises:
        LaunchRefused: there is none, or none that the tokenizers library runs, or the config is broken.
    """
    # A second or two; a server that is refused at its start does not spend them.
    from atom.engine.model_files import load_config, load_tokenizer

    # First, since transformers asks it how to read the tokenizer, and would blame that for a broken config.
    config = load_config(path)
    tokenizer = load_tokenizer(path, load_format=load_format)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise LaunchRefused(
            f"the tokenizer of {path} ({type(tokenizer).__name__}) is not one that the tokenizers library runs: "
            f"put a tokenizer.json there."
        )
    backend.no_truncation()
    backend.no_padding()
    vocabulary = Vocabulary(backend)
    size = min(vocabulary.size, config.get_text_config().vocab_size)
    return ModelText(tokenizer, vocabulary, size, longest_token(backend))
