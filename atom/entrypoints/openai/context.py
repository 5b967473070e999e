"""What every endpoint works with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from atom.engine.router import Router
from atom.entrypoints.openai.args import ServerArgs
from atom.entrypoints.openai.errors import unavailable
from atom.entrypoints.openai.metrics import Metrics
from atom.entrypoints.openai.tokenizer import ModelText


class Status(StrEnum):
    """What ``/health`` says."""

    STARTING = "starting"
    OK = "ok"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass
class Context:
    """The server as the endpoints see it.

    Attributes:
        args: its settings.
        router: the way to the ranks.
        max_body_bytes: size of a body over which it is refused.
        created: Unix time of its start.
        text: None until the tokenizer is loaded.
        draining: no new requests are taken.
    """

    args: ServerArgs
    router: Router
    metrics: Metrics
    max_body_bytes: int
    created: int
    text: ModelText | None = None
    draining: bool = False

    @property
    def status(self) -> Status:
        """What the server is doing."""
        if self.router.failure is not None:
            return Status.FAILED
        if self.draining:
            return Status.DRAINING
        if self.text is None or not self.router.ready.is_set():
            return Status.STARTING
        return Status.OK

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt plus generation that every rank takes; None while starting."""
        lengths = [view.ready.max_model_len for view in self.router.ranks if view.ready is not None]
        return min(lengths) if len(lengths) == len(self.router.ranks) else None

    def serving(self) -> tuple[ModelText, int]:
        """The model's text side and longest length.

        Raises:
            ApiError: 503, the server does not take requests now.
        """
        match self.status:
            case Status.FAILED:
                raise unavailable(f"the server has failed: {self.router.failure}.", "engine_failed")
            case Status.DRAINING:
                raise unavailable(
                    "the server is shutting down and takes no new requests.", "draining"
                )
            case Status.STARTING:
                raise unavailable(
                    "the server is starting: the model is not loaded yet.", "starting"
                )
        longest = self.max_model_len
        assert self.text is not None and longest is not None, "ready means both are known"
        return self.text, longest
