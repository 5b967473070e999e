"""Text from tokens in pieces: the same as all at once, whatever the tokenizer's decoder, and never half a character."""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib.resources import files

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from atom.entrypoints.openai.detokenize import Vocabulary, is_byte_level

TEXT = "def naïve(x):\n    return '€uro 😀 日本語' + x  # fin\n"


def byte_level() -> Tokenizer:
    """The bundled model's tokenizer: byte-level BPE, so emoji and most accents are spread over tokens."""
    return Tokenizer.from_file(str(files("atom") / "assets" / "tiny_moe" / "tokenizer.json"))


def byte_fallback() -> Tokenizer:
    """As SentencePiece models have it: words begin with U+2581, unknown characters are byte tokens."""
    words = ["\u2581def", "\u2581return", "\u2581x", "\u2581", "\n", *"navex():+'#furoi "]
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for word in words:
        vocab.setdefault(word, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


TOKENIZERS = {"byte-level": byte_level(), "byte-fallback": byte_fallback()}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param]


def test_which_decoder_is_byte_level() -> None:
    assert is_byte_level(TOKENIZERS["byte-level"])
    assert not is_byte_level(TOKENIZERS["byte-fallback"])


def test_the_text_comes_back_in_pieces_of_every_size(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT).ids
    whole = tokenizer.decode(ids)
    assert "😀" in whole
    assert len(ids) > 30
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.decode(ids) == whole
    for size in range(1, 9):
        detokenizer = vocabulary.detokenizer()
        pieces = [detokenizer.feed(ids[i : i + size]) for i in range(0, len(ids), size)]
        assert "".join(pieces) == whole
        assert not any("\ufffd" in piece for piece in pieces)


def test_an_unfinished_character_stays_out(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x😀").ids
    for end in range(1, len(ids)):
        text = Vocabulary(tokenizer).decode(ids[:end])
        assert "\ufffd" not in text
        assert "x😀".startswith(text)


def test_a_continuation_keeps_its_leading_space(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("def x return x").ids
    whole = tokenizer.decode(ids)
    for cut in range(1, len(ids)):
        continuation = Vocabulary(tokenizer).detokenizer(ids[:cut]).feed(ids[cut:])
        assert tokenizer.decode(ids[:cut]) + continuation == whole


def test_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    special = next(id for id, t in tokenizer.get_added_tokens_decoder().items() if t.special)
    vocabulary = Vocabulary(tokenizer)
    ids = tokenizer.encode("def x").ids
    assert vocabulary.is_special(special)
    assert vocabulary.decode([ids[0], special, *ids[1:]]) == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_tokens_at_all_decode_as_the_tokenizer_does(data: st.DataObject) -> None:
    """Random weights give byte sequences that are no text; a stream must survive them."""
    tokenizer = TOKENIZERS["byte-level"]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=20))
    whole = tokenizer.decode(ids)
    vocabulary = Vocabulary(tokenizer)
    detokenizer = vocabulary.detokenizer()
    text = "".join(detokenizer.feed([id]) for id in ids)
    assert text == vocabulary.decode(ids)
    # Only what is unfinished at the end may be missing.
    assert whole.startswith(text)
    assert set(whole[len(text) :]) <= {"\ufffd"}


def test_bytes_that_are_no_character_do_not_hold_a_stream_up() -> None:
    tokenizer = TOKENIZERS["byte-fallback"]
    stray = tokenizer.token_to_id("<0x80>")
    x = tokenizer.token_to_id("\u2581x")
    detokenizer = Vocabulary(tokenizer).detokenizer()
    text = "".join(detokenizer.feed([id]) for id in [x, *[stray] * 9, x])
    assert text.startswith("x")
    assert text.endswith(" x")


def test_bytes_of_a_token(tokenizer: Tokenizer) -> None:
    vocabulary = Vocabulary(tokenizer)
    ids = tokenizer.encode("naïve 😀").ids
    assert b"".join(vocabulary.token_bytes(id) for id in ids).decode().strip() == "naïve 😀"
    assert vocabulary.token_bytes(vocabulary.size + 5) == b""


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_long_garbage_is_linear_in_pieces(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    chosen = random.Random(0)
    ids = [chosen.randrange(tokenizer.get_vocab_size()) for _ in range(2000)]
    detokenizer = Vocabulary(tokenizer).detokenizer()
    pieces = [detokenizer.feed([id]) for id in ids]
    # Text keeps flowing: no stretch of tokens longer than a character's bytes stays silent for ever.
    silent = longest = 0
    for piece in pieces:
        silent = 0 if piece else silent + 1
        longest = max(longest, silent)
    assert longest < 20
