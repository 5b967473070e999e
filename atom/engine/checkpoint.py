"""Safetensors of a model directory, read by name, and the check that no expert is missing."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from atom.errors import LaunchRefused

_EXPERT = re.compile(r"(?P<module>.*\bexperts)\.(?P<expert>\d+)\.(?P<parameter>.+)")


class Checkpoint:
    """The tensors of a model directory by name: ``model.safetensors``, or what ``model.safetensors.index.json`` lists."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            LaunchRefused: there are no weights, a listed file is missing, or one cannot be read.
        """
        self.path = path
        self._files: dict[str, Path] = {}
        self._open: dict[Path, safe_open] = {}
        index = path / "model.safetensors.index.json"
        single = path / "model.safetensors"
        if single.is_file():
            files = [single]
        elif index.is_file():
            files = [path / name for name in sorted(set(_weight_map(index).values()))]
        else:
            raise LaunchRefused(
                f"{path} holds no model.safetensors and no model.safetensors.index.json. Download the weights, or start "
                f"with random ones: --load-format dummy."
            )
        if missing := [file.name for file in files if not file.is_file()]:
            raise LaunchRefused(
                f"{path} is incomplete: {index.name} lists {', '.join(missing[:8])}, which "
                f"{'is' if len(missing) == 1 else 'are'} missing. Download the whole model again."
            )
        for file in files:
            self._files |= dict.fromkeys(self._reader(file).keys(), file)

    def _reader(self, file: Path) -> safe_open:
        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise LaunchRefused(
                    f"{file} is not a whole safetensors file ({error}). Download it again."
                ) from error
        return self._open[file]

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._files)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Entries ``start`` to ``stop`` of a tensor's first dimension, on the CPU; only these are read.

        Raises:
            LaunchRefused: there is no such tensor, or it ends before ``stop``.
        """
        if name not in self._files:
            raise LaunchRefused(
                f"{self.path} is incomplete: {name} is missing. Download the whole model again."
            )
        part = self._reader(self._files[name]).get_slice(name)
        if part.get_shape()[0] < stop:
            raise LaunchRefused(
                f"{self.path}: {name} holds {part.get_shape()[0]} experts, fewer than the {stop} that this rank's part "
                f"needs. Use the config.json that belongs to these weights."
            )
        return part[start:stop]

    def check_experts(self, experts: int) -> None:
        """Check that where experts are stored one by one, none is missing.

        transformers stacks what it finds in order, so one that is missing would silently give its place to the next.

        Args:
            experts: routed experts of a layer, at least.

        Raises:
            LaunchRefused: experts are missing; the message names them.
        """
        found: dict[tuple[str, str], set[int]] = defaultdict(set)
        for name in self._files:
            if match := _EXPERT.fullmatch(name):
                found[match["module"], match["parameter"]].add(int(match["expert"]))
        missing = []
        for (module, parameter), numbers in sorted(found.items()):
            lost = sorted(set(range(max(experts, max(numbers) + 1))) - numbers)
            missing += [f"{module}.{number}.{parameter}" for number in lost]
        if missing:
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            raise LaunchRefused(
                f"{self.path} is incomplete: these experts are missing: {', '.join(missing[:8])}{more}. Download the "
                f"whole model again."
            )


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        raise LaunchRefused(f"{index} cannot be read ({error!r}). Download it again.") from error
