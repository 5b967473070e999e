"""Double of mori's communicator: real ranks meet over gloo, memory is counted and not taken."""

from __future__ import annotations

import os

import torch.distributed as dist

_GRANULARITY = 2 * 2**20


class UniqueId:
    def __init__(self) -> None:
        self.token = os.urandom(16)


def get_unique_id() -> UniqueId:
    return UniqueId()


class _Memory:
    ptr = 0

    def __init__(self, comm: Communicator, size: int) -> None:
        self._comm, self.size = comm, -(-size // _GRANULARITY) * _GRANULARITY
        if comm.allocated + self.size > comm.per_rank_size:
            raise RuntimeError(
                f"ccoMemAlloc: slot exhausted (no contiguous {self.size} bytes free in "
                f"perRankSize={comm.per_rank_size})"
            )
        comm.allocated += self.size

    def close(self) -> None:
        self._comm.allocated -= self.size
        self.size = 0


class Communicator:
    DEFAULT_PER_RANK_VMM: int = 4 * 1024 * 1024 * 1024
    alive: list[Communicator] = []  # noqa: RUF012 - what a test has left open

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self.allocated = 0
        self.per_rank_size = 0

    @staticmethod
    def get_unique_id() -> UniqueId:
        return get_unique_id()

    @classmethod
    def init(
        cls,
        nranks: int,
        rank: int,
        unique_id: UniqueId,
        per_rank_vmm: int = DEFAULT_PER_RANK_VMM,
    ) -> Communicator:
        comm = cls()
        comm.per_rank_vmm = per_rank_vmm
        comm.per_rank_size = -(-per_rank_vmm // 2**32) * 2**32
        if nranks > 1:
            comm.group = dist.new_group(backend="gloo")
            tokens: list = [None] * nranks
            dist.all_gather_object(tokens, unique_id.token, group=comm.group)
            if len(set(tokens)) != 1 or dist.get_rank(comm.group) != rank:
                raise RuntimeError("ranks came with different unique ids")
        cls.alive.append(comm)
        return comm

    def alloc_mem(self, size: int) -> _Memory:
        return _Memory(self, size)

    def register_window(self, ptr: int, size: int) -> object:
        return object()

    def barrier(self) -> None:
        if self.group is not None:
            dist.barrier(self.group)

    def destroy(self) -> None:
        if self in self.alive:
            self.alive.remove(self)
