"""Salvage a damaged video: cut out its longest run of frames without damage, from a key frame on.

At a key frame that begins a closed group of pictures (GOP) a decoder discards everything before it, and no packet
depends on a later one. So the packets from such a key frame until damage decode as in the undamaged video. They are
written to a temporary file in the same container, which is then encoded and verified like any other source. There are
two signs of damage:

- The file ends early. What it contains is good, in every codec whose key frames `RandomAccess` proves.
- The decoder reports an error for a packet, or does not return a frame for each packet of a GOP. This is relied on for
  H.264 only. In an experiment, bits in GOPs were flipped or bytes zeroed: the decoder returned wrong frames without an
  error for 4 to 7 % of these GOPs in H.264, but for 28 to 36 % in H.265 and 95 to 98 % in VP9.

The run ends so that no kept frame is shown after a lost one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import Any, Final

import av
import numpy as np
from av.container import InputContainer
from av.video.stream import VideoStream

from fastvid.errors import SourceError, UsageError
from fastvid.format.schema import Codec
from fastvid.media.container import ffmpeg_message, fraction, open_demuxer, video_stream
from fastvid.media.ffmpeg import Limits, is_full, no_space, temporary_file
from fastvid.media.probe import OpenSource, SourceInfo, probe
from fastvid.media.prove import decode_times
from fastvid.media.reasons import Reason
from fastvid.media.timing import RandomAccess

SALVAGEABLE: Final = frozenset({Reason.TRUNCATED, Reason.DAMAGED})
"""Reasons for which a source may be salvaged."""

# Demuxers whose timestamps a muxer can write unchanged, and that muxer.
_MUXERS: Final = {"mov": "mp4", "matroska": "matroska"}
# Kinds of timing, by container, that prove that no frame is missing inside a run: MP4's tables list all packets; in
# Matroska a lost packet leaves a hole, so the rate must be constant.
_KINDS: Final = {"mov": ("constant", "gaps", "variable"), "matroska": ("constant",)}
# Seconds of sound to keep before the first frame, because audio decoders need some packets to start.
_SOUND_BEFORE: Final = Fraction(1, 10)
# Ticks of an edit list per second, for the offset between picture and sound.
_MOVIE_TICKS: Final = 90_000


@dataclass(frozen=True, slots=True)
class Salvaged:
    """What is kept of a damaged source."""

    source: OpenSource
    info: SourceInfo
    # seconds from the first frame of the damaged source to the first frame of the temporary file; a whole number of
    # frames at the rate of `info`.
    begins: Fraction
    stated: int  # number of frames of the undamaged source, according to its header
    bad_frames: int

    @property
    def note(self) -> str:
        """A note for the ledger: how many frames are kept, and from when to when."""
        ends = float(self.begins + self.info.timing.frames / self.info.timing.rate)
        kept = f"{self.info.timing.shown} of {self.stated} frames, {float(self.begins):.2f} s to {ends:.2f} s"
        return f"kept the longest run without damage: {kept}"

    def check(self, limit: str) -> None:
        """Raise SourceError if more frames are left out than `limit` allows, see `allowed_frames`."""
        allowed = allowed_frames(limit, self.stated)
        if self.bad_frames > allowed:
            raise _refused(
                f"{self.bad_frames} of {self.stated} frames would be left out and max_bad_frames allows {allowed};"
                " raise --max-bad-frames to keep the others"
            )


def allowed_frames(limit: str, stated: int) -> int:
    """Return how many frames of a source may be left out.

    `limit`: a number of frames such as "100", or a percentage such as "2.5%". `stated`: number of frames of the
    undamaged source.
    """
    number, percent = limit.removesuffix("%"), limit.endswith("%")
    try:
        value = Fraction(number) if percent else Fraction(int(number))
        if value < 0 or (percent and value > 100):
            raise ValueError
    except (ValueError, ZeroDivisionError) as error:
        raise UsageError(
            f"max_bad_frames is {limit!r}", hint="use a number of frames such as 100, or a percentage such as 5%"
        ) from error
    return int(value * stated / 100) if percent else int(value)


def longest_run(gops: Sequence[tuple[int, int]]) -> range:
    """Return the packets of the longest run without damage, the first of equally long ones; empty if there is none.

    A run consists of undamaged GOPs and the good packets at the start of the next GOP. `gops`: for each GOP, the number
    of its packets, and of good packets at its start.
    """
    longest, first, at = range(0), 0, 0
    for packets, good in gops:
        longest = max(longest, range(first, at + good), key=len)
        at += packets
        if good < packets:
            first = at
    return longest


def clean_cut(times: Sequence[int], most: int) -> int:
    """Return the largest n, at most `most`, for which the first n packets are shown before all others.

    `times`: presentation times of the packets, in decode order.
    """
    latest = np.maximum.accumulate(np.asarray(times, np.int64))
    earliest = np.minimum.accumulate(np.asarray(times[::-1], np.int64))[::-1]
    clean = np.flatnonzero(latest[:-1] < earliest[1:]) + 1
    return int(max(clean[clean <= most], default=0))


@contextmanager
def salvage(
    source: OpenSource, limits: Limits, *, truncated: bool, sound: bool, report: Callable[[float], None]
) -> Iterator[Salvaged]:
    """Cut the longest run without damage out of a damaged source.

    `truncated`: whether bytes are missing at its end. `report`: called with the seconds that the decode of the
    source may take.
    """
    seen = probe(source, limits, whole=False)
    if source.container not in _MUXERS:
        raise _refused(f"packets in {source.container} cannot be located after damage")
    if seen.codec != Codec.H264.label and not truncated:
        raise _refused(f"decoders do not report all damage in {seen.codec}")
    # A deinterlaced frame depends on its neighbours, and decoding H.264 4:4:4 on the x264 version in the first packet.
    if seen.interlaced or "444" in seen.pix_fmt:
        raise _refused("interlaced and 4:4:4 video does not decode from every key frame as from the first")
    report(limits.transcode_seconds(frames=seen.timing.shown, pixels=seen.width * seen.height))
    # The run may end inside a GOP only at a constant rate, at which a missing frame would leave a hole.
    found = _Search(source, truncated=truncated, inside=seen.timing.kind == "constant")
    if not found.run:
        raise _refused("no group of pictures begins without damage")
    with temporary_file() as file:
        _write(source, found, f"/dev/fd/{file.fileno()}", sound=sound)
        part = OpenSource(file.fileno(), os.fstat(file.fileno()).st_size, source.container, private=True)
        info = probe(part, limits)
        if info.timing.kind not in (("constant",) if found.is_inside else _KINDS[source.container]):
            raise _refused("frames may be missing between those that decode")
        if replace(seen, timing=info.timing, time_base=info.time_base, others=info.others) != info:
            raise _refused("its picture parameters are lost in another file")
        rate = info.timing.rate
        begins = round((found.start - int(seen.times[0])) * seen.time_base * rate) / rate
        yield Salvaged(part, info, begins, found.stated, max(0, found.stated - info.timing.shown))


class _Search:
    """Reads all packets of a damaged source's video, and finds the longest run without damage.

    `inside`: whether the run may end inside a GOP. Attributes: `stated`, the number of frames of the undamaged source;
    `run`, the packets of the run; `is_inside`, whether it ends inside a GOP; `times` of its packets, and their minimum
    `start`, in ticks.
    """

    def __init__(self, source: OpenSource, *, truncated: bool, inside: bool) -> None:
        times: list[int | None] = []
        gops: list[_Gop] = []
        with open_demuxer(source.url, source.container) as container:
            stream = video_stream(container)
            try:
                for packet in container.demux(stream):
                    if not packet.size:
                        continue
                    if packet.is_keyframe or not gops:
                        if gops:
                            gops[-1].end()
                        gops.append(_Gop(source.container, stream))
                    gops[-1].add(packet)
                    times.append(packet.pts)
            except av.FFmpegError:
                truncated = True
            gops[-1].end()
            self.stated = _stated(container, stream, times) if truncated else max(len(times), stream.frames)
        # If packets are missing at the end, the last GOP is incomplete.
        if truncated or len(times) != self.stated:
            gops[-1].mark(gops[-1].packets)
        self.run = longest_run([(gop.packets, gop.good if inside or gop.is_whole else 0) for gop in gops])
        self.is_inside = self.run.stop not in accumulate(gop.packets for gop in gops)
        self.times = [time for time in times[self.run.start : self.run.stop] if time is not None]
        self.start = min(self.times, default=0)


class _Gop:
    """One group of pictures: its packets until the next key frame, in decode order."""

    def __init__(self, container: str, stream: VideoStream) -> None:
        context = stream.codec_context
        name, extradata = context.codec.canonical_name, bytes(context.extradata or b"")
        self.packets, self.is_whole = 0, True
        self._before = 0  # packets before the first sign of damage
        self._read = 0  # packets whose headers were read
        self._context = context if name == Codec.H264.label else None
        self._access = RandomAccess(container, name, extradata)
        self._times: list[int] = []
        self._frames = 0

    def add(self, packet: Any) -> None:
        """Take the next packet."""
        self._times.append(packet.pts or 0)
        # Packets that an edit list hides count as damaged, because the temporary file would show them.
        if packet.is_corrupt or packet.is_discard or packet.pts is None:
            self.mark(self.packets)
        self._decode(packet)
        if self.is_whole:
            self._read += 1
            if not self._access.add(packet):
                self.mark(self.packets)
        self.packets += 1

    def end(self) -> None:
        """Finish the group after its last packet: mark it as damaged from its start if decoding cannot begin there."""
        self._decode(None)
        times = np.sort(np.asarray(self._times[: self._read], np.int64))
        begins = self._read > 0 and len(self._access.keys(times, self._read)) == 1
        if self._context is not None:
            self._context.flush_buffers()
            # If frames are missing without any error, the damage may be anywhere in the group.
            begins &= self._frames == self.packets or not self.is_whole
        if not begins:
            self.mark(0)

    @property
    def good(self) -> int:
        """Number of packets at the group's start that are free of damage and shown before all its other packets."""
        return self.packets if self.is_whole else clean_cut(self._times, self._before)

    def mark(self, packet: int) -> None:
        """Note that a packet is damaged or missing, by its number in the group."""
        self._before = packet if self.is_whole else min(self._before, packet)
        self.is_whole = False

    def _decode(self, packet: Any) -> None:
        if self._context is None:
            return
        try:
            frames = self._context.decode(packet)
        except av.FFmpegError:
            self.mark(self.packets)
            return
        self._frames += len(frames)
        for frame in frames:
            if frame.is_corrupt:
                self.mark(self._times.index(frame.pts) if frame.pts in self._times else 0)


def _packets(container: InputContainer, streams: Sequence[int]) -> Iterator[Any]:
    """Yield the packets of some streams, as far as they can be read."""
    with suppress(av.FFmpegError):
        yield from (
            packet for packet in container.demux([container.streams[index] for index in streams]) if packet.size
        )


def _stated(container: InputContainer, stream: VideoStream, times: Sequence[int | None]) -> int:
    """Return how many frames a truncated video had before, according to the header's count or duration."""
    rate, tick = fraction(stream.average_rate), fraction(stream.time_base)
    last = max((time for time in times if time is not None), default=0)
    lost = 0
    if not stream.frames and container.duration and rate and tick:
        lost = round((Fraction(container.duration, av.time_base) - last * tick) * rate) - 1
    return max(len(times) + lost, stream.frames, len(times))


def _write(source: OpenSource, found: _Search, target: str, *, sound: bool) -> None:
    """Write the packets of the run, and the sound during it, with times that begin at 0."""
    decoded = decode_times([time - found.start for time in found.times])
    with open_demuxer(source.url, source.container) as container:
        picture = video_stream(container)
        tick = fraction(picture.time_base) or Fraction(1, 1000)
        begins, ends = found.start * tick, max(found.times) * tick
        kept = [picture, *(container.streams.audio[:1] if sound else [])]
        options = {"fflags": "+bitexact"}
        if source.container == "mov":
            options["movie_timescale"] = str(_MOVIE_TICKS)
        try:
            with av.open(target, "w", format=_MUXERS[source.container], container_options=options) as muxer:
                made: dict[int, Any] = {}
                for one in kept:
                    made[one.index] = muxer.add_stream_from_template(one, opaque=True)
                    made[one.index].time_base = one.time_base
                number = -1
                for packet in _packets(container, list(made)):
                    at = packet.pts
                    if packet.stream_index == picture.index:
                        number += 1
                        if number not in found.run:
                            continue
                        packet.pts, packet.dts = at - found.start, decoded[number - found.run.start]
                    else:
                        base = Fraction(packet.time_base)
                        if packet.is_corrupt or at is None or not begins - _SOUND_BEFORE <= at * base < ends:
                            continue
                        packet.pts = packet.dts = at - round(begins / base)
                    packet.stream = made[packet.stream_index]
                    muxer.mux_one(packet)
        except (av.FFmpegError, ValueError) as error:
            if isinstance(error, OSError) and is_full(error):
                raise no_space(error) from error
            raise _refused(f"the packets that decode cannot be copied: {ffmpeg_message(error)}") from error


def _refused(why: str) -> SourceError:
    return SourceError(f"not salvaged: {why}", reason=Reason.DAMAGED)
