"""Loader statistics per batch and in total, and advice on what to change first.

Seconds of fetch, decode and finish are sums over all threads; wait and compute are the consumer's, so that
wait + compute is wall-clock time. With CUDA a thread only queues the work of finishing; the time that the consumer's
stream waits for it is copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from fastvid.storage.traffic import TRAFFIC, Prices

_BOUND: Final = 0.1
"""Fraction of wall-clock time spent waiting, or copying, from which a run counts as data-bound or copy-bound. Below it,
free data would speed the run up by less than a ninth."""

_IDLE: Final = 0.6
"""Fraction of its threads' time from which a loader counts as busy. If a run waits while threads are idle, the loader
prefetches too little or a batch has too few clips to share."""

_STAGES: Final = ("fetch", "decode", "finish")


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
        bytes_read: Bytes read from shards, gaps included.
        bytes_whole: Size of the clips' whole videos: the bytes that reading whole files would take.
        requests: Read requests for packets and sound: ranges of local files, or requests to a store.
        store_requests: Requests to object stores and web servers of this process and its workers, failed ones
            included, for whatever they read: videos, packet tables, lists and annotations.
        store_bytes: Bytes of the responses.
        packets: Packets fed to decoders.
        packets_from_keys: Packets that decoding without a plan would need: all from each key frame to the last target.
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

    def add(self, other: Counters) -> None:
        """Add another's sums."""
        # Most are zero in what one clip adds.
        for name in _SUMS:
            if more := getattr(other, name):
                setattr(self, name, getattr(self, name) + more)
        if other.skips:
            self.skips.update(other.skips)

    def take_traffic(self) -> None:
        """Add the traffic of this process with stores since the last call, whichever loader caused it."""
        requests, size = TRAFFIC.take()
        self.store_requests += requests
        self.store_bytes += size

    def sums(self) -> tuple[float, ...]:
        """Return every sum in the order of the attributes, without skips, to be sent between processes."""
        return tuple(getattr(self, name) for name in _SUMS)

    @classmethod
    def of(cls, sums: Sequence[float]) -> Counters:
        """Return counters from the result of `sums`."""
        return cls(**dict(zip(_SUMS, sums, strict=True)))  # type: ignore[arg-type]

    @property
    def wait_share(self) -> float:
        """Fraction of wall-clock time spent waiting, 0 to 1, without the first batches of iterations."""
        clock = self.wait_seconds + self.compute_seconds
        return self.wait_seconds / clock if clock else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the values for a JSON line."""
        return {name: getattr(self, name) for name in _SUMS} | {"skips": dict(self.skips)}


_SUMS: Final = tuple(field.name for field in fields(Counters) if field.name != "skips")


@dataclass(slots=True)
class LoaderStats:
    """Statistics of a loader.

    Attributes:
        total: Since the loader was created.
        step: For the last batch delivered; its compute_seconds precede the request for it.
        ready: Complete batches that waited when the last one was requested.
        queued: Planned clips that waited for a thread at that time.
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
        spent = sum(getattr(total, f"{stage}_seconds") for stage in _STAGES)
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
        stages = {stage: getattr(total, f"{stage}_seconds") for stage in _STAGES}
        stage = max(stages, key=lambda name: stages[name])
        part = stages[stage] / (sum(stages.values()) or 1.0)
        faster = f"{clock / total.compute_seconds:.1f} times as fast" if total.compute_seconds else "without a model"
        return (
            f"data-bound: {waiting:.0%} of the time is spent waiting, {part:.0%} of it on {stage}; with free data the"
            f" run would be {faster}; {self._advice(stage)}"
        )

    def _advice(self, stage: str) -> str:
        """Return the most useful change."""
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
