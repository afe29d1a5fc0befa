"""Section `lanes`: how many decoders, with which options, keep all NVDEC engines busy."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from typing import Any

from bench.gpu.measuring import Tuned, throughput, utilization
from bench.gpu.settings import Notes, Settings
from fastvid.decode.backends import Backend
from fastvid.errors import FastvidError
from fastvid.videos.dataset import VideoDataset

_LANES = (1, 2, 4, 7, 14, 21)
_FEW_LANES = (14,)  # for all datasets but the first
# Tried where a decoder has the option; others keep their defaults. DALI has threads, nvdec modes of display.
_OPTIONS: dict[str, tuple[Any, ...]] = {"num_threads": (1, 4), "latency": ("native", "low")}


def measure(settings: Settings, notes: Notes) -> None:
    """Sweep lanes and options of every GPU decoder, through a loader that delivers batches on the device."""
    runs, reasons = settings.on_device()
    notes.put(unavailable=reasons, failed=0)
    first, failed, best = settings.smallest()[0], 0, dict[str, Any]()
    every = settings.datasets()
    for name in sorted(every, key=lambda name: name != first):
        for one in runs:
            for count, options in _settings_of(one, settings, whole=name == first):
                row = {"lanes": count, "options": options} | _row(settings, every[name], one, count, options)
                notes.row("sweep", dataset=name, decoder=one.name, **row)
                failed += "failed" in row
                if name == first and row.get("frames_per_s", 0) > best.get("frames_per_s", 0):
                    best = {"decoder": one.name, **row}
                    notes.put(best=best, **{key: row[key] for key in ("frames_per_s", "host_cores")})
                    notes.put(nvdec_percent=row.get("nvdec_percent"))
                notes.put(failed=failed)


def _settings_of(one: Backend, settings: Settings, *, whole: bool) -> list[tuple[int, dict[str, Any]]]:
    lanes = (_LANES if whole else _FEW_LANES) if not settings.fake else (1, 2) if whole else (2,)
    own = inspect.signature(one.load()).parameters.keys() & _OPTIONS if whole else set()
    values = [[(name, value) for value in _OPTIONS[name]] for name in sorted(own)]
    return [(count, dict(chosen)) for count in lanes for chosen in itertools.product(*values)]


def _row(
    settings: Settings, dataset: VideoDataset, one: Backend, count: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    if dataset[0].info.codec not in one.codecs:
        return {"not_decoded": dataset[0].info.codec.label}
    try:
        with utilization(settings.index()) as used:
            rate = throughput(settings, dataset, Tuned.of(one, **options), count)
    except FastvidError as error:
        return {"failed": error.message}
    return rate | used
