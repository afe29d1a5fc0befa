"""The PyAV back-end: decodes planned packets with libavcodec to cropped planes or finished RGB.

These rules make it exact and fast; for each rule about exactness, a test shows what goes wrong without it:

- A codec context stays open between clips, is drained and flushed after each, and is discarded after any error, and
  after packets that changed its parameter sets: otherwise the next clip can be wrong without an error.
- Neighbouring clips whose packets are all key packets, with the same extradata, are decoded in one pass as if they were
  one clip. If anything is unusual, they are decoded again one by one, so that the error names the right clip.
- `thread_count=1`: parallelism is across clips. `strict=1`: otherwise libavcodec guesses the reorder depth of streams
  that do not signal it, and drops pictures.
- Extradata is set before a context opens, never after: libavcodec ignores a later change.
- Packets are views into the clip's buffer, which ends with 64 bytes of padding: PyAV neither copies nor pads them.
- Frames are copied as soon as they are decoded, while they are in the CPU cache: copying later costs 6 to 11 %.
- Every decoded frame must belong to a packet that was fed, in display order and undamaged, and none may be missing.

CPU time of a clip of 8 frames, cropped to 224x224, mean over 48 real videos of 256 lines, one thread (milliseconds;
all-intra H.264, and `compact` in brackets): libavcodec 1.78 (5.04); PyAV's objects 0.04 (0.06); checks, views and
copies of planes 0.11 (0.24), or checks and RGB 0.17 (0.30). docs/performance.md lists every step and what was tried.

`Recutter` cuts several clips from frames decoded once, each identical to decoding it by itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, starmap
from operator import add
from typing import Any, Final

import av
import numpy as np
from av.codec.context import CodecContext
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame

from fastvid.decode.request import (
    Box,
    ClipRequest,
    DecoderOutput,
    EncodedClip,
    Levels,
    Planes,
    Rgb,
    check_order,
    first_places,
    repeat_frames,
)
from fastvid.decode.swscale import COLORSPACE, RgbConverter
from fastvid.decode.upright import ThreadDecoder
from fastvid.errors import DecodeError, FastvidError, UsageError
from fastvid.format.bitstream import changes_parameters
from fastvid.format.packets import StreamInfo
from fastvid.format.schema import Codec, StreamFlag

# libavcodec's native "av1" decoder requires hardware.
_DECODER: Final = {codec: "libdav1d" if codec is Codec.AV1 else codec.label for codec in Codec}

# Codecs whose decoders start at any packet and conceal missing references without an error.
_CONCEALING: Final = frozenset({Codec.H264, Codec.HEVC})

# Codecs whose key packets restore all that earlier packets set: RFC 6386 (9.3), VP9 bitstream specification (8.4.2).
_RESTARTED: Final = frozenset({Codec.VP8, Codec.VP9})
# Codecs whose packets are searched for parameter sets. What packets of other codecs change is not known.
_SEARCHED: Final = frozenset({Codec.H264, Codec.HEVC, Codec.AV1})
_CONFORMS: Final = int(StreamFlag.CONFORMS)

_FORMATS_420: Final = frozenset({"yuv420p", "yuvj420p"})

_ContextKey = tuple[Codec, bytes, int, int]

Write = Callable[[VideoFrame, int], None]
"""Copies or converts a frame to an index of the output; the frame is 8-bit 4:2:0, except for `Levels`."""


class PyAvDecoder(ThreadDecoder):
    """Decodes clips in order on the calling thread, with libavcodec."""

    NAME = "PyAvDecoder"  # libavcodec crashes if two threads use one context
    max_clips: Final = 32
    outputs = frozenset({Planes, Levels, Rgb})

    def __init__(self, *, max_contexts: int = 32) -> None:
        if max_contexts < 1:
            raise UsageError(f"max_contexts is {max_contexts}, must be at least 1")
        super().__init__()
        self._max_contexts = max_contexts
        self._contexts: OrderedDict[_ContextKey, VideoCodecContext] = OrderedDict()
        # Streams for which decoding in one pass failed, though each clip decodes without an error.
        self._one_by_one: set[_ContextKey] = set()
        self._converter = RgbConverter()

    def give(self, clip: EncodedClip, write: Write) -> None:
        """Decode a clip, but call `write` with each frame in the decoder's pixel format; raises DecodeError."""
        self._run(clip, first_places(clip.request.frames.tolist()), write, as_coded=True)

    def _release(self) -> None:
        self._contexts.clear()
        self._converter = RgbConverter()

    def _decode_all(self, clips: Sequence[EncodedClip], outputs: Sequence[DecoderOutput]) -> list[FastvidError | None]:
        errors = list[FastvidError | None]()
        for key, pairs in groupby(zip(clips, outputs, strict=True), key=_key_of_keys):
            group = list(pairs)
            if len(group) > 1 and key is not None and key not in self._one_by_one:
                if self._decode_together(key, group):
                    errors += [None] * len(group)
                    continue
                found = list(starmap(self._decode, group))
                if not any(found):
                    self._one_by_one.add(key)
                errors += found
            else:
                errors += starmap(self._decode, group)
        return errors

    def _decode_together(self, key: _ContextKey, group: Sequence[tuple[EncodedClip, DecoderOutput]]) -> bool:
        """Decode clips of key packets in one pass; return False if any frame was not as expected."""
        packets, shown, written = list[Any](), list[tuple[int, int]](), list[dict[int, int]]()
        for number, (clip, _) in enumerate(group):
            data: Any = clip.data  # PyAV takes any buffer; its stubs say bytes
            places, shows = first_places(clip.request.frames.tolist()), clip.shows.tolist()
            if shows != sorted(places):
                return False
            written.append(places)
            shown += [(number, places[show]) for show in shows]
            ends = map(add, starts := clip.starts.tolist(), clip.sizes.tolist())
            packets += [av.Packet(data[start:end]) for start, end in zip(starts, ends, strict=True)]
        context, info, count, current = self._contexts.pop(key, None), group[0][0].info, 0, -1
        try:
            context = context or self._open(info)
            for pts, packet in enumerate(packets):
                packet.pts = pts
            for packet in (*packets, None):
                for frame in context.decode(packet):
                    if frame.pts != count or frame.is_corrupt or not frame.key_frame:
                        return False
                    if frame.width != info.width or frame.height != info.height:
                        return False
                    number, place = shown[count]
                    if number != current:
                        current, write = number, self._writer(*group[number])
                    if frame.format.name not in _FORMATS_420:
                        frame = self._converter.to_420(frame, group[number][0].info)
                    write(frame, place)
                    count += 1
            context.flush_buffers()
        except (av.FFmpegError, ValueError, DecodeError):
            return False
        if count < len(packets):
            return False
        self._keep(key, context)
        for (clip, output), places in zip(group, written, strict=True):
            _repeat(clip, places, output)
        return True

    def _decode(self, clip: EncodedClip, output: DecoderOutput) -> DecodeError | None:
        try:
            as_coded, places = isinstance(output, Levels), first_places(clip.request.frames.tolist())
            self._run(clip, places, self._writer(clip, output), as_coded=as_coded)
        except DecodeError as error:
            error.at(shard=clip.shard or None, key=clip.key or None)
            return error
        _repeat(clip, places, output)
        return None

    def _writer(self, clip: EncodedClip, output: DecoderOutput) -> Write:
        request = clip.request
        if isinstance(output, Rgb):
            self._converter.begin(clip.info, request, output)
            return self._converter.write
        if isinstance(output, Planes):
            return _planes_writer(output, request.box)
        assert isinstance(output, Levels)
        return _levels_writer(output, request.box)

    def _run(self, clip: EncodedClip, places: Mapping[int, int], write: Write, *, as_coded: bool = False) -> None:
        """Feed a clip's packets to libavcodec, and write the wanted frames.

        `places`: for each wanted frame its index in the output. `as_coded`: whether frames are written in the decoder's
        pixel format, else in 8-bit 4:2:0.
        """
        info = clip.info
        key = _key(info)
        # Remove the context while it is in use; put it back only after a clip without errors.
        context = self._contexts.pop(key, None)
        try:
            if context is None:
                context = self._open(info)
            decoded = self._write_frames(context, clip, places, write, as_coded)
            check_order(clip, decoded, places)
            context.flush_buffers()
        except (av.FFmpegError, ValueError) as error:
            raise DecodeError(f"{info.codec.label} decoder: {error}") from error
        if not info.flags & _CONFORMS and _is_changed(info, clip):
            return
        self._keep(key, context)

    def _keep(self, key: _ContextKey, context: VideoCodecContext) -> None:
        self._contexts[key] = context
        if len(self._contexts) > self._max_contexts:
            self._contexts.popitem(last=False)

    def _write_frames(
        self, context: VideoCodecContext, clip: EncodedClip, places: Mapping[int, int], write: Write, as_coded: bool
    ) -> list[int]:
        """Decode, check each frame, and write the wanted ones; return the numbers of all frames in decoder order."""
        info, decoded = clip.info, list[int]()
        keys = frozenset(clip.shows[clip.keys].tolist()) if info.codec in _CONCEALING else ()
        # One loop without function calls: a clip may decode hundreds of frames that are not wanted.
        for packet in _packets(clip):
            for frame in context.decode(packet):
                number = frame.pts
                if frame.is_corrupt:
                    raise DecodeError("decoder reports a corrupt frame", frame=number)
                if number is None:
                    raise DecodeError("decoder returned more frames than packets")
                if number < 0:
                    continue
                decoded.append(number)
                if number in keys and not frame.key_frame:
                    raise DecodeError(
                        f"frame {number} is indexed as a key frame, but is not one",
                        hint="run `fastvid index`: the packet index is wrong",
                    )
                if frame.width != info.width or frame.height != info.height:
                    raise DecodeError(
                        f"frame {number} has size {frame.width}x{frame.height}, the stream {info.width}x{info.height}"
                    )
                place = places.get(number)
                if place is None:
                    continue
                if not as_coded and frame.format.name not in _FORMATS_420:
                    frame = self._converter.to_420(frame, info)
                write(frame, place)
        return decoded

    def _open(self, info: StreamInfo) -> VideoCodecContext:
        return open_context(info.codec, info.extradata)


def _key(info: StreamInfo) -> _ContextKey:
    # A JPEG states its own size, and pictures cut to tiles have other sizes in every clip.
    size = (0, 0) if info.codec is Codec.MJPEG else (info.width, info.height)
    return (info.codec, info.extradata, *size)


def _key_of_keys(pair: tuple[EncodedClip, DecoderOutput]) -> _ContextKey | None:
    """Return the key of a clip's context if its packets can be decoded in one pass with other clips', else None.

    Only H.264: from a damaged JPEG, libavcodec may silently show parts of the picture before it.
    """
    clip, output = pair
    info = clip.info
    if info.codec is not Codec.H264 or isinstance(output, Levels) or not (clip.keys.all() and clip.sizes.all()):
        return None
    return None if not int(info.flags) & _CONFORMS and _is_changed(info, clip) else _key(info)


def _repeat(clip: EncodedClip, places: Mapping[int, int], output: DecoderOutput) -> None:
    """Copy the frames that a clip shows several times from their first index in the output to the others."""
    if len(places) < len(clip.request.frames):
        assert isinstance(output, Rgb | Planes | Levels)
        repeat_frames(clip.request.frames.tolist(), places, output.data if isinstance(output, Rgb) else output.arrays)


def _packets(clip: EncodedClip) -> list[Any]:
    """Return the packets of a clip, then None, which drains the decoder."""
    if not clip.keys[0]:
        raise DecodeError("first packet of the plan is not a key packet", frame=int(clip.shows[0]))
    data: Any = clip.data  # PyAV takes any buffer; its stubs say bytes
    packets, hidden = list[Any](), -1
    for start, size, show in zip(clip.starts.tolist(), clip.sizes.tolist(), clip.shows.tolist(), strict=True):
        if not size:
            raise DecodeError("packet is empty", frame=show)  # libavcodec would treat it as the end of stream
        packet: Any = av.Packet(data[start : start + size])
        # A frame inherits its packet's pts, so use the frame index as pts: it survives reordering.
        packet.pts = show if show >= 0 else hidden
        hidden -= show < 0
        packets.append(packet)
    return [*packets, None]


def _is_changed(info: StreamInfo, clip: EncodedClip) -> bool:
    """Return whether packets may have changed a decoder's state in a way that flushing does not undo.

    A stream may replace its parameter sets on the way; then other streams, and earlier frames of the same one, would be
    decoded with the wrong ones. Streams that fastvid encoded never do.
    """
    if info.codec in _RESTARTED:
        return False
    if info.codec not in _SEARCHED:
        return True
    packets = zip(clip.starts.tolist(), clip.sizes.tolist(), strict=True)
    return any(
        changes_parameters(info.codec, info.extradata, clip.data[start : start + size]) for start, size in packets
    )


def open_context(codec: Codec, extradata: bytes) -> VideoCodecContext:
    """Open libavcodec's decoder of one stream, with one thread and strict conformance to the standards."""
    context = CodecContext.create(_DECODER[codec], "r")
    assert isinstance(context, VideoCodecContext)
    if extradata:
        context.extradata = extradata
    context.thread_count = 1
    context.options = {"strict": "1"}
    return context


def _planes_writer(planes: Planes, box: Box) -> Write:
    half = (box.height // 2, box.width // 2)
    copies = (
        (planes.y, box.y, box.x, (box.height, box.width)),
        (planes.u, box.y // 2, box.x // 2, half),
        (planes.v, box.y // 2, box.x // 2, half),
    )

    def write(frame: VideoFrame, place: int) -> None:
        plane: Any  # supports the buffer protocol, which the stubs omit
        for plane, (target, y, x, shape) in zip(frame.planes, copies, strict=True):
            pitch = plane.line_size
            target[place] = np.ndarray(shape, np.uint8, plane, y * pitch + x, (pitch, 1))

    return write


def _levels_writer(levels: Levels, box: Box) -> Write:
    shape = (box.height, box.width)

    def write(frame: VideoFrame, place: int) -> None:
        luma = frame.format.components[0]
        if luma.bits <= 8 or frame.format.is_rgb or frame.format.is_big_endian:
            raise DecodeError(f"pictures of format {frame.format.name} have no luma of more than 8 bits")
        plane: Any = frame.planes[0]
        pitch = plane.line_size
        levels.data[place] = np.ndarray(shape, np.uint16, plane, box.y * pitch + 2 * box.x, (pitch, 2))

    return write


class Recutter:
    """Cuts clips out of planes that were decoded for several clips. Not thread-safe."""

    def __init__(self) -> None:
        self._converter = RgbConverter()

    def cut(
        self,
        info: StreamInfo,
        box: Box,
        planes: Planes,
        index: Sequence[int],
        request: ClipRequest,
        output: DecoderOutput,
    ) -> None:
        """Write one clip: crop the planes, and for RGB also convert, resize and flip.

        `box`: the crop that `planes` show. `planes`: decoded frames, followed by SLACK bytes. `index`: for each frame
        of the clip its index in `planes`, [T].
        """
        y, x = request.box.y - box.y, request.box.x - box.x
        inside = Box(y, x, request.box.height, request.box.width)
        if isinstance(output, Planes):
            for source, target, scale in (
                (planes.y, output.y, 1),
                (planes.u, output.u, 2),
                (planes.v, output.v, 2),
            ):
                rows, columns = _span(inside.y, inside.height, scale), _span(inside.x, inside.width, scale)
                for place, frame in enumerate(index):
                    target[place] = source[frame, rows, columns]
            return
        assert isinstance(output, Rgb)
        self._converter.begin(info, replace(request, box=inside), output)
        places = first_places(index)
        for frame, place in places.items():
            arrays = (planes.y[frame], planes.u[frame], planes.v[frame])
            self._converter.write(VideoFrame.from_dlpack(arrays, format="yuv420p"), place)
        repeat_frames(index, places, output.data)


def can_cut(info: StreamInfo) -> bool:
    """Return whether `Recutter` knows a stream's colour matrix; for other streams the decoder raises an error."""
    return info.matrix in COLORSPACE


def _span(start: int, length: int, scale: int) -> slice:
    return slice(start // scale, (start + length) // scale)
