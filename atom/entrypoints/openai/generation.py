"""From prompts to text: the requests of one HTTP call, their tokens turned into pieces of text as they come."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import msgspec

from atom.engine.protocol import SamplingParams, TokenLogprob, TokenOutput
from atom.engine.router import InFlight, Mailbox, Router
from atom.entrypoints.openai.detokenize import Vocabulary
from atom.entrypoints.openai.errors import ApiError, unavailable
from atom.entrypoints.openai.stopping import StopMatcher
from atom.entrypoints.openai.validation import seed_of_choice


class Token(msgspec.Struct, frozen=True):
    """A token with its log probability, for a choice that reports them.

    Attributes:
        token_id: which.
        offset: where it begins in the choice's text, in characters.
        logprob: None for the first token of an echoed prompt.
    """

    token_id: int
    offset: int
    logprob: TokenLogprob | None


class Piece(msgspec.Struct):
    """What came new for one choice.

    Attributes:
        index: which choice.
        text: new text.
        tokens: new tokens, where log probabilities were asked for.
        finish_reason: "stop" or "length" on the last piece.
    """

    index: int
    text: str
    tokens: list[Token] | None = None
    finish_reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt as the client gave it and as tokens.

    Attributes:
        token_ids: at least one.
        text: what ``echo`` gives back.
    """

    token_ids: list[int]
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class ChoicePlan:
    """How the tokens of a choice become text.

    Attributes:
        prompt: what it continues.
        sampling: what its rank is told.
        stops: strings that end it.
        echo: the text begins with the prompt's.
        generates: False when only the prompt was asked for, and the one token that a rank makes is dropped.
    """

    prompt: Prompt
    sampling: SamplingParams
    stops: Sequence[str] = ()
    echo: bool = False
    generates: bool = True


class Choice:
    """The text of one choice, and how many tokens it took."""

    def __init__(self, index: int, plan: ChoicePlan, vocabulary: Vocabulary) -> None:
        self.index = index
        self.plan = plan
        self.generated = 0
        self.finished = False
        self._vocabulary = vocabulary
        self._detokenizer = vocabulary.detokenizer(plan.prompt.token_ids)
        self._matcher = StopMatcher(plan.stops)
        self._reports = plan.sampling.logprobs is not None
        self._emitted = 0
        self._decoded = 0
        self._tokens: list[Token] = []
        self._echo_due = plan.echo

    def take(self, outputs: list[TokenOutput]) -> Piece:
        """The piece that these outputs of the rank make; it may be empty."""
        text = ""
        if self._echo_due:
            text = self._echo(outputs)
        last = outputs[-1]
        if not self.plan.generates:
            self.finished = last.finish_reason is not None
            return self._piece(text, "length" if self.finished else None)
        if self._reports or self.plan.stops:
            text += self._take_one_by_one(outputs)
        else:
            ids = [id for output in outputs for id in output.token_ids]
            self.generated += len(ids)
            text += self._detokenizer.feed(ids[:-1] if last.finish_reason == "stop" else ids)
        if self._matcher.matched is not None:
            self.finished = True
            return self._piece(text, "stop")
        if last.finish_reason is not None:
            self.finished = True
            return self._piece(text + self._matcher.finish(), last.finish_reason)
        return self._piece(text, None)

    def _take_one_by_one(self, outputs: list[TokenOutput]) -> str:
        text = ""
        for output in outputs:
            for position, token_id in enumerate(output.token_ids):
                self.generated += 1
                ends = output.finish_reason == "stop" and position == len(output.token_ids) - 1
                if ends:
                    # The end token itself has no place in the text.
                    break
                if self._reports:
                    assert output.logprobs is not None, "the rank was asked for log probabilities"
                    self._tokens.append(Token(token_id, self._decoded, output.logprobs[position]))
                new = self._detokenizer.feed((token_id,))
                self._decoded += len(new)
                text += self._matcher.feed(new)
                if self._matcher.matched is not None:
                    return text
        return text

    def _echo(self, outputs: list[TokenOutput]) -> str:
        self._echo_due = False
        prompt = self.plan.prompt
        if self._reports:
            logprobs = outputs[0].prompt_logprobs
            assert logprobs is not None and len(logprobs) == len(prompt.token_ids)
            detokenizer = self._vocabulary.detokenizer()
            for token_id, logprob in zip(prompt.token_ids, logprobs, strict=True):
                self._tokens.append(Token(token_id, self._decoded, logprob))
                self._decoded += len(detokenizer.feed((token_id,)))
        self._decoded = len(prompt.text)
        return prompt.text

    def _piece(self, text: str, finish_reason: str | None) -> Piece:
        self._emitted += len(text)
        tokens = None
        if self._reports:
            # A token goes out with the first of its characters; those of a stop string never do.
            count = len(self._tokens)
            if finish_reason is None or self._matcher.matched is not None:
                due = (n for n, token in enumerate(self._tokens) if token.offset >= self._emitted)
                count = next(due, count)
            tokens, self._tokens = self._tokens[:count], self._tokens[count:]
        return Piece(self.index, text, tokens, finish_reason)


class Generation:
    """The choices of one HTTP call, running."""

    def __init__(
        self,
        plans: Sequence[ChoicePlan],
        *,
        router: Router,
        vocabulary: Vocabulary,
        streaming: bool,
        received_at: float | None = None,
    ) -> None:
        """
        Args:
            plans: one a choice, in the order of their index.
            router: takes the requests.
            vocabulary: of the model.
            streaming: the client wants each token when it comes.
            received_at: monotonic seconds from which latencies count; None means now.

        Raises:
            EngineFailed, QueueFull: the router does not take them.
        """
        self._router = router
        self._choices = [Choice(index, plan, vocabulary) for index, plan in enumerate(plans)]
        # Without stop strings nobody has to look at a token before the last one.
        self._mailbox = Mailbox(eager=streaming or any(plan.stops for plan in plans))
        self._requests: dict[int, InFlight] = {}
        received_at = time.monotonic() if received_at is None else received_at
        asks = [choice for choice in self._choices if _needs_rank(choice.plan)]
        router.admit(len(asks))
        for choice in asks:
            self._requests[choice.index] = router.submit(
                choice.plan.prompt.token_ids,
                choice.plan.sampling,
                mailbox=self._mailbox,
                index=choice.index,
                received_at=received_at,
            )

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far, end tokens and those of stop strings included."""
        return sum(choice.generated for choice in self._choices)

    def abandon(self, reason: Exception) -> None:
        """Let the reader of :meth:`pieces` get ``reason``."""
        self._mailbox.fail(reason)

    def close(self) -> None:
        """Free what still runs."""
        for request in self._requests.values():
            self._router.cancel(request, "cancelled")
        self._requests.clear()

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """Pieces as they come, those of one step together, until every choice is finished.

        Raises:
            EngineFailed: a rank is gone.
            ApiError: a rank refused a request.
        """
        echoes = [choice for choice in self._choices if choice.index not in self._requests]
        if echoes:
            yield [
                choice.take([TokenOutput(request_id="", finish_reason="length")])
                for choice in echoes
            ]
        while self._requests:
            by_choice: dict[int, list[TokenOutput]] = {}
            for index, output in await self._mailbox.get():
                by_choice.setdefault(index, []).append(output)
            pieces = []
            for index, outputs in by_choice.items():
                choice = self._choices[index]
                if choice.finished:
                    continue
                _check(outputs[-1])
                piece = choice.take(outputs)
                if choice.finished:
                    self._router.cancel(self._requests.pop(index), "stop")
                if piece.text or piece.finish_reason or piece.tokens:
                    pieces.append(piece)
            if pieces:
                yield pieces


def choices_of(plan: ChoicePlan, n: int) -> list[ChoicePlan]:
    """``n`` choices of one plan, each with a seed of its own where there is one."""
    plans = []
    for choice in range(n):
        sampling = msgspec.structs.replace(
            plan.sampling, seed=seed_of_choice(plan.sampling, choice)
        )
        plans.append(
            ChoicePlan(
                prompt=plan.prompt,
                sampling=sampling,
                stops=plan.stops,
                echo=plan.echo,
                generates=plan.generates,
            )
        )
    return plans


def _needs_rank(plan: ChoicePlan) -> bool:
    return plan.generates or plan.sampling.prompt_logprobs


def _check(output: TokenOutput) -> None:
    if output.finish_reason == "error":
        raise ApiError(400, output.error or "the rank refused the request.")
    if output.finish_reason == "cancelled":
        raise unavailable("the request was cancelled by the server.", "cancelled")
