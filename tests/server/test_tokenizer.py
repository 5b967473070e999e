"""Prompts that are too long are refused before they are tokenized, and long ones let other requests go on."""

from __future__ import annotations

import asyncio
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from atom.engine.byte_tokenizer import byte_tokenizer
from atom.engine.model_files import load_config
from atom.entrypoints.openai.errors import ApiError
from atom.entrypoints.openai.tokenizer import LONG_TEXT, ModelText, load_model_text, longest_token

TINY = files("atom") / "assets" / "tiny_moe"


def tiny() -> Tokenizer:
    """A tokenizer of its own for each test, since some change it."""
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


@pytest.fixture(scope="module")
def text() -> ModelText:
    return load_model_text(TINY)  # type: ignore[arg-type]


def encode(text: ModelText, prompt: str, max_model_len: int = 512) -> list[int]:
    """A prompt's tokens."""
    return asyncio.run(
        text.encode(prompt, special=True, max_model_len=max_model_len, param="prompt")
    )


def test_a_prompt_that_no_tokens_could_shorten_is_refused_with_both_numbers(
    text: ModelText,
) -> None:
    longest = text.longest_token
    assert longest == max(map(len, tiny().get_vocab()))
    with pytest.raises(ApiError) as refused:
        encode(text, "a " * 3_500_000)
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
    assert refused.value.param == "prompt"
    assert "maximum context length is 512 tokens" in refused.value.message
    assert f"at least {-(-7_000_000 // longest)} tokens" in refused.value.message
    # A run of spaces has the longest tokens: what just may fit is tokenized.
    assert len(encode(text, " " * (longest * 512))) >= 512


def test_long_and_short_prompts_have_the_same_tokens(text: ModelText) -> None:
    prompt = "def f(n):\n    return n\n" * (LONG_TEXT // 20)
    ids = encode(text, prompt, max_model_len=10**6)
    assert ids == text.tokenizer.backend_tokenizer.encode(prompt).ids
    assert encode(text, prompt[:500]) == text.tokenizer.backend_tokenizer.encode(prompt[:500]).ids


def test_others_go_on_while_a_long_prompt_is_tokenized(text: ModelText) -> None:
    """The event loop's turns are counted, not timed: a lock that is kept leaves it next to none."""

    async def run() -> int:
        prompt = "a " * 300_000
        encoding = asyncio.create_task(
            text.encode(prompt, special=True, max_model_len=10**6, param="prompt")
        )
        turns = 0
        while not encoding.done():
            await asyncio.sleep(0.001)
            turns += 1
        return turns

    assert asyncio.run(run()) > 20


@given(st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("  \n=eéḍ̇")))
def test_no_token_stands_for_more_characters(prompt: str) -> None:
    nfc = tiny()
    nfc.normalizer = normalizers.NFC()
    for tokenizer in (tiny(), nfc):
        longest = longest_token(tokenizer)
        assert longest is not None
        assert len(prompt) <= longest * len(tokenizer.encode(prompt, add_special_tokens=False).ids)


def test_nfc_makes_one_character_of_four_at_most() -> None:
    longest = longest_token(tiny())
    nfc = tiny()
    nfc.normalizer = normalizers.NFC()
    assert longest_token(nfc) == 4 * longest


def test_a_model_with_a_config_alone() -> None:
    tokenizer = byte_tokenizer(load_config(TINY)).backend_tokenizer  # type: ignore[arg-type]
    longest = longest_token(tokenizer)
    assert longest is not None
    assert longest >= len("Ġ<5119>")


def test_where_characters_may_be_lost_there_is_no_limit() -> None:
    strips, removes, swallows = tiny(), tiny(), tiny()
    strips.normalizer = normalizers.Strip()
    removes.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    swallows.add_special_tokens([AddedToken("<|wide|>", rstrip=True)])
    unknown = tiny()
    unknown.model = models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")
    for tokenizer in (strips, removes, swallows, unknown):
        assert longest_token(tokenizer) is None
