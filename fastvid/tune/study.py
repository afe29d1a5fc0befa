"""SSIM and PSNR of an encoded sample against its equally scaled source, by ffmpeg.

The measurements of `fastvid tune`: encode a sample with every profile, compare and time it.

Decoding is timed by the same code as in `python -m bench decode` (`fastvid.measure`): planned packets with their
checksums, decoded to YUV planes in the worker's buffer, like those that a loader copies to a device.

Recommend a profile, with reasons.
"""

from __future__ import annotations

import logging
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import ffmpeg

from fastvid.errors import JobError, SourceError, UsageError
from fastvid.media.ffmpeg import FfmpegBuild, Limits, environment, find_ffmpeg
from fastvid.media.probe import SourceInfo, open_source, probe
from fastvid.media.reasons import Reason
from fastvid.runtime.names import encode_name
from fastvid.runtime.processes import available_cores
from fastvid.runtime.values import size
from fastvid.sharding.encode.profiles import PROFILES, SWS_FLAGS, Profile, get_profile, input_options, picture_filters
from fastvid.sharding.job.estimate import SAMPLED, Estimate, children_seconds, draw_sources, make_estimate
from fastvid.sharding.job.job import run_job
from fastvid.sharding.sources.sources import Source
from fastvid.sharding.sources.tars import gather_sources
from fastvid.tune.measure import CROP, Corpus, RoundTimes, fastvid, measure, parse_sampling
from fastvid.videos.dataset import open as open_dataset

_SSIM: Final = re.compile(r"SSIM .*All:(\d\.\d+)")
_PSNR: Final = re.compile(r"PSNR .*average:(\d+\.\d+|inf)")
# Equal pictures have infinite PSNR; this finite value replaces it in means.
_MAX_PSNR: Final = 100.0


def compare(build: FfmpegBuild, profile: Profile, path: str, encoded: bytes, limits: Limits) -> tuple[float, float]:
    """Return SSIM (1 is equal) and PSNR in dB over all planes and frames.

    The sample must cover the whole source.
    """
    with open_source(path) as source, tempfile.TemporaryFile(prefix="fastvid-") as file:
        info = probe(source, limits)
        file.write(encoded)
        file.flush()
        url = f"file:/dev/fd/{file.fileno()}"
        seconds = 2 * limits.transcode_seconds(frames=info.timing.shown, pixels=info.width * info.height)
        try:
            done = subprocess.run(
                build_comparison(build, profile, info, source.url, url, limits),
                pass_fds=(source.descriptor, file.fileno()),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=seconds,
                env=environment(),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise SourceError(f"ffmpeg's comparison took longer than {seconds:.0f} s", reason=Reason.TIMEOUT) from error
    log = done.stderr.decode("utf-8", "replace")
    ssim, psnr = _SSIM.search(log), _PSNR.search(log)
    if done.returncode or ssim is None or psnr is None:
        raise SourceError(f"ffmpeg's comparison failed: {log.strip()[-200:]}", reason=Reason.ENCODE_FAILED, file=path)
    return float(ssim[1]), min(_MAX_PSNR, float(psnr[1])) if psnr[1] != "inf" else _MAX_PSNR


def build_comparison(
    build: FfmpegBuild, profile: Profile, info: SourceInfo, source_url: str, encoded_url: str, limits: Limits
) -> list[str]:
    """Return the ffmpeg command that prints SSIM and PSNR of an encoded source against its input."""
    source = ffmpeg.input(source_url, **input_options(build, info, limits))
    # Compare in limited range: all profiles but those of full-range codecs write it, and those are converted below.
    reference = picture_filters(build, replace(profile, codec="h264", crf=0), info, source["V:0"])
    encoded = ffmpeg.input(encoded_url, f="mov", protocol_whitelist="file", threads=1)["v:0"]
    if profile.full_range:
        encoded = encoded.filter("scale", flags=SWS_FLAGS, in_range="full", out_range="limited").filter(
            "format", "yuv420p"
        )
    # Pair frames by number, not by timestamp.
    pairs = [stream.filter("settb", "1/1000").filter("setpts", "N").split() for stream in (encoded, reference)]
    scores = [ffmpeg.filter([pairs[0][n], pairs[1][n]], name) for n, name in enumerate(("ssim", "psnr"))]
    command: list[str] = ffmpeg.merge_outputs(*(ffmpeg.output(score, "-", f="null") for score in scores)).get_args()
    return [build.path, "-nostdin", "-hide_banner", "-nostats", "-loglevel", "info", *command]


def mean(values: list[float]) -> float:
    """Return the mean of the values, NaN if there are none."""
    return sum(values) / len(values) if values else math.nan


_LOG = logging.getLogger(__name__)

VIDEOS: Final = SAMPLED
"""Videos in the sample. Ratios between profiles settle with fewer; this many keep unusual videos from dominating."""

_SHORT_SIDE: Final = 256  # short side in pixels that the crop of CROP pixels refers to


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """Measurements of one profile on the sample."""

    profile: str
    bytes: int  # size of all samples
    encode_seconds: float  # CPU seconds of all processes, including probing and verification
    ssim: float | None
    psnr: float | None
    clips_per_second: float  # clips per second of wall time with `workers` threads, median of the rounds
    cpu_ms: float  # CPU milliseconds per clip, median of the rounds
    packets: float
    packets_from_keys: float
    rejected: Mapping[str, int] = field(default_factory=dict)
    estimate: Estimate | None = None


@dataclass(frozen=True, slots=True)
class Study:
    """All measurements."""

    videos: int
    found: int
    seconds: float
    source_bytes: int
    sampling: str  # frames of a clip, see `fastvid.tune.measure.parse_sampling`
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

    `sampling`: frames of a clip, see `fastvid.tune.measure.parse_sampling`.
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


# An SSIM loss that is visible side by side; speed does not make up for it.
_MAX_SSIM_LOSS: Final = 0.03


@dataclass(frozen=True, slots=True)
class Advice:
    """A recommendation."""

    profile: str
    reasons: tuple[str, ...]


def recommend(study: Study, need: float | None = None) -> Advice:
    """Choose a profile.

    With a need, this is the smallest profile that is fast enough; without one, the profile with the lowest product of
    bytes and decode time: twice the speed is worth at most twice the bytes. Profiles whose SSIM is more than 0.03 below
    the best are excluded.

    `need`: clips per second that the workers must decode.
    """
    if not study.measured:
        raise UsageError("no profile was measured", hint="; ".join(study.refused.values()) or None)
    best = max((one.ssim for one in study.measured if one.ssim is not None), default=1.0)
    good = [one for one in study.measured if one.ssim is None or one.ssim >= best - _MAX_SSIM_LOSS]
    reasons = []
    if need is not None:
        enough = [one for one in good if one.clips_per_second >= need]
        chosen = min(enough, key=lambda one: one.bytes) if enough else max(good, key=lambda one: one.clips_per_second)
        reasons.append(
            f"{chosen.profile} is the smallest profile that decodes {need:g} clips per second here"
            if enough
            else f"no profile decodes {need:g} clips per second here; {chosen.profile} is the fastest"
        )
    else:
        chosen = min(good, key=_cost)
        reasons.append(
            f"{chosen.profile} has the lowest product of size and decode time: each faster profile is larger by a"
            " greater factor than it is faster, each smaller one is slower by a greater factor than it is smaller"
        )
    reasons += [_compare(chosen, other, study) for other in study.measured if other is not chosen]
    return Advice(chosen.profile, tuple(reasons))


def _cost(one: ProfileResult) -> float:
    return one.bytes * one.cpu_ms


def _compare(chosen: ProfileResult, other: ProfileResult, study: Study) -> str:
    speed, weight = chosen.cpu_ms / other.cpu_ms, other.bytes / chosen.bytes
    words = f"{other.profile}: {speed:.2f} times the clips per second, {weight:.2f} times the bytes"
    words += f" ({size(3600 * other.bytes / study.seconds)} per hour)"
    if other.ssim is not None and chosen.ssim is not None:
        words += f", SSIM {other.ssim - chosen.ssim:+.3f}"
    elif other.ssim is None:
        words += ", lossless: sizes, frame rates and colours are unchanged"
    return words
