"""numba kernels whose machine code is kept on disk for as long as none of the files it was made from changes."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType

from numba import njit


def kernel(*modules: ModuleType) -> Callable[[Callable], Callable]:
    """A decorator: compile at the first call, without the GIL, and keep the result where some directory takes it.

    numba keeps it under NUMBA_CACHE_DIR, the package's ``__pycache__`` or the user's cache directory, the first that is
    writable; where none is, each process compiles anew. By itself it looks only at the file of the function, so an
    update of a file whose code was compiled into it would go unnoticed.

    Args:
        modules: further modules whose code goes into the kernel.
    """

    def decorate(function: Callable) -> Callable:
        options = {"nogil": True, "error_model": "numpy"}
        try:
            compiled = njit(function, cache=True, **options)
        except RuntimeError:
            return njit(function, **options)
        index = compiled._cache._cache_file
        index._source_stamp = (index._source_stamp, *map(_stamp, modules))
        return compiled

    return decorate


def _stamp(module: ModuleType) -> tuple[float, int]:
    found = os.stat(module.__file__)
    return found.st_mtime, found.st_size
