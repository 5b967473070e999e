"""The architecture that the double says it runs on."""

import os


def get_gfx():
    gfx = os.environ.get("GPU_ARCHS", "native")
    return "gfx1250" if gfx == "native" else gfx.split(";")[-1]
