"""The records of bench_mega_moe: ratios between them, and a file that holds them from the first one on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def complete(records: list[dict[str, Any]]) -> None:
    """Add ratios to the bf16 wire with the same A operand and batch."""
    for record in records:
        for other in records:
            same = all(record[key] == other[key] for key in ("tokens", "a_operand"))
            if same and other["wire"] == "bf16":
                record["total_of_bf16"] = record["total_ms"] / other["total_ms"]
                record["dispatch_of_bf16"] = _dispatch_ms(record) / _dispatch_ms(other)


def save(records: list[dict[str, Any]], path: Path | None) -> None:
    """Write the records with their ratios, all anew; a reader never sees half a file."""
    if path is None:
        return
    complete(records)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def _dispatch_ms(record: dict[str, Any]) -> float:
    return record.get("dispatch_and_quantize_ms") or sum(
        record["stages"].get(name, 0.0) for name in ("dispatch", "quantize")
    )
