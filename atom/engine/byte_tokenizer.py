"""A tokenizer for models that have a config and nothing else: one token a byte, and a printable name for every other id."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from atom.errors import LaunchRefused

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)

_END = "<|end|>"


def byte_tokenizer(config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """Encode text as its UTF-8 bytes, whose ids are the lowest that the model does not use for special tokens.

    Ids that no byte has decode to `` <id>``, so that what random weights generate can be read.

    Raises:
        LaunchRefused: the model's vocabulary is too small for all bytes and the end token.
    """
    text = config.get_text_config()
    size = text.vocab_size
    ends = text.eos_token_id
    end = ends[0] if isinstance(ends, list) else ends
    end = size - 1 if end is None or not 0 <= end < size else end
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if size < len(alphabet) + 1:
        raise LaunchRefused(
            f"vocab_size={size} is too small for a byte-level tokenizer ({len(alphabet)} bytes and an end token), and the "
            f"model brings none of its own. Put a tokenizer.json beside config.json."
        )
    free = [i for i in range(size) if i != end]
    vocab = dict(zip(alphabet, free, strict=False)) | {_END: end}
    # The byte-level alphabet writes a space as Ġ.
    vocab |= {f"Ġ<{i}>": i for i in free[len(alphabet) :]}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_END,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = _CHAT_TEMPLATE
    return wrapped
