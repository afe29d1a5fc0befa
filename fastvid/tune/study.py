"""The measurements of `fastvid tune`: encode a sample with every profile, compare and time it.

Decoding is timed by the same code as in `python -m bench decode` (`fastvid.measure`): planned packets with their
checksums, decoded to YUV planes in the worker's buffer, like those that a loader copies to a device.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from fastvid.decode.access import open as open_dataset
from fastvid.errors import JobError, UsageError
from fastvid.measure.clips import CROP, Corpus, parse_sampling
from fastvid.measure.fastvid_contender import fastvid
from fastvid.measure.rounds import RoundTimes, measure
from fastvid.media.ffmpeg import find_ffmpeg
from fastvid.media.limits import Limits
from fastvid.runtime.cores import available_cores
from fastvid.runtime.file_names import encode_name
from fastvid.sharding.encode.profile import Profile
from fastvid.sharding.encode.profiles import PROFILES, get_profile
from fastvid.sharding.job.estimate import SAMPLED, Estimate, children_seconds, draw_sources, make_estimate
from fastvid.sharding.job.job import run_job
from fastvid.sharding.sources.sources import Source
from fastvid.sharding.sources.tar_sources import gather_sources
from fastvid.tune.quality import compare, mean

_LOG = logging.getLogger(__name__)

VIDEOS: Final = SAMPLED
"""Videos in the sample. Ratios between profiles settle with fewer; this many keep unusual videos from dominating."""

_SHORT_SIDE: Final = 256  # short side in pixels that the crop of CROP pixels refers to


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """Measurements of one profile on the sample.

    Attributes:
        profile: Its name.
        bytes: Size of all samples.
        encode_seconds: CPU seconds of all processes, including probing and verification.
        ssim: Mean over the videos, 1 is equal; None if the profile does not encode.
        psnr: Mean in dB; None if the profile does not encode.
        clips_per_second: Clips per second of wall time with `workers` threads, median of the rounds.
        cpu_ms: CPU milliseconds per clip, median of the rounds.
        packets: Mean packets decoded per clip.
        packets_from_keys: Mean packets that a decoder without a plan would decode.
        rejected: Number of videos that the profile rejects, by reason.
        estimate: Size and time of all videos that were found; None if they were not estimated.
    """

    profile: str
    bytes: int
    encode_seconds: float
    ssim: float | None
    psnr: float | None
    clips_per_second: float
    cpu_ms: float
    packets: float
    packets_from_keys: float
    rejected: Mapping[str, int] = field(default_factory=dict)
    estimate: Estimate | None = None


@dataclass(frozen=True, slots=True)
class Study:
    """All measurements.

    Attributes:
        videos: Number of sampled videos that every profile accepts; all measurements are on these.
        found: Number of videos found.
        seconds: Total length of the sampled videos.
        source_bytes: Total size of their sources.
        sampling: Frames of a clip, see `fastvid.measure.clips.parse_sampling`.
        workers: Number of decoding threads.
        seed: Seed of the sample and of the clips.
        measured: One result per profile, in the requested order.
        refused: Profiles that could not be measured, and why.
    """

    videos: int
    found: int
    seconds: float
    source_bytes: int
    sampling: str
    workers: int
    seed: int
    measured: tuple[ProfileResult, ...]
    refused: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return asdict(self) | {"measured": [asdict(one) for one in self.measured]}


@dataclass(slots=True)
class _EncodedSample:
    """The sample of videos as a dataset in one profile."""

    profile: Profile
    folder: str
    cpu_seconds: float
    rejected: dict[str, int]
    seconds: dict[str, float]  # wall time of each source, by id
    keys: dict[str, str]  # sample keys by source id, only of samples that cover a whole source


def study(
    sources: Sequence[str],
    *,
    profiles: Sequence[str | Profile] = tuple(PROFILES),
    videos: int = VIDEOS,
    seed: int = 0,
    sampling: str = "tsn8",
    rounds: int = 5,
    repeats: int = 2,
    workers: int | None = None,
    folder: str | None = None,
    follow_links: bool = False,
    limits: Limits | None = None,
) -> Study:
    """Measure profiles on a sample of videos.

    Args:
        sources: Folders of videos, or single files.
        profiles: Names of profiles, or `Profile` objects.
        videos: Maximum number of videos in the sample.
        seed: Seed of the sampled videos and of the clips.
        sampling: Frames of a clip, see `fastvid.measure.clips.parse_sampling`.
        rounds: How often each profile's clips are decoded.
        repeats: Clips per video.
        workers: Number of encoding processes and of decoding threads; by default one per core.
        folder: Where to keep the encoded datasets; by default they are deleted.
        follow_links: Accept symbolic links that point outside their folder.
        limits: Resource limits of one source.

    Raises:
        UsageError: If an argument is invalid, there is no video, or no profile accepts any of the sample.
    """
    parse_sampling(sampling)
    chosen = [get_profile(profile) if isinstance(profile, str) else profile for profile in profiles]
    if videos < 1 or rounds < 1 or repeats < 1 or not chosen:
        raise UsageError(
            f"{videos} videos, {rounds} rounds, {repeats} repeats, {len(chosen)} profiles: each must be at least 1"
        )
    every = gather_sources(list(sources), follow_links=follow_links).sources
    candidates = [source for source in every if source.problem is None]
    if not candidates or any(source.member is not None for source in candidates):
        raise UsageError("no video file found to measure", file=", ".join(sources), hint="name a folder of videos")
    sample = draw_sources(candidates, videos, seed)
    limits, workers = limits or Limits(), workers or available_cores()
    with tempfile.TemporaryDirectory(prefix="fastvid-tune-") as scratch:
        place = Path(folder or scratch)
        encoded, refused = _encode_all(sample, chosen, place, workers, limits)
        common = [source for source in sample if all(source.id in one.keys for one in encoded)]
        if not common:
            raise UsageError("no profile accepts any video of the sample", hint="; ".join(refused.values()) or None)
        corpora = [
            Corpus(one.folder, sampling, repeats, seed, CROP, _SHORT_SIDE, tuple(one.keys[s.id] for s in common))
            for one in encoded
        ]
        _LOG.info("decoding %d clips of each profile, %d rounds", len(corpora[0].requests), rounds)
        contenders = [fastvid(corpus, workers, product="planes", source="memory") for corpus in corpora]
        timings = measure(contenders, len(corpora[0].requests), rounds)
        measured = []
        for one, corpus, timing in zip(encoded, corpora, timings, strict=True):
            _LOG.info("comparing %s with its sources", one.profile.name)
            measured.append(_result(one, corpus, timing, common, len(sample), len(candidates), workers, limits))
    dataset = corpora[0].dataset
    lengths = [dataset[key] for key in corpora[0].keys or ()]
    return Study(
        videos=len(common),
        found=len(candidates),
        seconds=float(sum(video.num_frames / video.fps for video in lengths)),
        source_bytes=sum(source.size for source in common),
        sampling=sampling,
        workers=workers,
        seed=seed,
        measured=tuple(measured),
        refused=refused,
    )


def _encode_all(
    sample: Sequence[Source], profiles: Sequence[Profile], place: Path, workers: int, limits: Limits
) -> tuple[list[_EncodedSample], dict[str, str]]:
    build, encoded, refused = find_ffmpeg(), [], {}
    for profile in profiles:
        if not profile.runs_on(build):
            refused[profile.name] = f"{build.path} has no encoder {profile.encoder}"
            continue
        _LOG.info("encoding %d videos as %s", len(sample), profile.name)
        try:
            one = _encode(sample, profile, place / profile.name, workers, limits)
        except JobError as error:
            refused[profile.name] = error.message
            continue
        if len(one.keys) * 2 < len(sample):
            # All profiles are compared on their common videos; this one would leave too few.
            refused[profile.name] = f"it accepts only {len(one.keys)} of {len(sample)} videos"
            continue
        encoded.append(one)
    return encoded, refused


def _encode(sample: Sequence[Source], profile: Profile, out: Path, workers: int, limits: Limits) -> _EncodedSample:
    before = children_seconds()
    report = run_job(
        [source.path for source in sample], str(out), profile=profile, workers=workers, limits=limits, follow_links=True
    )
    spent = children_seconds() - before
    dataset = open_dataset(str(out))
    # Skip long videos, which become several samples: their clips would not be drawn from the whole video.
    whole = [(not row.get("parent"), row["source_id"], row["key"]) for row in dataset.annotations.to_pylist()]
    names = _names(sample)
    keys = {names[source_id]: key for entire, source_id, key in whole if entire}
    ledger = zip(*(report.ledger[name].to_pylist() for name in ("source_id", "seconds")), strict=True)
    seconds = {names[source_id]: taken for source_id, taken in ledger}
    return _EncodedSample(
        profile, str(out), spent, {reason.value: count for reason, count in report.rejected.items()}, seconds, keys
    )


def _names(sample: Sequence[Source]) -> dict[str, str]:
    """Map ids in the sample's own job, relative to its common folder, to ids among all sources."""
    common = os.path.commonpath([os.path.dirname(source.path) for source in sample])
    return {encode_name(os.path.relpath(source.path, common)): source.id for source in sample}


def _result(
    one: _EncodedSample,
    corpus: Corpus,
    timing: RoundTimes,
    common: Sequence[Source],
    sampled: int,
    videos: int,
    workers: int,
    limits: Limits,
) -> ProfileResult:
    dataset, build = corpus.dataset, find_ffmpeg()
    sizes: list[int] = []
    scores = []
    for source in common:
        data = corpus.mp4(dataset.find(one.keys[source.id]))
        sizes.append(len(data))
        if not one.profile.copies:
            scores.append(compare(build, one.profile, source.path, data, limits))
    # Scaled to the common videos by their share of the sample.
    spent = one.cpu_seconds * len(common) / sampled
    numbers, packets = timing.summary(), corpus.mean_packets()
    return ProfileResult(
        profile=one.profile.name,
        bytes=sum(sizes),
        encode_seconds=spent,
        ssim=mean([score[0] for score in scores]) if scores else None,
        psnr=mean([score[1] for score in scores]) if scores else None,
        clips_per_second=numbers["rate"],
        cpu_ms=numbers["cpu_ms"],
        packets=packets["planned"],
        packets_from_keys=packets["from_keys"],
        rejected=one.rejected,
        estimate=make_estimate(sizes, [one.seconds[source.id] for source in common], spent, videos, workers),
    )
