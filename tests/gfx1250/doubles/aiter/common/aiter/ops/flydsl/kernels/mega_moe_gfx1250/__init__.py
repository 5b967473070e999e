"""MegaMoEGfx1250, imported when it is asked for."""

import importlib

__all__ = ["MegaMoEGfx1250"]


def __getattr__(name):
    if name != "MegaMoEGfx1250":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.mega_moe"), name)
