"""Triton launches without the GPU: what a piece of host code would launch, compiled and not run.

The host code here never reads a result, so it runs to its end on tensors that no kernel fills. Tests compile what it
launches for other targets; benchmarks compile variants in parallel before they time them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.compiler import compile as triton_compile
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

_DTYPES = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}
_OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True)
class Launch:
    """One kernel launch: the kernel, its arguments by name, and compiler options."""

    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, int]

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.kernel.__name__

    def compile(self, target: GPUTarget) -> CompiledKernel:
        """Compile for ``target``, with the specializations that a launch would have: integers that are 1, and integers and
        addresses that are multiples of 16."""
        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(self.kernel.params):
            value = self.arguments.get(parameter.name)
            free = parameter.do_not_specialize
            if (
                parameter.is_constexpr
                or value is None
                or (_is_int(value) and value == 1 and not free)
            ):
                signature[parameter.name] = "constexpr"
                constants[(index,)] = value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = f"*{_DTYPES[value.dtype]}"
                if value.storage_offset() * value.element_size() % 16 == 0:
                    attributes[(index,)] = [["tt.divisibility", 16]]
            elif isinstance(value, TensorDescriptor):
                dtype = _DTYPES[value.base.dtype]
                block = ",".join(str(extent) for extent in value.block_shape)
                signature[parameter.name] = f"tensordesc<{dtype}[{block}]>"
            else:
                assert _is_int(value), f"{parameter.name}={value!r}"
                signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if value % 16 == 0 and not free:
                    attributes[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, attributes)
        return triton_compile(source, target=target, options=self.options)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@contextmanager
def _replaced_run(run: Callable[..., Any]) -> Iterator[None]:
    original = JITFunction.run
    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = original


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Record launches instead of making them."""
    launches: list[Launch] = []

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        arguments = dict(zip(self.arg_names, args, strict=False)) | kwargs
        launches.append(Launch(self, arguments, options))

    with _replaced_run(run):
        yield launches


@contextmanager
def compiled_only(workers: int) -> Iterator[None]:
    """Compile launches for this GPU instead of making them, several at a time; wait for all at the end."""
    original = JITFunction.run
    with ThreadPoolExecutor(workers) as pool:
        pending = []

        def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            pending.append(pool.submit(original, self, *args, grid=grid, warmup=True, **kwargs))

        with _replaced_run(run):
            yield
        for future in pending:
            future.result()
