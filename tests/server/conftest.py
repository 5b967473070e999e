"""The one server that most tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.server.running import KEY, TWO_RANKS, RunningServer

MAX_MODEL_LEN = 512


@pytest.fixture(scope="session")
def shared_server(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[], RunningServer]]:
    """Gives a running server: the same one each time, or a new one when a test has ended it."""
    current: RunningServer | None = None

    def get() -> RunningServer:
        nonlocal current
        if current is None or current.ended:
            current = RunningServer(
                tmp_path_factory.mktemp("server"),
                *TWO_RANKS,
                *("--api-key", KEY, "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "40"),
                env={"MEGA_WIRE": "fp4", "ATOM_MAX_QUEUE": "100", "ATOM_MAX_BODY_BYTES": "100000"},
            )
        return current.wait_healthy()

    try:
        yield get
    finally:
        if current is not None:
            current.stop()


@pytest.fixture
def server(shared_server: Callable[[], RunningServer]) -> RunningServer:
    """Two ranks of tiny-moe over gloo on an fp4 wire, with a key and small limits."""
    return shared_server()
