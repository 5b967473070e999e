"""Stop strings against pieces of every size, compared with the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atom.entrypoints.openai.stopping import StopMatcher

texts = st.text(alphabet="ab\n", max_size=24)
stop_lists = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=4)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    """The text, cut at the given places (taken modulo its length)."""
    places = sorted({cut % (len(text) + 1) for cut in cuts})
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@given(texts, stop_lists, st.lists(st.integers(0, 100), max_size=8))
def test_pieces_give_what_the_whole_text_gives(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopMatcher(stops)
    emitted = ""
    for piece in pieces_of(text, cuts):
        emitted += matcher.feed(piece)
    if matcher.matched is None:
        emitted += matcher.finish()
    found = [text.find(stop) for stop in stops if stop in text]
    if found:
        # A later stop may only win by being complete in an earlier piece, and then it is the first in that text.
        assert matcher.matched in stops
        assert not any(stop in emitted for stop in stops)
        assert text.startswith(emitted + matcher.matched)
    else:
        assert matcher.matched is None
        assert emitted == text


def test_only_what_may_begin_a_stop_is_held_back() -> None:
    matcher = StopMatcher(["\n\nclass", "END"])
    assert matcher.feed("x = 1\n") == "x = 1"
    assert matcher.feed("\ncl") == ""
    assert matcher.feed("ose") == "\n\nclose"
    assert matcher.feed(" E") == " "
    assert matcher.feed("NDING") == ""
    assert matcher.matched == "END"
    assert matcher.feed("more") == ""


def test_the_first_stop_in_the_text_wins() -> None:
    matcher = StopMatcher(["bbb", "a"])
    assert matcher.feed("xxabbb") == "xx"
    assert matcher.matched == "a"


def test_without_stops_everything_passes_at_once() -> None:
    matcher = StopMatcher([])
    assert matcher.feed("abc") == "abc"
    assert matcher.finish() == ""
