"""Text from tokens, as they come: characters whose bytes are spread over tokens appear once they are whole."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_UTF8_LONGEST = 4
_WINDOW = 8
"""Tokens of context that decide how a decoder treats the next one (a leading space, say)."""


class Detokenizer(Protocol):
    """The text of one sequence, piece by piece."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these next tokens complete. An unfinished character at the end stays out until it is whole."""
        ...


@lru_cache(maxsize=1)
def byte_level_alphabet() -> dict[str, int]:
    """The byte behind each character of a byte-level BPE token (GPT-2's ``bytes_to_unicode``, inverted).

    Printable bytes stand for themselves, the others for the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(256 + n): byte for n, byte in enumerate(others)}


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether a sequence's text is the concatenation of its tokens' bytes."""
    decoder = tokenizer.decoder
    if decoder is None:
        return False
    state = json.loads(decoder.__getstate__())
    while state["type"] == "Sequence" and len(state["decoders"]) == 1:
        state = state["decoders"][0]
    return state["type"] == "ByteLevel"


class Vocabulary:
    """A tokenizer's tokens as bytes, and detokenizers for sequences of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_level = is_byte_level(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(id for id, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}

    @property
    def size(self) -> int:
        """One more than the largest token id."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token, which has no text."""
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of one token, possibly not whole characters; special tokens give their name."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._make_bytes(token_id)
        return found

    def _make_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            # Models often have more logits than their tokenizer has tokens.
            return b""
        if self._byte_level:
            alphabet = byte_level_alphabet()
            if all(character in alphabet for character in token):
                return bytes(alphabet[character] for character in token)
            return token.encode()
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(byte[1], 16)])
        return token.replace("\u2581", " ").encode()

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """A detokenizer for a sequence that follows the tokens ``context``, whose own text is left out."""
        if not self._byte_level:
            return _WindowDetokenizer(self._tokenizer, context[-_WINDOW:])
        detokenizer = _ByteDetokenizer(self)
        # The context may end within a character.
        detokenizer.feed(context[-_UTF8_LONGEST:])
        return detokenizer

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole sequence, without special tokens."""
        return self.detokenizer().feed(token_ids)


class _ByteDetokenizer:
    """Joins the tokens' bytes and decodes what is whole."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        vocabulary = self._vocabulary
        return self._decoder.decode(
            b"".join(
                vocabulary.token_bytes(id) for id in token_ids if not vocabulary.is_special(id)
            )
        )


class _WindowDetokenizer:
    """For tokenizers whose decoder looks at neighbours: decodes a short window with and without the new tokens."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(context)
        self._done = len(self._window)

    def feed(self, token_ids: Sequence[int]) -> str:
        text = self._advance(token_ids)
        if text is None and len(token_ids) > 1:
            return "".join(self._advance([id]) or "" for id in token_ids)
        return text or ""

    def _advance(self, token_ids: Sequence[int]) -> str | None:
        """The text that ``token_ids`` add, or None when it ends within a character."""
        window = self._window + list(token_ids)
        before = self._tokenizer.decode(window[: self._done])
        after = self._tokenizer.decode(window)
        if after.endswith(_REPLACEMENT):
            if len(token_ids) > 1:
                return None
            # More tokens than a character has bytes: then the bytes are no character at all.
            if len(window) - self._done < _UTF8_LONGEST:
                self._window = window
                return None
        self._window = window[self._done :] or window
        self._done = len(self._window)
        return after[len(before) :]
