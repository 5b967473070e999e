"""The text side of the model: its tokenizer and chat template. Nothing here touches its weights."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atom.entrypoints.openai.detokenize import Vocabulary
from atom.errors import LaunchRefused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LONG_TEXT = 100_000
"""Characters from which a prompt is tokenized in a thread, so that other requests' tokens do not wait for it."""


VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")
"""Files that transformers reads a vocabulary from."""


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


def load_model_text(path: Path) -> ModelText:
    """Load the tokenizer of a model's directory.

    Raises:
        LaunchRefused: there is none, or none that the tokenizers library runs.
    """
    if not any((path / name).is_file() for name in VOCABULARY_FILES):
        # transformers would make an empty tokenizer from the config alone.
        raise LaunchRefused(
            f"{path} has no tokenizer (none of {', '.join(VOCABULARY_FILES)}): put tokenizer.json and "
            f"tokenizer_config.json there."
        )
    # A second or two; a server that is refused at its start does not spend them.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise LaunchRefused(
            f"{path} has no tokenizer that can be loaded: {error}. Put tokenizer.json and tokenizer_config.json there."
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise LaunchRefused(
            f"the tokenizer of {path} ({type(tokenizer).__name__}) is not one that the tokenizers library runs: "
            f"put a tokenizer.json there."
        )
    backend.no_truncation()
    backend.no_padding()
    vocabulary = Vocabulary(backend)
    return ModelText(tokenizer, vocabulary, min(vocabulary.size, _embeddings(path)))


def _embeddings(path: Path) -> int:
    config = json.loads((path / "config.json").read_text())
    for part in (config, config.get("text_config", {})):
        if "vocab_size" in part:
            return int(part["vocab_size"])
    raise LaunchRefused(f"{path / 'config.json'} names no vocab_size: complete it.")
