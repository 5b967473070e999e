"""The text side of the model: its tokenizer and chat template. Nothing here touches its weights."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atom.entrypoints.openai.detokenize import Vocabulary
from atom.errors import LaunchRefused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LONG_TEXT = 100_000
"""Characters from which a prompt is tokenized in a thread, so that other requests' tokens do not wait for it."""


@dataclass(frozen=True)
class ModelText:
    """A loaded tokenizer.

    Attributes:
        tokenizer: with its chat template, if it has one.
        vocabulary: its tokens.
        vocab_size: tokens that may be in a prompt: those that the tokenizer knows and the model has embeddings for.
    """

    tokenizer: PreTrainedTokenizerFast
    vocabulary: Vocabulary
    vocab_size: int

    async def encode(self, text: str, *, special: bool) -> list[int]:
        """Tokens of a text; ``special`` adds those that the tokenizer puts around a prompt."""
        backend = self.tokenizer.backend_tokenizer
        if len(text) < LONG_TEXT:
            return backend.encode(text, add_special_tokens=special).ids
        encoding = await asyncio.to_thread(backend.encode, text, add_special_tokens=special)
        return encoding.ids


def load_model_text(path: Path, *, load_format: str = "auto") -> ModelText:
    """Load the tokenizer of a model's directory.

    Args:
        path: the directory.
        load_format: with "dummy", a directory without a tokenizer gets one that reads bytes.

    Raises:
        LaunchRefused: there is none, or none that the tokenizers library runs.
    """
    # A second or two; a server that is refused at its start does not spend them.
    from atom.engine.model_files import load_config, load_tokenizer

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
    embeddings = load_config(path).get_text_config().vocab_size
    return ModelText(tokenizer, vocabulary, min(vocabulary.size, embeddings))
