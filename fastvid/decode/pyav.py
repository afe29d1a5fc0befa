"""The PyAV back-end: decodes planned packets with libavcodec to cropped planes or finished RGB.

These rules make it exact and fast; for each rule about exactness, a test shows what goes wrong without it:

- A codec context stays open between clips, is drained and flushed after each, and is discarded after any error, and
  after packets that changed its parameter sets: otherwise the next clip can be wrong without an error.
- Neighbouring clips whose packets are all key packets, with the same extradata, are decoded in one pass as if they were
  one clip, and several pictures cut to tiles as one picture. If anything is unusual, they are decoded again one by one,
  so that the error names the right clip.
- `thread_count=1`: parallelism is across clips. `strict=1`: otherwise libavcodec guesses the reorder depth of streams
  that do not signal it, and drops pictures.
- Extradata is set before a context opens, never after: libavcodec ignores a later change.
- Packets are views into the clip's buffer, which ends with 64 bytes of padding: PyAV neither copies nor pads them.
- Frames are copied as soon as they are decoded, while they are in the CPU cache: copying later costs 6 to 11 %.
- Every decoded frame must belong to a packet that was fed, in display order and undamaged, and none may be missing.

CPU time of a clip of 8 frames, cropped to 224x224, mean over 48 real videos of 256 lines, one thread (milliseconds;
all-intra H.264, and `compact` in brackets): libavcodec 1.78 (5.04); PyAV's objects 0.04 (0.06); checks, views and
copies of planes 0.11 (0.24), or checks and RGB 0.17 (0.30). docs/performance.md lists every step and what was tried.

`RgbConverter` converts YUV 4:2:0 frames to RGB with PyAV's copy of libswscale, through its C interface. Frames are
cropped before the conversion, which writes directly to the output; PyAV's own reformatter allocates its output, which
costs another copy. The C functions used here have not changed since libswscale 2 (2011). Compared with the rounded
float reference in `fastvid.decode.pixels`:

- not resized: each chroma sample is repeated, at most 3 levels off, 1.2 on average (libswscale truncates, so it is
  darker);
- resized: antialiased like the reference, but chroma is filtered instead of repeated: 0.2 to 0.7 levels off on average
  over a real clip, a few dozen at the sharpest edges between colours;
- resized fast: the YUV planes are resized first and then converted as if not resized, one level brighter: 0.9 levels
  off on average, in two thirds of the time; odd heights are resized as usual.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import groupby, starmap
from operator import add
from typing import Any, Final, Protocol, cast

import av
import numpy as np
from av.codec.context import CodecContext
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.reformatter import ColorRange, Colorspace, VideoReformatter

from fastvid.decode.engines import library
from fastvid.decode.request import (
    ClipRequest,
    DecoderOutput,
    EncodedClip,
    Levels,
    Planes,
    Rgb,
    ThreadDecoder,
    check_order,
    first_places,
    repeat_frames,
)
from fastvid.decode.tiles import cut_tiles
from fastvid.errors import DecodeError, FastvidError, UsageError
from fastvid.format.bitstream import changes_parameters
from fastvid.format.packets import StreamInfo
from fastvid.format.schema import Codec, Matrix, Range, StreamFlag, with_padding
from fastvid.runtime.arrays import UInt8Array

# libavcodec's native "av1" decoder requires hardware.
_DECODER: Final = {codec: "libdav1d" if codec is Codec.AV1 else codec.label for codec in Codec}

# Codecs whose decoders start at any packet and conceal missing references without an error.
_CONCEALING: Final = frozenset({Codec.H264, Codec.HEVC})

# Codecs of which nothing outlasts a flush and a key packet: RFC 6386 (9.3), VP9 bitstream specification (8.4.2); dav1d
# forgets the sequence header when it is flushed, and never reads that of the extradata.
_RESTARTED: Final = frozenset({Codec.VP8, Codec.VP9, Codec.AV1})
# Codecs whose packets are searched for parameter sets. What packets of other codecs change is not known.
_SEARCHED: Final = frozenset({Codec.H264, Codec.HEVC})
_CONFORMS: Final = int(StreamFlag.CONFORMS)

_FORMATS_420: Final = frozenset({"yuv420p", "yuvj420p"})

_ContextKey = tuple[Codec, bytes, int, int]

Write = Callable[[VideoFrame, int], None]
"""Copies or converts a frame to an index of the output; the frame is 8-bit 4:2:0, except for `Levels`."""


class _Writer(Protocol):
    """A `Write` that takes pictures out of a frame with several: `top` is the first row of the picture."""

    def __call__(self, frame: VideoFrame, place: int, top: int = 0) -> None: ...


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
                        clip, output = group[number]
                        current, write = number, self._writer(clip.info, clip.request, output)
                    if frame.format.name not in _FORMATS_420:
                        frame = self._converter.to_420(frame, clip.info)
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

    def _decode_cut(self, clip: EncodedClip, places: Mapping[int, int], output: DecoderOutput) -> bool:
        """Decode a clip from its tiles; return False if it has none, or if any frame was not as expected."""
        cut, shows = cut_tiles(clip), clip.shows.tolist()
        if cut is None or shows != sorted(places):
            return False
        key, write = _key(clip.info), self._writer(clip.info, cut.request(clip.request), output)
        context = self._contexts.pop(key, None)
        try:
            context = context or self._open(clip.info)
            for jpeg, height, some in cut.jpegs(shows):
                # This decoder returns the picture of each packet at once, so it need not be drained.
                (frame,) = context.decode(av.Packet(cast(Any, jpeg)))
                if frame.is_corrupt or (frame.width, frame.height) != (cut.part.width, height):
                    return False
                for number, show in enumerate(some):
                    write(frame, places[show], number * cut.rows)
        except (av.FFmpegError, ValueError, DecodeError):
            return False
        self._keep(key, context)
        return True

    def _decode(self, clip: EncodedClip, output: DecoderOutput) -> DecodeError | None:
        try:
            as_coded, places = isinstance(output, Levels), first_places(clip.request.frames.tolist())
            is_jpeg = clip.info.codec is Codec.MJPEG and not as_coded
            if not is_jpeg or not self._decode_cut(clip, places, output):
                self._run(clip, places, self._writer(clip.info, clip.request, output), as_coded=as_coded)
        except DecodeError as error:
            error.at(shard=clip.shard or None, key=clip.key or None)
            return error
        _repeat(clip, places, output)
        return None

    def _writer(self, info: StreamInfo, request: ClipRequest, output: DecoderOutput) -> _Writer:
        if isinstance(output, Rgb):
            self._converter.begin(info, request, output)
            return self._converter.write
        assert isinstance(output, Planes | Levels)
        return partial(output.write, request.box)

    def _run(self, clip: EncodedClip, places: Mapping[int, int], write: Write, *, as_coded: bool = False) -> None:
        """Feed a clip's packets to libavcodec, and write the wanted frames.

        `places`: for each wanted frame its index in the output. `as_coded`: whether frames are written in the decoder's
        pixel format, else in 8-bit 4:2:0.
        """
        info, key = clip.info, _key(clip.info)
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
                if (place := places.get(number)) is None:
                    continue
                if not as_coded and frame.format.name not in _FORMATS_420:
                    frame = self._converter.to_420(frame, info)
                write(frame, place)
        return decoded

    def _open(self, info: StreamInfo) -> VideoCodecContext:
        context = open_context(info.codec, info.extradata)
        if info.codec is Codec.MJPEG and int(info.flags) & _CONFORMS:
            # By default a damaged JPEG is decoded without an error; those of cameras may have harmless faults.
            context.options = {**context.options, "err_detect": "explode"}
        return context


def _key(info: StreamInfo) -> _ContextKey:
    if info.codec is Codec.MJPEG:
        # A JPEG states its own size, and pictures cut to tiles have other sizes in every clip.
        return (info.codec, info.extradata, int(info.flags) & _CONFORMS, 0)
    return (info.codec, info.extradata, info.width, info.height)


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
    packets, hidden = list[Any](), -1
    for start, size, show in zip(clip.starts.tolist(), clip.sizes.tolist(), clip.shows.tolist(), strict=True):
        if not size:
            raise DecodeError("packet is empty", frame=show)  # libavcodec would treat it as the end of stream
        data: Any = clip.data[start : start + size]  # PyAV takes any buffer; its stubs say bytes
        if clip.info.codec is Codec.MPEG4:  # its decoder reads on after the packet, where sound may be
            data = with_padding(data)
        packet: Any = av.Packet(data)
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


def can_cut(info: StreamInfo) -> bool:
    """Return whether clips cut out of decoded planes have the pixels of decoded ones: not if they are stretched."""
    return info.matrix in COLORSPACE and not (info.coded and info.coded.stretches((info.height, info.width)))


_BILINEAR: Final = 2  # SWS_BILINEAR
_ONE: Final = 1 << 16  # contrast and saturation are 16.16 fixed point
# Brightness, in 16.16 fixed point, that compensates for truncation where nothing is resized: 1.15 of 255 levels.
_ROUNDED: Final = 1 << 8

Pointers = ctypes.c_void_p * 4
Strides = ctypes.c_int * 4


@cache
def _functions() -> Any:
    """Load libswscale and declare the signatures of its functions."""
    scale = library("swscale")
    scale.sws_getContext.restype = scale.sws_getCoefficients.restype = ctypes.c_void_p
    scale.sws_getContext.argtypes = [ctypes.c_int] * 7 + [ctypes.c_void_p] * 3
    details = [*[ctypes.c_void_p] * 2, ctypes.c_int, ctypes.c_void_p, *[ctypes.c_int] * 4]
    scale.sws_setColorspaceDetails.argtypes = details
    scale.sws_freeContext.argtypes = [ctypes.c_void_p]
    scale.sws_scale.argtypes = [ctypes.c_void_p, Pointers, Strides, ctypes.c_int, ctypes.c_int, Pointers, Strides]
    return scale


@cache
def _formats() -> tuple[int, int]:
    """Return FFmpeg's numbers of 4:2:0 and of planar RGB."""
    find = library("avutil").av_get_pix_fmt
    return find(b"yuv420p"), find(b"gbrp")


def _context(
    source: tuple[int, int], target: tuple[int, int], colorspace: int, full: bool, planes: bool, brightness: int
) -> int:
    """Create a libswscale context that converts 4:2:0 pictures to planar RGB; sizes are (height, width).

    `full`: whether the input has full-range samples. `planes`: whether the output is 4:2:0 instead, resized.
    """
    scale = _functions()
    yuv, rgb = _formats()
    context: int | None = scale.sws_getContext(
        source[1], source[0], yuv, target[1], target[0], yuv if planes else rgb, _BILINEAR, None, None, None
    )
    if not context:
        raise DecodeError(f"libswscale cannot convert {source} to {target}")
    table = scale.sws_getCoefficients(colorspace)
    scale.sws_setColorspaceDetails(context, table, int(full), table, int(full or not planes), brightness, _ONE, _ONE)
    return context


# Unknown is treated as BT.601, as in FFmpeg, DALI and `pixels`.
COLORSPACE: Final = {
    Matrix.BT709: Colorspace.ITU709,
    Matrix.UNKNOWN: Colorspace.ITU601,
    Matrix.FCC: Colorspace.FCC,
    Matrix.BT470BG: Colorspace.ITU601,
    Matrix.SMPTE170M: Colorspace.ITU601,
    Matrix.SMPTE240M: Colorspace.SMPTE240M,
    Matrix.BT2020_NCL: Colorspace.BT2020,
}
COLOR_RANGE: Final = {Range.UNKNOWN: ColorRange.MPEG, Range.LIMITED: ColorRange.MPEG, Range.FULL: ColorRange.JPEG}

# libswscale's conversion from 4:2:0 to planar RGB does not write the last columns if the width modulo 16 is 1 to 8
# (observed with libswscale 9.5), and its SIMD vectors have up to 32 bytes. So rows are padded to a multiple of this.
_ROW: Final = 32
# SIMD code may read or write this many bytes past the last row.
_SLACK: Final = 64
# A context is made for each size. Random crops have thousands of sizes, so only a few contexts are kept.
_MAX_CONTEXTS: Final = 8
# Plane indices of R, G and B in FFmpeg's gbrp.
_PLANE_OF_RGB: Final = (2, 0, 1)


class RgbConverter:
    """Converts the frames of one clip at a time; reuses libswscale contexts and buffers. Not thread-safe."""

    def __init__(self) -> None:
        self._reformatter = VideoReformatter()
        self._contexts: OrderedDict[tuple[object, ...], int] = OrderedDict()
        self._source, self._source_strides = Pointers(), Strides()
        self._target, self._target_strides = Pointers(), Strides()
        self._stage: UInt8Array = np.empty(0, dtype=np.uint8)
        self._picture: UInt8Array = np.empty(0, dtype=np.uint8)
        self._middle, self._middle_strides = Pointers(), Strides()
        self._resized: UInt8Array = np.empty(0, dtype=np.uint8)

    def __del__(self) -> None:
        for context in self._contexts.values():
            self._swscale.sws_freeContext(context)

    def begin(self, info: StreamInfo, request: ClipRequest, output: Rgb) -> None:
        """Prepare to convert the frames of a clip to `output`; then call `write` for each."""
        out = output.data
        box, (height, width), flip = request.box, request.size, request.flip
        resized = (box.height, box.width) != request.size
        padded = -(-width // _ROW) * _ROW
        # A resize filter must not read pixels outside the crop; without resizing, padded rows may contain such pixels.
        self._box, self._width = box, box.width if resized else padded
        source, target, brightness = (box.height, self._width), (height, width if resized else padded), 0
        self._resizing = None
        # With an odd height, the conversion would filter chroma along rows, with the padding after them.
        if resized and output.fast and height % 2 == 0:
            self._resizing = self._take_context(info, source, target, planes=True)
            source, target, brightness = (height, padded), (height, padded), _ROUNDED
            self._place_middle(height, padded)
        self._rows = source[0]
        self._scaling = self._take_context(info, source, target, brightness=brightness)
        # Convert directly into the output if rows need neither padding nor mirroring.
        self._direct = padded == width and not flip and out.strides[3] == 1
        if self._direct:
            self._base, self._plane, self._step, pitch = out.ctypes.data, out.strides[0], out.strides[1], out.strides[2]
        else:
            if self._picture.shape[1:] != (height, padded):
                buffer = np.empty(3 * height * padded + _SLACK, dtype=np.uint8)
                self._picture = buffer[: 3 * height * padded].reshape(3, height, padded)
            self._base, self._plane, self._step, pitch = self._picture.ctypes.data, height * padded, 0, padded
            self._cut, self._shown = self._picture[..., :width], out
            if flip and width % 8 == 0 and out.strides[3] == 1:
                # Swapping eight bytes at once by byte order is seven times as fast as a negative stride over bytes.
                self._cut, self._shown = self._cut.view("<u8"), out.view(">u8")
            if flip:
                self._cut = self._cut[..., ::-1]
        for number in range(3):
            self._target_strides[number] = pitch

    def _take_context(
        self,
        info: StreamInfo,
        source: tuple[int, int],
        target: tuple[int, int],
        *,
        planes: bool = False,
        brightness: int = 0,
    ) -> int:
        colorspace, color_range = _colour(info.matrix, info.range)
        key = (source, target, colorspace, color_range, planes, brightness)
        context = self._contexts.pop(key, None)
        if context is None:
            self._swscale = _functions()
            context = _context(source, target, colorspace, color_range == ColorRange.JPEG, planes, brightness)
        self._contexts[key] = context
        if len(self._contexts) > _MAX_CONTEXTS:
            self._swscale.sws_freeContext(self._contexts.popitem(last=False)[1])
        return context

    def _place_middle(self, height: int, padded: int) -> None:
        """Set up memory for a picture that is resized and not converted yet."""
        luma, chroma = height * padded, -(-height // 2) * padded // 2
        if len(self._resized) < luma + 2 * chroma + _SLACK:
            self._resized = np.zeros(luma + 2 * chroma + _SLACK, dtype=np.uint8)
        start = self._resized.ctypes.data
        self._middle[0], self._middle[1], self._middle[2] = start, start + luma, start + luma + chroma
        self._middle_strides[0], self._middle_strides[1], self._middle_strides[2] = padded, padded // 2, padded // 2

    def write(self, frame: VideoFrame, place: int, top: int = 0) -> None:
        """Convert an 8-bit 4:2:0 frame of the stream's size into ``out[:, place]``, index `place` of the output.

        `top`: first row of the picture in a frame that has several pictures below one another.
        """
        box, source, strides, target = self._box, self._source, self._source_strides, self._target
        planes: Any = frame.planes
        y, u, v = planes
        luma, chroma = y.line_size, u.line_size
        if box.x + self._width <= luma and box.x // 2 + self._width // 2 <= chroma:
            row = top + box.y
            source[0] = y.buffer_ptr + row * luma + box.x
            source[1] = u.buffer_ptr + row // 2 * chroma + box.x // 2
            source[2] = v.buffer_ptr + row // 2 * chroma + box.x // 2
            strides[0], strides[1], strides[2] = luma, chroma, chroma
        else:
            self._copy_out(planes, top)
        start = self._base + place * self._step
        for number, plane in enumerate(_PLANE_OF_RGB):
            target[plane] = start + number * self._plane
        if self._resizing is not None:
            middle = self._middle, self._middle_strides
            self._swscale.sws_scale(self._resizing, source, strides, 0, box.height, *middle)
            source, strides = middle
        self._swscale.sws_scale(self._scaling, source, strides, 0, self._rows, target, self._target_strides)
        if not self._direct:
            for shown, cut in zip(self._shown, self._cut, strict=True):  # plane by plane: pixels may be interleaved
                shown[place] = cut

    def convert(
        self, info: StreamInfo, request: ClipRequest, planes: Planes, index: Sequence[int], output: Rgb
    ) -> None:
        """Convert a clip out of decoded planes, which are followed by SLACK bytes.

        `request`: its crop is inside the planes. `index`: for each frame of the clip its index in `planes`, [T].
        """
        self.begin(info, request, output)
        places = first_places(index)
        for frame, place in places.items():
            arrays = tuple(plane[frame] for plane in planes.arrays)
            self.write(VideoFrame.from_dlpack(arrays, format="yuv420p"), place)
        repeat_frames(index, places, output.data)

    def to_420(self, frame: VideoFrame, info: StreamInfo) -> VideoFrame:
        """Convert a frame of another YUV format to 8-bit 4:2:0 of the same range and matrix.

        The frame may be 4:2:2, 4:4:4, more than 8 bits or grey.
        """
        if frame.format.is_rgb:
            raise DecodeError(f"pixel format {frame.format.name} is not YUV")
        colorspace, color_range = _colour(info.matrix, info.range)
        return self._reformatter.reformat(
            frame,
            format="yuv420p",
            src_colorspace=colorspace,
            dst_colorspace=colorspace,
            src_color_range=color_range,
            dst_color_range=color_range,
            # By default it would start one thread per core, which takes five times as long as the conversion.
            threads=1,
        )

    def _copy_out(self, planes: Any, top: int) -> None:
        """Copy the crop into wider rows, because the frame has too few bytes after the crop for the padded width."""
        box, width = self._box, self._width
        size = box.height * width
        if len(self._stage) < size * 3 // 2 + _SLACK:
            self._stage = np.zeros(size * 3 // 2 + _SLACK, dtype=np.uint8)
        at = 0
        for number, (plane, step) in enumerate(zip(planes, (1, 2, 2), strict=True)):
            height, row, pitch = box.height // step, width // step, plane.line_size
            cut = (height, box.width // step)
            rows = self._stage[at : at + height * row].reshape(height, row)
            start = (top + box.y) // step * pitch + box.x // step
            rows[:, : cut[1]] = np.ndarray(cut, np.uint8, plane, start, (pitch, 1))
            self._source[number] = self._stage.ctypes.data + at
            self._source_strides[number] = row
            at += height * row


@cache
def _colour(matrix: Matrix, sample_range: Range) -> tuple[int, int]:
    if matrix not in COLORSPACE:
        raise DecodeError(f"matrix {matrix.name} is not a YUV matrix")
    return COLORSPACE[matrix], COLOR_RANGE[sample_range]
