"""Prepare contenders for timing: verify their output, sweep their settings, and weigh what they keep open."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from av.video.frame import VideoFrame

from bench.common.rounds import apart, resident
from bench.decode.rivals import KNOBS, rival
from fastvid.errors import FastvidError
from fastvid.runtime.arrays import UInt8Array
from fastvid.tune.measure import Contender, Corpus, FastvidRunner, RoundTimes, TaskRunner, measure

# Mean difference from fastvid's RGB, in levels. Colour converters differ by 1 to 2 (rounding, chroma); a wrong frame of
# a moving scene differs by far more.
_TOLERANCE: Final = 4.0
_CHECKED: Final = 16


_log = logging.getLogger(__name__)


@dataclass
class Rivals:
    """Rivals on one corpus."""

    best: list[Contender] = field(default_factory=list)
    sweeps: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def at_their_best(names: Sequence[str], corpus: Corpus, workers: int, rounds: int, *, by: str = "wall") -> Rivals:
    """Sweep each rival over its settings; see `sweep`."""
    found = Rivals()
    for name in names:
        try:
            best, found.sweeps[name] = sweep(name, corpus, workers, rounds, by=by)
            found.best.append(best)
        except (ImportError, OSError) as error:
            found.refused[name] = str(error)
            _log.warning("%s cannot run here: %s", name, error)
    return found


def sweep(
    name: str, corpus: Corpus, workers: int, rounds: int, *, by: str = "wall"
) -> tuple[Contender, list[dict[str, Any]]]:
    """Find a rival's best settings: the values of one knob take turns, and the others stay as they are.

    Settings that deliver wrong frames are recorded but never chosen. The rounds are not those that are reported.

    Returns the rival with its best settings, and all settings tried, with the spread of their rounds.
    """
    lanes = [(workers, False), (workers, True), (workers + 1, False), (max(1, workers // 2), False)]
    knobs: dict[str, tuple[Any, ...]] = {
        # The number of workers does not change what a clip costs by CPU time.
        "parallel": tuple(lanes[:1] if by == "cpu" else dict.fromkeys(lanes)),
        **KNOBS[name],
    }
    chosen = {knob: values[0] for knob, values in knobs.items()}
    tried: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    best: Contender | None = None
    for knob, values in reversed(knobs.items()):
        if len(values) == 1 and best is not None:
            continue
        contenders = {}
        for value in values:
            settings = chosen | {knob: value}
            options = {one: setting for one, setting in settings.items() if one != "parallel"}
            contender = rival(name, corpus, options, *settings["parallel"])
            # What a thread delivers, a process with these settings delivers.
            wrong = None if settings["parallel"][1] else check(contender, corpus)
            if wrong is None:
                contenders[value] = contender
            elif contender.label not in refused:
                refused[contender.label] = wrong
                tried.append(_settings(contender) | {"wrong": wrong})
        timings = dict(zip(contenders, measure(list(contenders.values()), len(corpus.requests), rounds), strict=True))
        costs = {value: timing.cost(by) for value, timing in timings.items()}
        for value, contender in contenders.items():
            _log.info("%s: %.2f ms by %s time", contender.label, costs[value], by)
            tried.append(_settings(contender) | timings[value].summary() | {"wrong": None})
        if costs:
            chosen[knob] = min(costs, key=costs.__getitem__)
            best = contenders[chosen[knob]]
    if best is None:
        raise FastvidError(f"{name} delivers wrong frames with every setting")
    return best, tried


def check(contender: Contender, corpus: Corpus) -> str | None:
    """Compare a contender's frames with fastvid's, which fastvid's own tests verify.

    Returns none, or a description of the error. A frame passes if it is within the tolerance and closer to the
    requested frame than to its neighbours (unless those hardly differ).
    """
    ours, theirs = FastvidRunner(corpus, "rgb", "memory"), contender.open_runner()
    # Long clips check as many frames with fewer of them.
    checked = max(2, min(_CHECKED, _CHECKED * 16 // len(corpus.requests[0].frames)))
    for task in range(min(checked, len(corpus.requests))):
        found = _rgb(np.asarray(theirs(task))).astype(np.int16)
        request = corpus.requests[task]
        last = corpus.dataset[request.sample].num_frames - 1
        distances = []
        for shift in (0, -1, 1):
            shifted = np.clip(request.frames + shift, 0, last)
            wanted = np.asarray(ours.decode(replace(request, frames=shifted))).astype(np.int16)
            distances.append(np.abs(found - wanted).mean(axis=(1, 2, 3)))
        exact, *neighbours = distances
        nearer = np.minimum(*neighbours) < exact - 0.2
        if exact.max() > _TOLERANCE or nearer.any():
            frame = int(request.frames[int(np.argmax(np.where(nearer, 255, exact)))])
            key = corpus.dataset.key(request.sample)
            return f"wrong frame {frame} of {key}: differs by {exact.max():.1f} levels on average"
    return None


def entry(contender: Contender, timing: RoundTimes) -> dict[str, Any]:
    """Return a contender and its times as a JSON record."""
    return _settings(contender) | timing.summary()


def _rgb(pictures: UInt8Array) -> UInt8Array:
    """Return RGB [T, H, W, 3]; YUV 4:2:0 [T, H * 3 / 2, W] is converted."""
    if pictures.ndim == 4:
        return pictures
    frames = [VideoFrame.from_ndarray(picture, format="yuv420p") for picture in pictures]
    return np.stack([frame.to_ndarray(format="rgb24") for frame in frames])


def _settings(contender: Contender) -> dict[str, Any]:
    return {
        "name": contender.name,
        "label": contender.label,
        "settings": dict(contender.settings),
        "workers": contender.workers,
        "processes": contender.processes,
    }


def megabytes_kept(contender: Contender, tasks: int) -> float:
    """Return by how many MB a worker grows from its first clip to its last; one that keeps nothing hardly grows."""
    return float(apart(_growth, contender.open_runner, tasks))


def _growth(opened: Callable[[], TaskRunner], tasks: int) -> float:
    runner = opened()
    runner(0)
    before = resident()
    for task in range(tasks):
        runner(task)
    gc.collect()
    return (resident() - before) / 1e6
