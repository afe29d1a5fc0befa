"""Charts of the results of `bench.gpu.gpu`, for `bench.report`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.common.charts import Bars, Chart, Table

_SECTIONS = ("doctor", "datasets", "lanes", "decoders", "pixels", "step")


def charts(record: Mapping[str, Any]) -> list[Chart]:
    """Return the charts of a result, with a table of the sections that failed."""
    device, found = record["device"], list[Chart]()
    failed = [(name, part["failed"]) for name, part in _parts(record) if isinstance(part, dict) and "failed" in part]
    if failed:
        found.append(Table(f"Failed sections on {device}", ("section", "why"), failed))
    for section, key, what in (("decoders", "decoder", "Decoders"), ("lanes", "lanes", "Lanes of one decoder")):
        rows = record.get(section, ())
        if isinstance(rows, dict):
            continue
        for profile, side in dict.fromkeys((row["profile"], row["short_side"]) for row in rows):
            own = [row for row in rows if (row["profile"], row["short_side"]) == (profile, side)]
            refused = [f"{row[key]}: {row['failed']}" for row in own if "failed" in row]
            values = {str(row[key]): row["clips_per_s"] for row in own if "failed" not in row}
            if values:
                title = f"{what} on {device}: {profile}, short side {side}"
                found.append(Bars(title, "clips/s", values, note="; ".join(refused)))
    facts = [
        (f"{name}: {key}", str(value))
        for name, part in _parts(record)
        if name in ("pixels", "step") and isinstance(part, dict) and "failed" not in part
        for key, value in part.items()
    ]
    return [*found, *([Table(f"Pixels and a training step on {device}", ("what", ""), facts)] if facts else [])]


def _parts(record: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, record[name]) for name in _SECTIONS if name in record]
