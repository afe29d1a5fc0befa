"""Handles one video that is not encoded; runs in the workers of every engine.

The video is indexed, in a tar of another tool or where it is; or it is copied into a shard, unchanged or with its
packets in a new MP4.

Copies are proved like the tars of other tools (`fastvid.media.prove`): every frame must be the one that a player shows
for the source, and a stream whose parts do not decode alone is marked to be decoded from its start. What the index
needs but an MP4's tables do not contain is in the sample's JSON, so that the index can be made again from the tar
alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import pairwise
from math import ceil
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fastvid.errors import FormatError, SourceError
from fastvid.format.mp4 import index_mp4, read_track
from fastvid.format.packets import StreamInfo
from fastvid.format.presentation import frame_bounds
from fastvid.format.schema import PACKET_DTYPE, StreamFlag
from fastvid.format.writing import proved_info
from fastvid.media.checks import Promised, check_tables
from fastvid.media.describe import TONE_MAP, with_times
from fastvid.media.ffmpeg import Limits, contents
from fastvid.media.file_tables import FileReader
from fastvid.media.index_video import Proof, clip_seconds, cut_index, index_in_place, part_rate
from fastvid.media.probe import OpenSource
from fastvid.media.prove import IndexedVideo, Remuxer, index_video
from fastvid.media.reasons import Reason, unusable
from fastvid.media.timing import clip_frames
from fastvid.runtime import faults
from fastvid.runtime.names import encode_name
from fastvid.runtime.values import as_type, sha256
from fastvid.sharding.encode.profiles import Settings
from fastvid.sharding.sources.sources import Source
from fastvid.sharding.work.tasks import (
    EncodedSample,
    Outcome,
    Report,
    SourceTask,
    refuse_blocked,
    source_errors,
    stream_meta,
)
from fastvid.storage.protocol import Version

# How often the proof decodes the whole video, for the time limit: once as a player, once without the container, once by
# groups of pictures, and twice with packets left out.
_DECODES = 5
# Assumed mean size of a packet, to estimate the number of frames from the size of the file. Packets may be smaller, but
# then pictures are small too and decode fast.
_PACKET_BYTES = 1000


def pack_found(key: str, found: IndexedVideo) -> EncodedSample:
    """Return an index in the form in which a worker sends it to the job: as a sample whose streams are its arrays."""
    info = asdict(found.info)
    extradata, times = info.pop("extradata"), info.pop("times")
    meta = info | {"fps": str(found.info.fps), "pix_fmt": found.pix_fmt, "container": found.container}
    data = {"records": found.records.tobytes(), "extradata": extradata, "times": times["data"] if times else b""}
    return EncodedSample(key, meta, data)


def unpack_found(sample: EncodedSample) -> tuple[StreamInfo, npt.NDArray[np.void]]:
    """Return the stream and its PACKET_DTYPE records [P] from the result of `pack_found`."""
    meta, data = sample.meta, sample.streams
    told = {one.name: meta[one.name] for one in fields(StreamInfo) if one.name in meta}
    times = {"data": data["times"], "num_frames": sample.num_frames} if data["times"] else None
    told |= {"times": times, "extradata": data["extradata"]}
    info = as_type(told, StreamInfo, dec_hook=lambda kind, value: kind(value))
    if info.coded is not None:
        info.coded.check()
    return info, np.frombuffer(data["records"], PACKET_DTYPE)


def indexed_meta(source: Source, outcome: Outcome) -> dict[str, Any]:
    """Return the facts about the source of a video that was indexed where it is."""
    name, facts = encode_name(source.id), outcome.samples[0].meta
    return {"source_id": name, "source_sha256": outcome.source_sha256 or None, "pix_fmt": facts["pix_fmt"]}


def _read(task: SourceTask, most: int) -> bytes:
    assert task.member is not None
    size = task.member[1]
    if size > most:
        raise SourceError(f"video has {size} bytes, limit is {most}", reason=Reason.TOO_LONG)
    if not size:
        raise SourceError("the file has no bytes", reason=Reason.EMPTY)
    return task.read_member(task.member, "video")


# Time limit in seconds for the requests before the first packet is read: the tables may be anywhere in the file.
_ANSWER_SECONDS = 180.0


def index_clips(
    tasks: Sequence[SourceTask], settings: Settings, report: Report, begin: Callable[[Sequence[int]], None]
) -> Iterator[Outcome]:
    """Index clips of one file, or a video in a tar; yield the outcome of each. A bad source does not raise."""
    first, digest, size, version = tasks[0], "", 0, None
    limits, hdr, started = settings.limits, settings.profile.hdr, time.monotonic()
    begin([task.index for task in tasks])
    try:
        if first.member is not None:
            seconds = limits.transcode_seconds(frames=first.size // _PACKET_BYTES, pixels=0)
            report("index", first.patience * _DECODES * seconds)
            data = _read(first, limits.output_bytes)
            size, digest = len(data), sha256(data)
            refuse_blocked(digest, settings.blocked)
            found = index_video(data, limits, hdr=hdr)
        else:
            report("index", _ANSWER_SECONDS + first.patience * limits.read_seconds(first.size))
            file = _open(first)
            size, version = file.size, file.version
            report("index", _ANSWER_SECONDS + first.patience * limits.read_seconds(size))
            with source_errors(first):
                is_whole = settings.proof is Proof.ALL and size <= limits.output_bytes
                if is_whole or settings.hashed or settings.blocked:
                    digest = file.sha256()
                    refuse_blocked(digest, settings.blocked)
                found = index_in_place(file, limits, settings.proof or Proof.ALL, hdr=hdr)
    except (SourceError, MemoryError) as error:
        outcomes: Iterable[Outcome] = [task.failure(error) for task in tasks]
    else:
        cuts = (task.attempt(partial(_cut, task, found, version)) for task in tasks)
        outcomes = (replace(outcome, bytes_in=size) for outcome in cuts)
    share = (time.monotonic() - started) / len(tasks)
    for outcome in outcomes:
        yield replace(outcome, source_sha256=digest, seconds=outcome.seconds + share)


def _open(task: SourceTask) -> FileReader:
    """Open the file of a task."""
    with source_errors(task):
        faults.reach("source")
        file = FileReader.open(task.path)
    task.check_version(file.version, "the file")
    if not file.size:
        raise SourceError("the file has no bytes", reason=Reason.EMPTY)
    return file


def _cut(task: SourceTask, found: IndexedVideo, version: Version | None) -> Outcome:
    place, short = dict[str, object](), tuple[str, ...]()
    if task.frames is not None:
        found = cut_index(found, *task.frames)
    elif task.start is not None or task.end is not None:
        step = float(1 / found.info.fps)
        first, stop = clip_frames(found.seconds, step, task.start, task.end)
        short = task.cut_short(clip_seconds(found, 0, found.info.num_frames)[1] + step)
        place = task.place(*clip_seconds(found, first, stop - first))
        found = cut_index(found, first, stop - first)
    sample = pack_found(task.key, found)
    if version is not None:
        tag, modified = version.text
        place["version"] = {"size": version.size, "tag": tag, "modified": modified}
    meta = {**sample.meta, **place}
    return Outcome(task.index, (replace(sample, meta=meta),), warnings=(*found.notes, *short))


# Tolerance in seconds when comparing times, because containers round them to their time base.
_ROUNDING: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Copied:
    """A sample that was copied without encoding."""

    video: bytes
    place: tuple[float, float] | None  # where it begins and ends in the source, in seconds; None for the whole source
    found: IndexedVideo
    conforms: bool
    remuxed: bool

    @property
    def notes(self) -> tuple[str, ...]:
        """Why the stream does not conform to profiles; empty if it does."""
        return self.found.notes or (() if self.conforms else ("tables",))

    def meta(self) -> dict[str, Any]:
        """The fields of the sample's JSON about the stream."""
        facts = stream_meta(self.found.info, self.found.info.fps, self.found.pix_fmt, conforms=self.conforms)
        return facts | {"differs": list(self.notes), "proved": _proved(self.found)}


class CopiedSource:
    """A source that decodes without an error, from which parts are copied without encoding."""

    def __init__(self, source: OpenSource, limits: Limits, hdr: str = TONE_MAP) -> None:
        if source.size > limits.output_bytes:
            raise SourceError(f"video has {source.size} bytes, limit is {limits.output_bytes}", reason=Reason.TOO_LONG)
        self._data, self._container = contents(source.descriptor), source.container
        self._limits, self._hdr = limits, hdr
        self._remuxer: Remuxer | None = None

    def cut(
        self, start: float | None, end: float | None, *, max_seconds: float, frames: tuple[int, int] | None = None
    ) -> list[Copied]:
        """Copy the source, or a clip of it, in parts of at most `max_seconds` seconds.

        `start`, `end`: where the clip begins and ends in seconds; None for the start and end of the source. `frames`:
        the first frame of the clip and the number of frames, instead of seconds.
        """
        data, limits = self._data, self._limits
        if start is None and end is None and frames is None and self._container == "mov":
            found = _as_it_is(data, limits, self._hdr) if _seems_short(data, max_seconds) else None
            if found is not None and found.info.num_frames / found.info.fps <= max_seconds:
                return [Copied(data, None, found, _conforms(data, found), remuxed=False)]
        muxer = self._remuxer = self._remuxer or Remuxer(data, self._container, limits, self._hdr)
        played, shown, seconds, rate = muxer.played, muxer.shown, muxer.seconds, muxer.rate
        bounds, made = frame_bounds(seconds, 1 / float(rate)).tolist(), []
        if frames is not None:
            if sum(frames) > len(seconds):
                raise SourceError(
                    f"frames {frames[0]} to {sum(frames)} are not in a video of {len(seconds)}",
                    reason=Reason.OUT_OF_RANGE,
                )
            parts = iter([(frames[0], sum(frames))])
        else:
            parts = _ranges(seconds, 1 / float(rate), start, end, max_seconds)
        for first, last in parts:
            video = muxer.part(first, last)
            found = index_video(video, limits, hdr=self._hdr)
            # Use the size, range and matrix of the source, because the muxer does not write all properties of pictures,
            # and its rate, which times in the ticks of the MP4 only approximate.
            facts = {name: getattr(shown, name) for name in ("width", "height", "range", "matrix", "coded")}
            whole = last - first == len(seconds)
            own = rate if whole else part_rate(rate, last - first, bounds[last] - bounds[first])
            found = replace(found, info=with_times(replace(found.info, fps=own, **facts), found.times, found.tick))
            if list(found.digests) != played.digests[first:last] or not _agrees(video, found):
                raise unusable("its frames decode differently after remuxing to MP4")
            place = None if whole and start is None and end is None else (bounds[first], bounds[last])
            made.append(Copied(video, place, found, _conforms(video, found), remuxed=True))
        return made


def _ranges(
    seconds: npt.NDArray[np.float64], step: float, start: float | None, end: float | None, max_seconds: float
) -> Iterator[tuple[int, int]]:
    """Yield the frames of each part, half-open: as few parts as possible, of about equal numbers of frames.

    `seconds`: time of each frame, float64 [N]. `step`: duration of a frame in seconds.
    """
    first, last = clip_frames(seconds, step, start, end)
    count = max(1, ceil((seconds[last - 1] + step - seconds[first]) / max_seconds - _ROUNDING))
    yield from pairwise(first + (last - first) * number // count for number in range(count + 1))


def _seems_short(data: bytes, max_seconds: float) -> bool:
    """Return whether an MP4 lasts at most about `max_seconds` according to its header, or has no readable header.

    Checked first, because proving a video by decoding is expensive.
    """
    try:
        info, _ = index_mp4(data, whole=False)
    except FormatError:
        return True
    return info.num_frames / info.fps <= max_seconds + 1.0


def _as_it_is(data: bytes, limits: Limits, hdr: str) -> IndexedVideo | None:
    """Return the index of a source that can go into a shard unchanged; None if it must be remuxed."""
    try:
        found = index_video(data, limits, hdr=hdr)
    except SourceError as error:
        if error.reason == Reason.NO_INDEX:
            return None
        raise
    return found if _agrees(data, found) else None


def _agrees(video: bytes, found: IndexedVideo) -> bool:
    """Return whether the index made from an MP4 and its sample's JSON, as in a shard, is the one that was proved."""
    try:
        info, records = index_mp4(video, whole=bool(found.info.flags & StreamFlag.WHOLE), fps=found.info.fps)
        info = proved_info(info, _proved(found))
    except FormatError:
        return False
    return info == found.info and np.array_equal(records, found.records)


def _proved(found: IndexedVideo) -> dict[str, Any]:
    info = found.info
    return {
        "width": info.width,
        "height": info.height,
        "color_range": info.range.name.lower(),
        "color_matrix": info.matrix.name.lower(),
        "whole": bool(info.flags & StreamFlag.WHOLE),
        **({} if info.coded is None else {"coded": asdict(info.coded)}),
    }


def _conforms(video: bytes, found: IndexedVideo) -> bool:
    return not found.notes and not list(check_tables(Promised.of(read_track(memoryview(video)), found.info)))
