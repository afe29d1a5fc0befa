"""Estimate size and time of a job from a small random sample of its sources, encoded as the job would."""

from __future__ import annotations

import logging
import math
import os
import resource
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import numpy as np

from fastvid.errors import UsageError
from fastvid.runtime.names import encode_name
from fastvid.runtime.processes import available_cores
from fastvid.runtime.values import duration, size, things
from fastvid.sharding.job.job import MAX_SECONDS, EncodeShards, choose_settings
from fastvid.sharding.job.plan import SAMPLES_PER_SHARD, plan_shards
from fastvid.sharding.job.run import How, Job
from fastvid.sharding.sources.sources import Source, SourceList
from fastvid.sharding.sources.tars import gather_sources
from fastvid.storage import LocalStorage

_LOG = logging.getLogger(__name__)

SAMPLED: Final = 24
"""Default number of sources that are encoded for an estimate, and by `fastvid tune`."""

# Quantile of the normal distribution for an interval that contains 95 % of its values.
_QUANTILE: Final = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True)
class Amount:
    """An estimated total."""

    total: float
    error: float | None

    def text(self, show: Callable[[float], str]) -> str:
        """Return the total and its interval, such as ``2.5 TB (±12 %)``; a wide interval as ``(at most 5 TB)``."""
        if self.error is None:
            return f"{show(self.total)} (± unknown)"
        if self.error > self.total:
            return f"{show(self.total)} (at most {show(self.total + self.error)})"
        return f"{show(self.total)} (±{100 * self.error / (self.total or 1):.0f} %)"


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimated size and time of encoding all sources."""

    videos: int
    sampled: int
    bytes: Amount
    cpu_seconds: Amount
    cores: int
    shards: int | None = None

    def sentence(self) -> str:
        """Return the estimate in one line."""
        hours = self.cpu_seconds.text(lambda seconds: duration(seconds / self.cores))
        parts = [self.bytes.text(size), f"{hours} on {things(self.cores, 'core')}"]
        if self.shards is not None:
            parts.append(things(self.shards, "shard"))
        return f"your {things(self.videos, 'video')}: {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class DryRun:
    """The result of a dry run: the sources that a job would encode, and the estimate of its size and time."""

    found: SourceList
    estimate: Estimate
    footage: Amount  # length of all videos in seconds
    rejected: Mapping[str, int]

    @property
    def missing(self) -> tuple[Source, ...]:
        """Annotation rows without a usable file."""
        return tuple(source for source in self.found.sources if source.problem is not None)

    @property
    def class_counts(self) -> Mapping[str, int]:
        """Number of sources of each class, in the order of the classes."""
        counts = Counter(source.label for source in self.found.sources)
        return {name: counts[name] for name in self.found.classes}

    @property
    def split_counts(self) -> Mapping[str, Mapping[str, int]]:
        """Number of sources by split column and split."""
        found: dict[str, Counter[str]] = {}
        for source in self.found.sources:
            for name, value in source.columns.items():
                if name.startswith("split") and value is not None:
                    found.setdefault(name, Counter())[str(value)] += 1
        return found


def extrapolate(values: Sequence[float], total: int) -> Amount:
    """Estimate a total from a simple random sample without replacement.

    The 95 % interval uses Student's distribution and the correction for a finite population.
    """
    number = len(values)
    mean = statistics.fmean(values)
    if number == total:
        return Amount(mean * total, 0.0)
    if number < 2:
        return Amount(mean * total, None)
    error = statistics.stdev(values) / math.sqrt(number) * math.sqrt(1 - number / total)
    return Amount(mean * total, _student(number - 1) * error * total)


def draw_sources(sources: Sequence[Source], number: int, seed: int) -> list[Source]:
    """Return a random sample of sources, in the order in which they are listed."""
    picks = np.random.default_rng(seed).choice(len(sources), min(number, len(sources)), replace=False)
    return [sources[place] for place in sorted(picks.tolist())]


def children_seconds() -> float:
    """Return the CPU seconds of all terminated child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def estimate_job(
    sources: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    *,
    annotations: Sequence[str] | str | None = None,
    columns: str | Mapping[str, str] | None = None,
    class_names: Sequence[str] = (),
    follow_links: bool = False,
    workers: int | None = None,
    samples_per_shard: int = SAMPLES_PER_SHARD,
    max_seconds: float = MAX_SECONDS,
    seed: int = 0,
    sampled: int = SAMPLED,
    **encoding: Any,
) -> DryRun:
    """Find the sources of a job, encode a random sample of them in a temporary folder, and estimate the whole.

    No dataset is written. The estimate assumes that the sources which were not sampled are like those that were; its
    interval reflects only how much the sampled ones differ. Arguments that are not listed are those of
    `fastvid.sharding.job.job.run_job`.

    Args:
        sources: Folders of videos, single files, tars or datasets.
        workers: Sources encoded in parallel, and the cores that the estimate is for; by default all.
        seed: Seed of the sample, and of the order in the shards.
        sampled: Maximum number of sources to encode.
        encoding: ``profile``, ``streams``, ``audio``, ``flow``, ``flow_bound``, ``max_bad_frames`` and ``limits``.

    Raises:
        UsageError: If an argument is wrong, or there is nothing to do.
        MissingDependency: If there is no ffmpeg.
        StorageError: If a disk or store does not deliver sources.
    """
    How(workers=workers).check(samples_per_shard, max_seconds=max_seconds)
    if sampled < 1:
        raise UsageError(f"{sampled} videos in the sample", hint="use at least 1")
    settings = choose_settings(max_seconds=max_seconds, **encoding)
    looking: dict[str, Any] = {"columns": columns, "class_names": class_names, "follow_links": follow_links}
    found = gather_sources(sources, annotations, **looking, rate=settings.profile.fps)
    tried = list(found.tried)
    if not tried:
        raise UsageError("no source has a file", hint="compare the names in the annotations with those of the files")
    sample = draw_sources(tried, sampled, seed)
    cores = workers or available_cores()
    _LOG.info("encoding %d of %d videos", len(sample), len(tried))
    with tempfile.TemporaryDirectory(prefix="fastvid-estimate-") as folder:
        storage, drawn = LocalStorage(folder), SourceList(tuple(sample), found.classes, {})
        work = EncodeShards(storage, drawn, settings, seed=seed, samples_per_shard=samples_per_shard)
        before = children_seconds()
        parts = Job(work, How(workers=cores)).run()
        spent = children_seconds() - before
    rows = {row["source_id"]: row for part in parts for row in part.rows}
    lengths: defaultdict[str, Fraction] = defaultdict(Fraction)
    for packed in (packed for part in parts for packed in part.samples):
        lengths[packed.source_id] += packed.num_frames / Fraction(packed.fps)
    names = [encode_name(source.id) for source in sample]
    estimate = make_estimate(
        [rows[name]["bytes_out"] or 0 for name in names],
        [rows[name]["seconds"] for name in names],
        spent,
        len(tried),
        cores,
        len(plan_shards(tried, seed=seed, samples=samples_per_shard)),
    )
    footage = extrapolate([float(lengths[name]) for name in names], len(tried))
    rejected = Counter(row["reason"] for row in rows.values() if row["reason"] is not None)
    return DryRun(found, estimate, footage, rejected)


def make_estimate(
    sizes: Sequence[int],
    seconds: Sequence[float],
    cpu_seconds: float,
    videos: int,
    cores: int,
    shards: int | None = None,
) -> Estimate:
    """Return the estimate for all videos.

    `sizes`: bytes written for each sampled video.
    """
    scale = cpu_seconds / (sum(seconds) or 1.0)
    spent = extrapolate([scale * one for one in seconds], videos)
    return Estimate(videos, len(sizes), extrapolate(sizes, videos), spent, cores, shards)


def _student(freedom: int) -> float:
    """Return the quantile of Student's distribution (Abramowitz and Stegun 1964, 26.7.5, first three terms)."""
    z = _QUANTILE
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
