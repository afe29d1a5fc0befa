"""Where the time went: what a loader did, per batch and in total, and what to change first.

Seconds of fetch, decode and finish are added up over the threads that spent them; wait and compute are seconds of the
consumer, so that wait + compute is the time on the clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

_BOUND: Final = 0.1
"""Share of the clock spent waiting, or copying, from which on a loader calls a run data-bound or copy-bound: below it,
data that cost nothing would speed the run up by less than a ninth."""

_IDLE: Final = 0.6
"""Share of its threads' time from which on a loader is busy. A loader that keeps a run waiting with idle threads waits
for something itself: too few batches ahead, or clips too few to share."""

_STAGES: Final = ("fetch", "decode", "finish")


@dataclass(slots=True)
class Counters:
    """Sums over clips and batches.

    Attributes:
        batches: Batches delivered.
        clips: Clips decoded.
        fill_seconds: Waited for the first batch of an iteration, when nothing was prefetched yet.
        wait_seconds: Waited for all other batches.
        compute_seconds: Spent by the consumer between batches.
        fetch_seconds: Reading and checking packets, over all threads.
        decode_seconds: Decoding, over all threads.
        finish_seconds: Converting and normalising, over all threads.
        copy_seconds: From host to device, on the device's own clock.
        bytes_read: Bytes read from shards, gaps included.
        bytes_whole: Bytes of the whole videos that the clips are of: what reading whole files would have read.
        requests: Reads made.
        packets: Packets fed to decoders.
        packets_from_keys: Packets that a decoder without a plan would have fed: all from each key to the last target.
        skips: Clips left out, by reason (the error's class).
    """

    batches: int = 0
    clips: int = 0
    fill_seconds: float = 0.0
    wait_seconds: float = 0.0
    compute_seconds: float = 0.0
    fetch_seconds: float = 0.0
    decode_seconds: float = 0.0
    finish_seconds: float = 0.0
    copy_seconds: float = 0.0
    bytes_read: int = 0
    bytes_whole: int = 0
    requests: int = 0
    packets: int = 0
    packets_from_keys: int = 0
    skips: Counter[str] = field(default_factory=Counter)

    def add(self, other: Counters) -> None:
        """Adds every sum of another."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.skips:
            self.skips.update(other.skips)

    def sums(self) -> tuple[float, ...]:
        """Every sum, in the order of the attributes, without the skips: what travels between processes."""
        return tuple(getattr(self, name) for name in _SUMS)

    @classmethod
    def of(cls, sums: Sequence[float]) -> Counters:
        """Those sums again."""
        return cls(**dict(zip(_SUMS, sums, strict=True)))  # type: ignore[arg-type]

    @property
    def wait_share(self) -> float:
        """Share of the clock spent waiting, 0 to 1, without the first batches of iterations."""
        clock = self.wait_seconds + self.compute_seconds
        return self.wait_seconds / clock if clock else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For a JSON line."""
        return {name: getattr(self, name) for name in _SUMS} | {"skips": dict(self.skips)}


_SUMS: Final = tuple(field.name for field in fields(Counters) if field.name != "skips")


@dataclass(slots=True)
class LoaderStats:
    """What a loader did so far.

    Attributes:
        total: Since the loader was made.
        step: For the last batch delivered; its compute_seconds are those before it was asked for.
        ready: Batches that were complete and waiting when the last one was asked for.
        queued: Clips that were planned and waited for a thread then.
        num_threads: Threads or processes that decode; 0 when not known.
        cores: Cores that this rank may use; 0 when not known.
        num_frames: Frames of a clip; 0 when not known.
        ceiling: Clips a second of the run with cached data, over all ranks; 0 before `ClipLoader.cached` measured it.
    """

    total: Counters = field(default_factory=Counters)
    step: Counters = field(default_factory=Counters)
    ready: int = 0
    queued: int = 0
    num_threads: int = 0
    cores: int = 0
    num_frames: int = 0
    ceiling: float = 0.0

    @property
    def busy(self) -> float:
        """Share of the decode threads' time that was spent on clips, 0 to 1; 0 when not known."""
        total = self.total
        clock = total.fill_seconds + total.wait_seconds + total.compute_seconds
        spent = sum(getattr(total, f"{stage}_seconds") for stage in _STAGES)
        return min(1.0, spent / (clock * self.num_threads)) if clock and self.num_threads else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For a JSON line: the last step, the total, queues and verdict."""
        return {
            "step": self.step.as_dict(),
            "total": self.total.as_dict(),
            "ready": self.ready,
            "queued": self.queued,
            "busy": round(self.busy, 4),
            "ceiling": self.ceiling,
            "verdict": self.verdict(),
        }

    def verdict(self) -> str:
        """One line: what bounds the run, by how much, and if it is not the model, the change that would help most."""
        total = self.total
        clock = total.wait_seconds + total.compute_seconds
        if not clock:
            return "nothing measured yet: the verdict needs two batches of one iteration"
        waiting, copying = total.wait_share, total.copy_seconds / clock
        if max(waiting, copying) < _BOUND:
            text = f"compute-bound: {waiting:.0%} of the time is spent waiting for data"
            return f"{text}; the loader could give {1 / self.busy:.1f} times as much" if self.busy else text
        if copying > waiting:
            return (
                f"copy-bound: {copying:.0%} of the time goes into copies to the device; give the loader a decoder that"
                " writes planes (pyav) or decodes there, which copies half as much or nothing"
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
        """The change that would help most."""
        total, threads = self.total, self.num_threads
        if self.busy and self.busy < _IDLE:
            return f"threads are busy for {self.busy:.0%} of the time only: raise prefetch, or the batch"
        if threads and threads < self.cores:
            return f"raise num_threads from {threads} to {self.cores}, one a core"
        if stage == "fetch":
            reads = total.requests / max(1, total.clips)
            return (
                f"put the shards on faster storage or a node's cache ({reads:.0f} reads a clip), or raise num_threads"
            )
        if stage == "finish":
            return "move conversion to the device: device='cuda', or dtype=torch.uint8 and normalise there"
        packets = total.packets / max(1, total.clips)
        if self.num_frames and packets > 1.5 * self.num_frames:
            return (
                f"shard with --profile intra: {self.num_frames} packets a clip instead of {packets:.0f}; or more cores"
            )
        return "give the loader more cores (num_threads), or a GPU that decodes"
