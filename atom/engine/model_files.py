"""What a model's directory holds beside its weights: config, generation defaults, tokenizer. No model code is imported."""

from __future__ import annotations

from pathlib import Path

from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from atom.engine.byte_tokenizer import byte_tokenizer
from atom.engine.model_path import read_config_json
from atom.errors import LaunchRefused
from atom.quiet import quiet

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


def load_config(path: Path) -> PreTrainedConfig:
    """The model's config.

    Raises:
        LaunchRefused: config.json is broken, or of a type that transformers does not know.
    """
    read_config_json(path)
    try:
        with quiet():
            return AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise LaunchRefused(
            f"{path / 'config.json'} cannot be read: {error}. Use a model that this transformers knows, with a complete "
            f"config.json."
        ) from error


def load_generation_config(path: Path, config: PreTrainedConfig) -> GenerationConfig:
    """The model's generation defaults, from generation_config.json where there is one, else from its config."""
    with quiet():
        if (path / "generation_config.json").is_file():
            return GenerationConfig.from_pretrained(path, local_files_only=True)
        return GenerationConfig.from_model_config(config)


def load_tokenizer(path: Path, *, load_format: str = "auto") -> PreTrainedTokenizerBase:
    """The model's tokenizer.

    Args:
        path: the model's directory.
        load_format: with ``"dummy"`` a directory without tokenizer files gets a byte-level tokenizer
            (:func:`atom.engine.byte_tokenizer.byte_tokenizer`), so that a config alone can be served.

    Raises:
        LaunchRefused: there is no tokenizer, or it cannot be read.
    """
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        if load_format == "dummy":
            return byte_tokenizer(load_config(path))
        raise LaunchRefused(
            f"{path} holds no tokenizer (none of {', '.join(_TOKENIZER_FILES)}). Download the whole model again."
        )
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise LaunchRefused(
            f"the tokenizer in {path} cannot be read: {error}. Download the whole model again."
        ) from error


def eos_token_ids(path: Path, config: PreTrainedConfig) -> list[int]:
    """Tokens that end a generation; empty when the model names none."""
    for source in (load_generation_config(path, config), config.get_text_config()):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            return [value] if isinstance(value, int) else list(value)
    return []
