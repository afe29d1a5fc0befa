"""Loader statistics per batch and in total, advice on what to change first, and how both are shown during a run.

Seconds of fetch, decode and finish are sums over all threads. Wait and compute are measured in the thread that
iterates, the consumer, so wait + compute is wall-clock time. With CUDA, finishing only queues work; copy is the time
that the consumer's CUDA stream waits for that work.

Does not import torch, because worker processes use these counters too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from fastvid.storage.protocol import TRAFFIC, Prices

_BOUND: Final = 0.1
"""Fraction of wall-clock time spent waiting, or copying, from which a run counts as data-bound or copy-bound. Below it,
a loader that took no time would speed the run up by less than a ninth."""

_IDLE: Final = 0.6
"""A loader whose threads work for at least this fraction of the time counts as busy. If a run waits while threads are
idle, the loader prefetches too little or a batch has too few clips to share among them."""


@dataclass(slots=True)
class Counters:
    """Sums over clips and batches.

    Attributes:
        batches: Batches delivered.
        clips: Clips decoded.
        fill_seconds: Time waited for the first batch of each iteration, when nothing was prefetched yet.
        wait_seconds: Time waited for all other batches.
        compute_seconds: Time spent by the consumer between batches.
        fetch_seconds: Reading and checking packets, over all threads.
        decode_seconds: Decoding, over all threads.
        finish_seconds: Converting and normalising, over all threads.
        audio_seconds: Part of fetch_seconds and decode_seconds that is spent on sound.
        copy_seconds: Time that the consumer's CUDA stream waited for batches to be copied and converted, on its own
            clock.
        bytes_read: Bytes read from shards, with the unwanted bytes between nearby packets.
        bytes_whole: Size of the clips' whole videos: the bytes that reading whole files would take.
        requests: Read requests for packets and sound: ranges of local files, or requests to a store.
        store_requests: Requests to object stores and web servers of this process and its workers, failed ones
            included, for whatever they read: videos, packet tables, lists and annotations.
        store_bytes: Bytes of the responses.
        packets: Packets fed to decoders.
        packets_from_keys: Packets that decoding without a plan would need: all from a key frame to its last target.
        skips: Skipped clips, by reason (the error's class).
    """

    batches: int = 0
    clips: int = 0
    fill_seconds: float = 0.0
    wait_seconds: float = 0.0
    compute_seconds: float = 0.0
    fetch_seconds: float = 0.0
    decode_seconds: float = 0.0
    finish_seconds: float = 0.0
    audio_seconds: float = 0.0
    copy_seconds: float = 0.0
    bytes_read: int = 0
    bytes_whole: int = 0
    requests: int = 0
    store_requests: int = 0
    store_bytes: int = 0
    packets: int = 0
    packets_from_keys: int = 0
    skips: Counter[str] = field(default_factory=Counter)

    def add(self, *others: Counters) -> None:
        """Add the sums of other counters to these."""
        for name, values in zip(_SUMS, zip(*map(_VALUES, (self, *others)), strict=True), strict=True):
            setattr(self, name, sum(values))
        for other in others:
            self.skips.update(other.skips)

    def take_traffic(self) -> None:
        """Add this process's traffic with stores since the last call, whichever loader caused it."""
        if TRAFFIC.requests or TRAFFIC.bytes:  # local files cause none
            requests, size = TRAFFIC.take()
            self.store_requests += requests
            self.store_bytes += size

    def sums(self) -> tuple[float, ...]:
        """Return every sum in the order of the attributes, without skips, to be sent between processes."""
        values: tuple[float, ...] = _VALUES(self)
        return values

    @classmethod
    def of(cls, sums: Sequence[float]) -> Counters:
        """Return counters from the result of `sums`."""
        return cls(**dict(zip(_SUMS, sums, strict=True)))  # type: ignore[arg-type]

    @property
    def stages(self) -> dict[str, float]:
        """Seconds of each stage of a clip, over all threads."""
        return {"fetch": self.fetch_seconds, "decode": self.decode_seconds, "finish": self.finish_seconds}

    @property
    def wait_share(self) -> float:
        """Fraction of wall-clock time spent waiting, 0 to 1, without the first batches of iterations."""
        clock = self.wait_seconds + self.compute_seconds
        return self.wait_seconds / clock if clock else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the values for a JSON line."""
        return dict(zip(_SUMS, self.sums(), strict=True)) | {"skips": dict(self.skips)}


_SUMS: Final = tuple(field.name for field in fields(Counters) if field.name != "skips")
_VALUES: Final = attrgetter(*_SUMS)


@dataclass(slots=True)
class LoaderStats:
    """Statistics of a loader.

    Attributes:
        total: Since the loader was created.
        step: For the last batch delivered; its compute_seconds were spent before the batch was requested.
        ready: Complete batches that were waiting when the last one was requested.
        queued: Planned clips that were waiting for a thread at that time.
        num_threads: Threads or processes that decode; 0 if unknown.
        cores: Cores available to this rank; 0 if unknown.
        num_frames: Frames of a clip; 0 if unknown.
        ceiling: Clips per second of the run with cached data, over all ranks; 0 before `ClipLoader.cached` measures it.
        prices: What the store charges.
    """

    total: Counters = field(default_factory=Counters)
    step: Counters = field(default_factory=Counters)
    ready: int = 0
    queued: int = 0
    num_threads: int = 0
    cores: int = 0
    num_frames: int = 0
    ceiling: float = 0.0
    prices: Prices = field(default_factory=Prices)

    @property
    def dollars(self) -> float:
        """What the requests and bytes of `total` cost at `prices`, in dollars."""
        return self.total.store_requests * self.prices.request + self.total.store_bytes / 1e9 * self.prices.gigabyte

    @property
    def busy(self) -> float:
        """Fraction of the decode threads' time spent on clips, 0 to 1; 0 if unknown."""
        total = self.total
        clock = total.fill_seconds + total.wait_seconds + total.compute_seconds
        spent = sum(total.stages.values())
        return min(1.0, spent / (clock * self.num_threads)) if clock and self.num_threads else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the values for a JSON line: last step, total, queues and verdict."""
        return {
            "step": self.step.as_dict(),
            "total": self.total.as_dict(),
            "ready": self.ready,
            "queued": self.queued,
            "busy": round(self.busy, 4),
            "ceiling": self.ceiling,
            "dollars": self.dollars,
            "verdict": self.verdict(),
        }

    def verdict(self) -> str:
        """Return one line: the bottleneck, its share and, unless it is the model, the most useful change."""
        total = self.total
        clock = total.wait_seconds + total.compute_seconds
        if not clock:
            return "nothing measured yet: the verdict needs two batches of one iteration"
        waiting, copying = total.wait_share, total.copy_seconds / clock
        if max(waiting, copying) < _BOUND:
            text = f"compute-bound: {waiting:.0%} of the time is spent waiting for data"
            return f"{text}; the loader could deliver {1 / self.busy:.1f} times as much" if self.busy else text
        if copying > waiting:
            return (
                f"copy-bound: {copying:.0%} of the time the device waits for copies to it; use a decoder that"
                " writes planes (pyav) or decodes on the device, which copies half as much or nothing"
            )
        stages = total.stages
        stage = max(stages, key=lambda name: stages[name])
        part = stages[stage] / (sum(stages.values()) or 1.0)
        faster = f"{clock / total.compute_seconds:.1f} times as fast" if total.compute_seconds else "without a model"
        return (
            f"data-bound: {waiting:.0%} of the time is spent waiting, {part:.0%} of it on {stage}; with free data the"
            f" run would be {faster}; {self._advice(stage)}"
        )

    def _advice(self, stage: str) -> str:
        """Return what to change first; `stage` is the one that takes most of the threads' time."""
        total, threads = self.total, self.num_threads
        if self.busy and self.busy < _IDLE:
            return f"threads are busy for only {self.busy:.0%} of the time: raise prefetch or the batch size"
        if threads and threads < self.cores:
            return f"raise num_threads from {threads} to {self.cores}, one per core"
        if stage == "fetch":
            reads = total.requests / max(1, total.clips)
            return (
                f"put the shards on faster storage or a local cache ({reads:.0f} reads per clip), or raise num_threads"
            )
        if stage == "finish":
            return "convert on the device: device='cuda', or Output(dtype=torch.uint8) and normalise there"
        packets = total.packets / max(1, total.clips)
        if self.num_frames and packets > 1.5 * self.num_frames:
            return (
                f"shard with --profile intra: {self.num_frames} packets per clip instead of {packets:.0f}; or add cores"
            )
        return "use more cores (num_threads), or a GPU that decodes"


_TERMINAL_SECONDS: Final = 0.5
_LOG_SECONDS: Final = 15.0
_WINDOW_SECONDS: Final = 60.0
"""Seconds over which the displayed rate is averaged."""

BatchCallback = Callable[[LoaderStats, int, int, int], None]
"""Called after each batch with the stats, epoch, position and number of samples of the epoch."""


def batch_callbacks(*, show_stats: bool, stats_file: str | os.PathLike[str] | None) -> list[BatchCallback]:
    """Return the callbacks to run after each batch."""
    callbacks: list[BatchCallback] = [LiveView()] if show_stats else []
    return callbacks if stats_file is None else [*callbacks, partial(append_line, Path(stats_file))]


def append_line(path: Path, stats: LoaderStats, epoch: int, position: int, num_samples: int) -> None:
    """Append a line of JSON in a single write, so that a killed process leaves no partial line."""
    line = {"time": time.time(), "epoch": epoch, "position": position, "num_samples": num_samples}
    data = (json.dumps(line | stats.as_dict()) + "\n").encode()
    with path.open("ab", buffering=0) as file:
        file.write(data)


class LiveView:
    """Shows statistics periodically: three lines redrawn in place on a terminal, one line elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._every = _TERMINAL_SECONDS if self._terminal else _LOG_SECONDS
        self._said = time.monotonic()
        self._marks: deque[tuple[float, int]] = deque()
        self._drawn = False

    def __call__(self, stats: LoaderStats, epoch: int, position: int, num_samples: int) -> None:
        """Redraw if enough time has passed."""
        now = time.monotonic()
        if self._marks and position < self._marks[-1][1]:
            self._marks.clear()
        last = position >= num_samples
        if self._marks and now - self._said < self._every and not last:
            return
        self._said = now
        self._marks.append((now, position))
        while now - self._marks[0][0] > _WINDOW_SECONDS and len(self._marks) > 2:
            self._marks.popleft()
        lines = self.lines(stats, epoch, position, num_samples)
        up = f"\x1b[{len(lines)}F" if self._drawn else ""
        drawn = up + "".join(f"{line}\x1b[K\n" for line in lines)
        sys.stderr.write(drawn if self._terminal else " | ".join(lines) + "\n")
        sys.stderr.flush()
        self._drawn = True

    def lines(self, stats: LoaderStats, epoch: int, position: int, num_samples: int) -> list[str]:
        """Return the lines to show."""
        total = stats.total
        (since, before), (now, _) = self._marks[0], self._marks[-1]
        rate = (position - before) / (now - since) if now > since else 0.0
        left = f", {(num_samples - position) / rate:.0f} s left" if rate else ""
        clips = max(1, total.clips)
        stages = total.stages
        whole = sum(stages.values()) or 1.0
        parts = " ".join(f"{stage} {seconds / whole:.0%}" for stage, seconds in stages.items())
        kilobytes = f"{total.bytes_read / clips / 1e3:.0f} of {total.bytes_whole / clips / 1e3:.0f} kB"
        reads = f"a clip reads {kilobytes} in {total.requests / clips:.1f} requests"
        skips = ", ".join(f"{count} {reason}" for reason, count in total.skips.most_common()) or "none"
        return [
            f"epoch {epoch}, {position}/{num_samples} clips, {rate:.1f}/s{left}; waiting {total.wait_share:.0%};"
            f" {stats.ready} batches ready, {stats.queued} clips queued",
            f"{stats.num_threads} threads {stats.busy:.0%} busy: {parts}; {reads}; skipped: {skips}",
            stats.verdict(),
        ]
