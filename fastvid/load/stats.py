"""Where the time went: what a loader did, per batch and in total, and what to change first.

Seconds of fetch, decode and finish are added up over the threads that spent them; wait and compute are seconds of the
consumer, so that wait + compute is the time on the clock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any, Final

from fastvid.load.fetch import Fetched

_DATA_BOUND: Final = 0.1
"""Share of the clock spent waiting from which on a loader calls a run data-bound: below it, data that cost nothing
would speed the run up by less than a ninth."""

_ADVICE: Final = {
    "fetch": "put the shards on faster storage, or raise num_threads",
    "decode": "raise num_threads, or shard with a profile that decodes faster (intra)",
    "finish": "raise num_threads, or move conversion to the device",
}


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
        bytes_read: Bytes read from shards.
        requests: Reads made.
        packets: Packets fed to decoders.
        packets_from_keys: Packets that decoding from the key frames without a plan would have fed.
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
    bytes_read: int = 0
    requests: int = 0
    packets: int = 0
    packets_from_keys: int = 0
    skips: Counter[str] = field(default_factory=Counter)

    def count(self, fetched: Fetched) -> None:
        """Adds what a fetch cost."""
        self.bytes_read += fetched.bytes_read
        self.requests += fetched.requests
        self.packets += fetched.packets
        self.packets_from_keys += fetched.packets_from_keys

    def add(self, other: Counters) -> None:
        """Adds every sum of another."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.skips:
            self.skips.update(other.skips)

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
    """

    total: Counters = field(default_factory=Counters)
    step: Counters = field(default_factory=Counters)
    ready: int = 0

    def verdict(self) -> str:
        """One line: whether data or compute bounds the run, and if data, what to change first."""
        total = self.total
        share = total.wait_share
        if not total.wait_seconds + total.compute_seconds:
            return "nothing measured yet: the verdict needs two batches of one iteration"
        if share < _DATA_BOUND:
            return f"compute-bound: {share:.0%} of the time is spent waiting for data"
        stages = {stage: getattr(total, f"{stage}_seconds") for stage in _ADVICE}
        stage = max(stages, key=lambda name: stages[name])
        part = stages[stage] / (sum(stages.values()) or 1.0)
        return f"data-bound: {share:.0%} of the time is spent waiting, {part:.0%} of it on {stage}; {_ADVICE[stage]}"
