"""Ranks compare what they were given before anything is built, so that ranks that differ fail together, with a table.

It goes through the rendezvous store, not through a collective: a rank that refuses, or is gone, cannot make others hang.
"""

from __future__ import annotations

import json
import platform
import time
from dataclasses import dataclass
from importlib import metadata

from torch.distributed import Store

from atom import envs
from atom.errors import LaunchRefused

VARIABLES = (
    "MEGA_WIRE",
    "MEGA_DISPATCH_WIRE",
    "AITER_FORCE_A8W4",
    "MEGA_DISPATCH",
    "ATOM_MOE_TRANSPORT",
    "ATOM_FAKE_EPLB",
)
"""Environment variables that must be the same on every rank; a rank that refuses shows these."""

LIBRARIES = ("atom", "torch", "transformers", "numba", "triton", "amd-mori", "amd-aiter")
"""Distributions whose versions must be the same on every rank, where they are installed."""

_UNSET = "unset"
_PREFIX = "atom/agree"
_VERDICT = f"{_PREFIX}/verdict"
_POLL = 0.005


@dataclass(frozen=True)
class Refusal:
    """What a rank has to say instead of an identity: why its launch cannot go on."""

    message: str


def environment() -> dict[str, str | None]:
    """The variables that decide what travels, as they were found; None is unset."""
    return {name: envs.raw(name) for name in VARIABLES}


def library_versions() -> dict[str, str]:
    """Version of Python and of each of :data:`LIBRARIES` that is installed."""
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def agree(
    own: dict[str, object] | Refusal,
    *,
    store: Store,
    rank: int,
    world_size: int,
    timeout: float = 10.0,
    start_timeout: float = 300.0,
) -> None:
    """Return once every rank has said the same; otherwise raise on every rank.

    Args:
        own: what this rank has (values are compared as text), or its refusal.
        store: the rendezvous store that all ranks share.
        rank: this rank. world_size: how many there are.
        timeout: seconds after which this call has raised, whatever the others do, once two ranks are known to differ or
            one to refuse.
        start_timeout: seconds that a rank may take to come, as long as those that came agree: hosts start unevenly.

    Raises:
        LaunchRefused: ranks differ, refused, or did not answer. The message has a row for each field that differs and a
            column for each group of ranks that have the same.
    """
    refused = isinstance(own, Refusal)
    fields = environment() if refused else own
    said = {
        "fields": {name: _text(value) for name, value in fields.items()},
        "refusal": own.message if refused else None,
    }
    try:
        start = time.monotonic()
        answers = _exchange(said, store, rank, world_size, 0.8 * timeout, start_timeout)
        waited = round(time.monotonic() - start)
        message = _verdict(store, _disagreement(answers, world_size, waited))
    except RuntimeError as error:
        if refused:
            raise LaunchRefused(own.message) from None
        raise LaunchRefused(
            f"rank {rank} lost the rendezvous store before the ranks had compared what they were given: {error}. The "
            f"rank that holds it ended first; its log says why."
        ) from error
    _wait_for_readers(store, rank, answers, time.monotonic() + 0.2 * timeout)
    if message:
        raise LaunchRefused(message)


def _text(value: object) -> str:
    return _UNSET if value is None else str(value)


def _exchange(
    said: dict, store: Store, rank: int, world_size: int, timeout: float, start_timeout: float
) -> dict[int, dict]:
    """What each rank said, without those that said nothing in time or until another rank gave them up."""
    store.set(f"{_PREFIX}/{rank}", json.dumps(said))
    answers: dict[int, dict] = {}
    deadline = time.monotonic() + start_timeout
    doomed = False
    while True:
        given_up = store.check([_VERDICT])
        for peer in set(range(world_size)) - answers.keys():
            key = f"{_PREFIX}/{peer}"
            if store.check([key]):
                answers[peer] = json.loads(store.get(key))
        if given_up or len(answers) == world_size or time.monotonic() > deadline:
            return answers
        if not doomed and _differ(answers):
            doomed = True
            deadline = min(deadline, time.monotonic() + timeout)
        time.sleep(_POLL)


def _differ(answers: dict[int, dict]) -> bool:
    return any(said["refusal"] is not None for said in answers.values()) or bool(_table(answers))


def _verdict(store: Store, message: str | None) -> str:
    """The first verdict that any rank reached; empty to go on.

    A rank that comes when others have given it up must not go on alone, so one verdict holds for all.
    """
    verdict = store.compare_set(_VERDICT, "", json.dumps("go" if message is None else message))
    first = json.loads(verdict)
    return "" if first == "go" else first


def _wait_for_readers(store: Store, rank: int, answers: dict[int, dict], deadline: float) -> None:
    """Let the others read before this rank ends, if the store lives in its process, which is rank 0's.

    The others ask the store for nothing more: it may be gone, and torch reports that on stderr, with a C++ stack.
    """
    try:
        store.set(f"{_PREFIX}/seen/{rank}", "yes")
        if rank != 0:
            return
        seen = [f"{_PREFIX}/seen/{peer}" for peer in answers]
        while not store.check(seen) and time.monotonic() < deadline:
            time.sleep(_POLL)
    except RuntimeError:
        # The store is gone with a rank that had waited for this one to read.
        return


def _disagreement(answers: dict[int, dict], world_size: int, waited: float) -> str | None:
    refusals: dict[str, list[int]] = {}
    for rank, said in answers.items():
        if said["refusal"] is not None:
            refusals.setdefault(said["refusal"], []).append(rank)
    silent = [rank for rank in range(world_size) if rank not in answers]
    if len(refusals) == 1 and len(next(iter(refusals.values()))) == world_size:
        return next(iter(refusals))
    table = _table(answers)
    if not (refusals or silent or table):
        return None
    parts = ["The ranks cannot start together; nothing was built."]
    if silent:
        parts.append(f"{_ranks(silent)} gave no answer in {waited:g} s.")
    parts += [f"{_ranks(who)} refused: {message}" for message, who in refusals.items()]
    if table:
        parts.append(
            f"They were not given the same:\n{table}\n"
            f"Start every rank with the same environment, model and library versions."
        )
    return "\n".join(parts)


def _table(answers: dict[int, dict]) -> str:
    """Rows: fields that differ among the ranks that have them. Columns: groups of ranks with equal values."""
    names = list(dict.fromkeys(name for said in answers.values() for name in said["fields"]))
    complete = {rank: said for rank, said in answers.items() if said["refusal"] is None}

    def values(rank: int) -> dict[str, str]:
        return answers[rank]["fields"]

    def differs(name: str) -> bool:
        found = {values(rank)[name] for rank in answers if name in values(rank)}
        return len(found) > 1 or any(name not in values(rank) for rank in complete)

    rows = [name for name in names if differs(name)]
    if not rows:
        return ""
    columns: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(answers):
        columns.setdefault(tuple(values(rank).get(name, "-") for name in rows), []).append(rank)
    lines = [["", *(_ranks(who) for who in columns.values())]]
    lines += [[name, *(column[i] for column in columns)] for i, name in enumerate(rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _ranks(ranks: list[int]) -> str:
    """``rank 3``, ``ranks 0, 2-5``."""
    parts: list[str] = []
    start = previous = ranks[0]
    for rank in [*ranks[1:], None]:
        if rank is not None and rank == previous + 1:
            previous = rank
            continue
        parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = rank
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"
