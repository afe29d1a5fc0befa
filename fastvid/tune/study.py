"""The study of `fastvid tune`: encode a sample with every profile, compare, time, and recommend one with reasons.

Quality is SSIM and PSNR against the source scaled to the same size, by ffmpeg. Decoding is timed by the same code as in
`python -m bench decode`: it includes the checksums of the packets, and its output are YUV planes in the worker's
buffer, as in a loader that converts colours on a GPU.
"""

from __future__ import annotations

import logging
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import ffmpeg

from fastvid.errors import JobError, MissingDependency, SourceError, UsageError
from fastvid.media.ffmpeg import FfmpegBuild, Limits, environment, find_ffmpeg
from fastvid.media.probe import SourceInfo, open_source, probe
from fastvid.media.reasons import Reason
from fastvid.runtime.names import decode_name
from fastvid.runtime.processes import available_cores
from fastvid.runtime.values import count, duration, size, things
from fastvid.sharding.encode.profiles import PROFILES, SWS_FLAGS, Profile, get_profile, input_options, picture_filters
from fastvid.sharding.job.estimate import SAMPLED, Estimate, children_seconds, draw_sources, make_estimate
from fastvid.sharding.job.job import EncodeShards, choose_settings, run
from fastvid.sharding.job.plan import SAMPLES_PER_SHARD
from fastvid.sharding.job.run import How
from fastvid.sharding.sources.sources import Source, SourceList
from fastvid.sharding.sources.tars import gather_sources
from fastvid.storage import open_storage
from fastvid.tune.measure import CROP, Corpus, RoundTimes, fastvid, measure, parse_sampling
from fastvid.videos.dataset import open as open_dataset

_SSIM: Final = re.compile(r"SSIM .*All:(\d\.\d+)")
_PSNR: Final = re.compile(r"PSNR .*average:(\d+\.\d+|inf)")
# Equal pictures have infinite PSNR; this finite value replaces it in means.
_MAX_PSNR: Final = 100.0


def compare(build: FfmpegBuild, profile: Profile, path: str, encoded: bytes, limits: Limits) -> tuple[float, float]:
    """Return SSIM (1 is equal) and PSNR in dB, at most 100, over all planes and frames.

    `path`: file of the source. `encoded`: MP4 of the whole source, not of a part of it.
    """
    log = comparison(build, profile, path, encoded, limits)
    ssim, psnr = _SSIM.search(log), _PSNR.search(log)
    if ssim is None or psnr is None:
        raise SourceError(f"ffmpeg's comparison failed: {log.strip()[-200:]}", reason=Reason.ENCODE_FAILED, file=path)
    return float(ssim[1]), min(_MAX_PSNR, float(psnr[1])) if psnr[1] != "inf" else _MAX_PSNR


def comparison(build: FfmpegBuild, profile: Profile, path: str, encoded: bytes, limits: Limits) -> str:
    """Return what ffmpeg prints when it compares an encoded source with its input, see `build_comparison`."""
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
    if done.returncode:
        raise SourceError(f"ffmpeg's comparison failed: {log.strip()[-200:]}", reason=Reason.ENCODE_FAILED, file=path)
    return log


def build_comparison(
    build: FfmpegBuild, profile: Profile, info: SourceInfo, source_url: str, encoded_url: str, limits: Limits
) -> list[str]:
    """Return the ffmpeg command that prints SSIM and PSNR of an encoded source against its input."""
    source = ffmpeg.input(source_url, **input_options(build, info, limits))
    # Compare in limited colour range: all profiles write it, except those of full-range codecs, converted below.
    reference = picture_filters(build, replace(profile, codec="h264", crf=0), info, source["V:0"])
    encoded = ffmpeg.input(encoded_url, f="mov", protocol_whitelist="file", threads=1)["v:0"]
    if profile.full_range:
        encoded = encoded.filter("scale", flags=SWS_FLAGS, in_range="full", out_range="limited").filter(
            "format", "yuv420p"
        )
    # Set timestamps to frame numbers, because the filters pair frames by timestamp.
    pairs = [stream.filter("settb", "1/1000").filter("setpts", "N").split() for stream in (encoded, reference)]
    scores = [ffmpeg.filter([pairs[0][n], pairs[1][n]], name) for n, name in enumerate(("ssim", "psnr"))]
    command: list[str] = ffmpeg.merge_outputs(*(ffmpeg.output(score, "-", f="null") for score in scores)).get_args()
    return [build.path, "-nostdin", "-hide_banner", "-nostats", "-loglevel", "info", *command]


_LOG = logging.getLogger(__name__)

VIDEOS: Final = SAMPLED
"""Number of videos in the sample. Ratios between profiles are stable with fewer; this many keep unusual videos from
dominating."""

_VISITS: Final = 2  # how often each video of the sample is decoded, with other frames and crops
_SHORT_SIDE: Final = 256  # short side in pixels that the crop of CROP pixels refers to


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """Measurements of one profile on the sample."""

    profile: str
    bytes: int  # size of all samples
    encode_seconds: float  # CPU seconds of all processes, including probing and verification
    ssim: float | None  # mean over the videos, 1 is equal; None if the profile copies streams
    psnr: float | None  # mean in dB; None like `ssim`
    clips_per_second: float  # clips per second of wall time with `workers` threads, median of the rounds
    cpu_ms: float  # CPU milliseconds per clip, median of the rounds
    packets: float  # mean number of packets decoded per clip
    packets_from_keys: float  # the same without a decode plan, see `Corpus.mean_packets`
    rejected: Mapping[str, int] = field(default_factory=dict)  # number of rejected videos by reason
    estimate: Estimate | None = None  # of the time and size of sharding all videos


@dataclass(frozen=True, slots=True)
class Study:
    """All measurements."""

    videos: int  # number of videos measured: those of the sample that all profiles accept
    found: int  # number of videos that the sample was drawn from
    seconds: float  # total length of the measured videos
    source_bytes: int  # total size of their files
    sampling: str  # frames of a clip, see `fastvid.tune.measure.parse_sampling`
    workers: int
    seed: int
    measured: tuple[ProfileResult, ...]
    refused: Mapping[str, str]  # reasons why profiles were not measured, by name


@dataclass(slots=True)
class _EncodedSample:
    """The videos of the study, encoded with one profile as a dataset."""

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
    workers: int | None = None,
    folder: str | None = None,
    follow_links: bool = False,
) -> Study:
    """Measure profiles on a sample of videos.

    `sampling`: frames of a clip, see `fastvid.tune.measure.parse_sampling`.
    """
    parse_sampling(sampling)
    chosen = list(map(get_profile, profiles))
    if videos < 1 or rounds < 1 or not chosen:
        raise UsageError(f"{videos} videos, {rounds} rounds, {len(chosen)} profiles: each must be at least 1")
    every = gather_sources(list(sources), follow_links=follow_links)
    candidates = [source for source in every.sources if source.problem is None]
    if not candidates or any(source.member is not None for source in candidates):
        raise UsageError("no video file found to measure", file=", ".join(sources), hint="name a folder of videos")
    sample = draw_sources(candidates, videos, seed)
    workers = workers or available_cores()
    with tempfile.TemporaryDirectory(prefix="fastvid-tune-") as scratch:
        place = Path(folder or scratch)
        if taken := [one.name for one in chosen if (place / one.name).exists()]:
            # A job there would be resumed, and take no time to encode.
            raise UsageError("encoded samples are here already", file=str(place / taken[0]), hint="name another folder")
        drawn = SourceList(tuple(sample), every.classes, {})
        encoded, refused = _encode_all(drawn, chosen, place, workers)
        common = [source for source in sample if all(source.id in one.keys for one in encoded)]
        if not encoded or not common:
            raise UsageError("no profile accepts any video", hint="; ".join(dict.fromkeys(refused.values())) or None)
        corpora = [
            Corpus(one.folder, sampling, _VISITS, seed, CROP, _SHORT_SIDE, tuple(one.keys[s.id] for s in common))
            for one in encoded
        ]
        _LOG.info("decoding %d clips of each profile, %d rounds", len(corpora[0].requests), rounds)
        contenders = [fastvid(corpus, workers, product="planes", source="memory") for corpus in corpora]
        timings = measure(contenders, len(corpora[0].requests), rounds)
        measured = []
        for one, corpus, timing in zip(encoded, corpora, timings, strict=True):
            _LOG.info("comparing %s with its sources", one.profile.name)
            measured.append(_result(one, corpus, timing, common, len(sample), len(candidates), workers))
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
    sample: SourceList, profiles: Sequence[Profile], place: Path, workers: int
) -> tuple[list[_EncodedSample], dict[str, str]]:
    build, encoded, refused = find_ffmpeg(), [], {}
    for profile in profiles:
        if not profile.runs_on(build):
            refused[profile.name] = f"{build.path} has no encoder {profile.encoder}"
            continue
        _LOG.info("encoding %d videos as %s", len(sample.sources), profile.name)
        try:
            one = _encode(sample, profile, place / profile.name, workers)
        except (JobError, MissingDependency) as error:
            refused[profile.name] = error.message if isinstance(error, JobError) else str(error)
            continue
        if len(one.keys) * 2 < len(sample.sources):
            # Profiles are compared on the videos that all of them accept; with this profile they would be too few.
            refused[profile.name] = f"it accepts only {len(one.keys)} of {len(sample.sources)} videos"
            continue
        encoded.append(one)
    return encoded, refused


def _encode(sample: SourceList, profile: Profile, out: Path, workers: int) -> _EncodedSample:
    storage, settings = open_storage(str(out)), choose_settings(profile)
    work = EncodeShards(storage, sample, settings, samples_per_shard=SAMPLES_PER_SHARD)
    before = children_seconds()
    report = run(storage, How(workers=workers), lambda: work)
    spent = children_seconds() - before
    # Skip long videos, which become several samples: their clips would not be drawn from the whole video.
    rows = open_dataset(str(out)).annotations.to_pylist()
    keys = {decode_name(row["source_id"]): row["key"] for row in rows if not row.get("parent")}
    seconds = {decode_name(row["source_id"]): row["seconds"] for row in report.ledger.to_pylist()}
    rejected = {reason.value: number for reason, number in report.rejected.items()}
    return _EncodedSample(profile, str(out), spent, rejected, seconds, keys)


def _result(
    one: _EncodedSample,
    corpus: Corpus,
    timing: RoundTimes,
    common: Sequence[Source],
    sampled: int,
    videos: int,
    workers: int,
) -> ProfileResult:
    dataset, build = corpus.dataset, find_ffmpeg()
    sizes: list[int] = []
    scores = []
    for source in common:
        data = corpus.mp4(dataset.find(one.keys[source.id]))
        sizes.append(len(data))
        if not one.profile.copies:
            scores.append(compare(build, one.profile, source.path, data, Limits()))
    # The CPU time of the whole sample, scaled to the videos that all profiles accept.
    spent = one.cpu_seconds * len(common) / sampled
    numbers, packets = timing.summary(), corpus.mean_packets()
    return ProfileResult(
        profile=one.profile.name,
        bytes=sum(sizes),
        encode_seconds=spent,
        ssim=sum(score[0] for score in scores) / len(scores) if scores else None,
        psnr=sum(score[1] for score in scores) / len(scores) if scores else None,
        clips_per_second=numbers["rate"],
        cpu_ms=numbers["cpu_ms"],
        packets=packets["planned"],
        packets_from_keys=packets["from_keys"],
        rejected=one.rejected,
        estimate=make_estimate(sizes, [one.seconds[source.id] for source in common], spent, videos, workers),
    )


# An SSIM loss that is visible side by side; speed does not make up for it.
_MAX_SSIM_LOSS: Final = 0.03


def recommend(study: Study, need: float | None = None) -> tuple[str, list[str]]:
    """Choose a profile; return its name and the reasons as sentences.

    `need`: clips per second that the workers must decode. If given, the smallest profile that is fast enough is chosen,
    or the fastest if none is; if None, the profile with the lowest product of bytes and decode time: twice the speed is
    worth at most twice the bytes. Profiles whose SSIM is more than 0.03 below the best are excluded.
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
        chosen = min(good, key=lambda one: one.bytes * one.cpu_ms)
        reasons.append(
            f"{chosen.profile} has the lowest product of size and decode time: each faster profile is larger by a"
            " greater factor than it is faster, each smaller one is slower by a greater factor than it is smaller"
        )
    reasons += [_compare(chosen, other, study) for other in study.measured if other is not chosen]
    return chosen.profile, reasons


def _compare(chosen: ProfileResult, other: ProfileResult, study: Study) -> str:
    speed, weight = chosen.cpu_ms / other.cpu_ms, other.bytes / chosen.bytes
    words = f"{other.profile}: {speed:.2f} times the clips per second, {weight:.2f} times the bytes"
    words += f" ({size(3600 * other.bytes / study.seconds)} per hour)"
    if other.ssim is not None and chosen.ssim is not None:
        words += f", SSIM {other.ssim - chosen.ssim:+.3f}"
    elif other.ssim is None:
        words += ", lossless: sizes, frame rates and colours are unchanged"
    return words


def _row(one: ProfileResult, seconds: float) -> dict[str, str]:
    """Return the table cells of a profile by column head; `seconds`: total length of the measured videos."""
    return {
        "profile": one.profile,
        "size": size(one.bytes),
        "an hour": size(3600 * one.bytes / seconds),
        "encode CPU s/min": f"{60 * one.encode_seconds / seconds:.1f}",
        "SSIM": "-" if one.ssim is None else f"{one.ssim:.4f}",
        "PSNR dB": "-" if one.psnr is None else f"{one.psnr:.2f}",
        "clips/s": f"{one.clips_per_second:.0f}",
        "CPU ms/clip": f"{one.cpu_ms:.2f}",
        "packets": f"{one.packets:.1f} of {one.packets_from_keys:.1f}",
    }


def render(study: Study, recommended: str, reasons: Sequence[str]) -> str:
    """Return the study, the recommended profile and the reasons as text for a terminal."""
    rows = [_row(one, study.seconds) for one in study.measured]
    body = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*body, strict=True)]
    lines = [
        f"{things(study.videos, 'video')} of {count(study.found)}, {duration(study.seconds)},"
        f" {size(study.source_bytes)} of sources; clips {study.sampling}, {things(study.workers, 'worker')}",
        "",
    ]
    for row in body:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells))
    lines += ["", *(f"{one.profile}: {one.estimate.sentence()}" for one in study.measured if one.estimate)]
    for one in study.measured:
        if one.rejected:
            what = ", ".join(f"{number} {reason}" for reason, number in one.rejected.items())
            lines.append(f"{one.profile} rejects {what}")
    lines += [f"{name} was not measured: {why}" for name, why in study.refused.items()]
    lines += ["", f"recommended: {recommended}", *(f"  {reason}" for reason in reasons)]
    return "\n".join(lines)
