"""One video stream of a sample: facts about it, its frames, what a notebook shows of it, and files made of it."""

from __future__ import annotations

import base64
import copy
import io
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import isfinite
from pathlib import PurePosixPath
from typing import Any, ClassVar, Final, cast

import av
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from av.audio.frame import AudioFrame
from av.video.frame import VideoFrame

from fastvid.decode.clips import Read, check_packets, read_clip
from fastvid.decode.pyav import PyAvDecoder
from fastvid.decode.request import Box, ClipRequest, DecoderOutput, EncodedClip, Planes, Rgb
from fastvid.decode.sound import AudioClip, AudioWindow, check_rate, decode_audio, load_track, read_packets
from fastvid.errors import DecodeError, FastvidError, UsageError
from fastvid.format.dataset import whole_file
from fastvid.format.packets import PacketTable, StreamInfo, packet_offsets
from fastvid.format.planes import to_pixels
from fastvid.format.schema import ANNOTATION_FIELDS, FACT_FIELDS, FLOW, PICTURES, Codec, StreamFlag
from fastvid.format.shard import Shard
from fastvid.report.page import fragment, missing_tile, player, png, tile, tiles
from fastvid.runtime.arrays import Float32Array, FloatArray, IntArray, UInt8Array
from fastvid.runtime.values import check_choice, duration, is_number, size, things
from fastvid.videos import pictures
from fastvid.videos.one_file import OneFile, index_file
from fastvid.videos.pictures import Shown

_TILES: Final = 16  # frames that a notebook shows of a batch

_local = threading.local()


@dataclass(frozen=True, slots=True, eq=False)
class FrameBatch(Shown):
    """Frames of one sample for display and inspection, for example in a notebook.

    Attributes:
        data: uint8 [T, H, W, 3], RGB.
        frames: Frame indices, int64 [T].
        seconds: When each frame is shown, in seconds since the first frame of the video, float64 [T].
        key: The sample's key, empty if unknown.
    """

    data: UInt8Array
    frames: IntArray
    seconds: FloatArray = field(repr=False)
    key: str = ""

    _NAME: ClassVar[str] = "frames"

    def __len__(self) -> int:
        return len(self.frames)

    def __repr__(self) -> str:
        t, h, w, _ = self.data.shape
        return f"FrameBatch({t} frames of {w}x{h}, indices {self.frames.tolist()})"

    def _repr_html_(self) -> str:
        t, h, w, _ = self.data.shape
        facts = {"frames": t, "size": f"{w}x{h}"}
        more = f"and {things(t - _TILES, 'more frame')}" if t > _TILES else ""
        return fragment(self.key or "Frames", facts, self._tiles(_TILES), more)

    def _picture(self) -> UInt8Array:
        return pictures.contact_sheet(self.data)

    def _tiles(self, most: int) -> str:
        """Return HTML of the first `most` frames, each with its number and time."""
        small = pictures.shrink(self.data[:most], *pictures.tile_size(*self.data.shape[1:3]))
        return tiles(
            tile(pictures.encode_picture(picture), picture.shape[1], f"frame {frame}", f"{second:.2f} s")
            for picture, frame, second in zip(small, self.frames.tolist(), self.seconds.tolist(), strict=False)
        )


def decode_frames(
    info: StreamInfo,
    table: PacketTable,
    read: Read,
    frames: slice | Sequence[int] | npt.ArrayLike | None = None,
    *,
    seconds: Sequence[float] | npt.ArrayLike | None = None,
    size: tuple[int, int] | None = None,
    gap: int = 0,
    key: str = "",
) -> FrameBatch:
    """Decode whole frames of a stream to RGB. If a side is odd, its last row or column is omitted.

    `read`: reads ranges of the stream. `seconds`: times instead of `frames`. `size`: height and width to resize to.
    `gap`: packets at most this many bytes apart are read together. `key`: of the sample, for messages.
    """
    wanted = pictures.wanted_frames(info, frames, seconds)
    whole = (info.height & ~1, info.width & ~1)
    size = size or whole
    clip = read_clip(ClipRequest(0, wanted, Box(0, 0, *whole), size), info, table, read, gap=gap)
    rgb = np.empty((len(wanted), *size, 3), dtype=np.uint8)
    _decode_clip(clip, Rgb(rgb.transpose(3, 0, 1, 2)))
    return FrameBatch(rgb, wanted, info.seconds(wanted), key)


def _decode_clip(clip: EncodedClip, out: DecoderOutput) -> None:
    """Decode a clip into `out` by the calling thread's decoder, which stays open between calls."""
    decoder: PyAvDecoder | None = getattr(_local, "decoder", None)
    if decoder is None:
        decoder = _local.decoder = PyAvDecoder(max_contexts=4)
    (error,) = decoder.decode([clip], [out])
    if error is not None:
        raise error


_STRIP: Final = 8  # frames that a notebook shows of a video
_COLUMNS: Final = 12  # annotation columns that a notebook shows
_PLAYED: Final = {Codec.H264, Codec.VP9, Codec.AV1}  # what browsers play
# Samples per second of the silence that stands for missing audio, if no rate is given.
_SILENT_RATE: Final = 48_000
_MP4: Final = {".mp4", ".m4v", ".mov"}  # names of one container
_PLAYED_BYTES: Final = 16 << 20  # largest video to embed in a notebook, so that the notebook's file stays small


class Video(Shown):
    """One video: a sample of a dataset, or a file without one.

        fastvid.Video("a.mp4").frames(seconds=[1.2])

    A file is indexed in memory, like `fastvid index` does, and read by ranges; `frames` returns what a player shows.
    The file is parsed in this process, which a malicious file may crash: index untrusted files with the command.

    Args:
        source: Path or URL (``http://``, ``s3://``, ``gs://``, ``hf://``) of a video file.
        prove: How many frames are compared with an independent decoder: "none", "sample" or "all".
        hdr: "tonemap" rejects high dynamic range, which only `fastvid shard` converts to standard range; "keep" returns
            its values unconverted.

    Raises:
        SourceError: If the file is missing, or cannot be read without encoding it; its `reason` says why.
        StorageError: If the file cannot be read.
        UsageError: If `prove` or `hdr` is none of the values above.

    Attributes:
        key: The sample's key; for a file its name without the suffix.
        label: The sample's label, -1 if it has none.
        class_name: Name of the label, None if it has none.
        stream: Name of the stream of pictures.
        info: Description of the stream: size, number of frames, rate and codec.
    """

    key: str
    label: int
    class_name: str | None
    stream: str
    info: StreamInfo
    _shard: Shard | OneFile
    _row: int
    _annotations: tuple[pa.Table, int]

    _NAME: ClassVar[str] = "video"

    def __init__(self, source: str | os.PathLike[str], *, prove: str = "sample", hdr: str = "tonemap") -> None:
        file = index_file(source, prove=prove, hdr=hdr)
        made = Video.of(file, 0, file.annotations(), label=-1, class_name=None, stream=PICTURES)
        self.__dict__ |= made.__dict__

    @classmethod
    def of(
        cls,
        shard: Shard | OneFile,
        row: int,
        annotations: tuple[pa.Table, int],
        *,
        label: int,
        class_name: str | None,
        stream: str,
    ) -> Video:
        """Return the sample at a row of a shard; `annotations`: a table, and the sample's row in it."""
        video, (table, number) = cls.__new__(cls), annotations
        video.key = table["key"][number].as_py()
        video.label, video.class_name, video.stream = label, class_name, stream
        video.info = shard.info(row, stream)
        video._shard, video._row, video._annotations = shard, row, annotations
        return video

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Add the sample or the file to errors of the block, which reads it."""
        try:
            yield
        except FastvidError as error:
            if isinstance(self._shard, OneFile):
                error.at(file=self._shard.stem)
            else:
                error.at_sample(self._shard.stem, self.key)
            raise

    def __getstate__(self) -> dict[str, Any]:
        # Another process needs one row of the annotations, not the whole table.
        table, row = self._annotations
        return self.__dict__ | {"_annotations": (table.take([row]), 0)}

    @property
    def cameras(self) -> tuple[str, ...]:
        """Names of the sample's streams of pictures; ("rgb",) unless there are several cameras."""
        return tuple(name for name in self._shard.streams[: self._shard.num_streams] if name != FLOW)

    def camera(self, name: str) -> Video:
        """Return the video of another camera of the same sample.

        Raises:
            UsageError: If there is no such camera.
        """
        check_choice("sample has no camera {}", name, self.cameras, key=self.key)
        other = copy.copy(self)
        other.stream, other.info = name, self._shard.info(self._row, name)
        return other

    def __len__(self) -> int:
        return self.info.num_frames

    def __repr__(self) -> str:
        info = self.info
        rate = f"{float(info.fps):.6g} fps"
        return (
            f"Video({self.key!r}, {info.num_frames} frames of {info.width}x{info.height}, {rate}, {info.codec.label})"
        )

    def _repr_html_(self) -> str:
        return self._html("")

    def _shown_html(self) -> str:
        if self.info.codec not in _PLAYED or self._shard.member(self._row, self.stream)[1] > _PLAYED_BYTES:
            return self._html("")
        return self._html(player(f"data:video/mp4;base64,{base64.b64encode(self._mp4()).decode('ascii')}"))

    def _html(self, above: str) -> str:
        info = self.info
        facts = {
            "class": "none" if self.class_name is None else self.class_name,
            "duration": duration(float(info.num_frames / info.fps)),
            "frames": info.num_frames,
            "size": f"{info.width}x{info.height}",
            "rate": f"{float(info.fps):.6g} fps",
            "codec": f"{info.codec.label}, {size(self._shard.member(self._row, self.stream)[1])}",
        }
        own = [name for name in self.annotations if name not in ANNOTATION_FIELDS | FACT_FIELDS]
        facts |= {name: self.annotations[name] for name in own[:_COLUMNS] if self.annotations[name] is not None}
        try:
            strip = self._strip(pictures.tile_size(info.height, info.width))._tiles(_STRIP)
        except FastvidError as error:
            strip = tiles([missing_tile(error.message, "not decoded")])
        return fragment(self.key, facts, above + strip)

    def _picture(self) -> UInt8Array:
        return self._strip()._picture()

    def _strip(self, size: tuple[int, int] | None = None) -> FrameBatch:
        return self._decode(pictures.spread(self.num_frames, _STRIP), None, size)

    def _middle(self, size: tuple[int, int] | None = None) -> UInt8Array:
        """Return the frame in the middle, uint8 [1, H, W, 3]."""
        return self._decode([self.num_frames // 2], None, size).data

    def _file(self, suffix: str) -> bytes | None:
        if suffix == ".m4a":
            return self._m4a()
        return self._mp4() if self.is_stored_as(suffix) else super()._file(suffix)

    def _suffixes(self) -> tuple[str, ...]:
        return (self.suffix, ".m4a", *super()._suffixes())

    @property
    def suffix(self) -> str:
        """Suffix of the stream's own file: ``.mp4``, or that of the file in place."""
        if self._shard.root is None:
            return ".mp4"
        shard = self._shard
        file = shard.stem if isinstance(shard, OneFile) else shard.file(self._row, self.stream).file
        return PurePosixPath(file.partition("?")[0]).suffix.lower() or ".mp4"

    def is_stored_as(self, suffix: str) -> bool:
        """Return whether the stream's own file may have a name with this suffix."""
        return suffix == self.suffix or {suffix, self.suffix} <= _MP4

    @property
    def has_sound(self) -> bool:
        """Whether the dataset has the sample's sound; for videos in place it has none."""
        with self._reading():
            return self._shard.root is None and self._shard.audio(self._row) is not None

    def _m4a(self) -> bytes:
        """Return the sample's stored M4A, after verifying its checksums."""
        with self._reading():
            reader = self._shard.audio(self._row)
            if reader is not None:
                return bytes(reader.bytes(0, reader.size))
        raise UsageError("sample has no sound", key=self.key, hint="choose a sample with sound, or omit --audio")

    def _mp4(self) -> bytes:
        """Return the bytes of the stream's file, after verifying the checksums of its packets."""
        with self._reading():
            if isinstance(self._shard, Shard) and self._shard.root is not None:
                _, data = whole_file(self._shard, self._row, self.stream)
            else:
                data = self._shard.reader(self._row, self.stream).whole()
            records = self.table.records
            if not self.info.flags & StreamFlag.UNCHECKED:
                sizes, crc32 = records["size"].tolist(), records["crc32"].tolist()
                check_packets(memoryview(data), packet_offsets(records), sizes, crc32, np.arange(len(records)))
        return data

    @property
    def num_frames(self) -> int:
        """Number of frames."""
        return self.info.num_frames

    @property
    def fps(self) -> Fraction:
        """Frames per second, exact."""
        return self.info.fps

    @property
    def duration(self) -> Fraction:
        """Duration in seconds, exact: `num_frames` / `fps`."""
        return self.info.num_frames / self.info.fps

    @property
    def width(self) -> int:
        """Width in pixels."""
        return self.info.width

    @property
    def height(self) -> int:
        """Height in pixels."""
        return self.info.height

    @property
    def table(self) -> PacketTable:
        """The stream's packets."""
        return self._shard.table(self._row, self.stream)

    @cached_property
    def annotations(self) -> Mapping[str, Any]:
        """The sample's row of the dataset's annotations, by column."""
        table, row = self._annotations
        return {name: table[name][row].as_py() for name in table.column_names}

    def frames(
        self,
        frames: slice | Sequence[int] | npt.ArrayLike | None = None,
        *,
        seconds: Sequence[float] | npt.ArrayLike | None = None,
    ) -> FrameBatch:
        """Decode frames, given by number or by time.

        Args:
            frames: Indices in display order, 0 <= f < num_frames; any order, repeats allowed. Or a slice, as of a list.
            seconds: Times instead of `frames`, 0 <= s < duration; any order, repeats allowed. Each yields the frame
                that is shown at that time; a time up to a millisecond before a frame, and at most half of the frame's
                duration, also means that frame.

        Raises:
            UsageError: If no frame is requested, or one is outside the video.
            StorageError: If the shard cannot be read.
            ChecksumError: If the shard's bytes differ from the indexed ones.
            DecodeError: If the packets do not decode to the frames.
        """
        return self._decode(frames, seconds, None)

    def _decode(
        self,
        frames: slice | Sequence[int] | npt.ArrayLike | None,
        seconds: Sequence[float] | npt.ArrayLike | None,
        size: tuple[int, int] | None,
    ) -> FrameBatch:
        shard = self._shard
        reader = shard.reader(self._row, self.stream)
        with self._reading():
            options: dict[str, Any] = {"seconds": seconds, "size": size, "gap": reader.gap, "key": self.key}
            return reader.checked(lambda: decode_frames(self.info, self.table, reader, frames, **options))

    def flow(
        self,
        frames: slice | Sequence[int] | npt.ArrayLike | None = None,
        *,
        seconds: Sequence[float] | npt.ArrayLike | None = None,
    ) -> Float32Array:
        """Return the optical flow from frames to their next frames, float32 [T, H, W, 2]: x and y in pixels per frame.

        Args:
            frames: Indices in display order, as for `frames`; the last frame repeats the flow before it.
            seconds: Times instead of `frames`, as for `frames`.

        Raises:
            FormatError: If the sample has no flow.
            UsageError: If no frame is requested, or one is outside the video.
            StorageError: If the shard cannot be read.
            ChecksumError: If the shard's bytes differ from the indexed ones.
            DecodeError: If the packets do not decode to the frames.
        """
        shard, row = self._shard, self._row
        with self._reading():
            info = shard.info(row, "flow")
            wanted = pictures.wanted_frames(info, frames, seconds)
            box = Box(0, 0, info.height, info.width)
            request = ClipRequest(0, wanted, box, (info.height, info.width), stream="flow")
            clip = read_clip(request, info, shard.table(row, "flow"), shard.reader(row, "flow"))
            planes = Planes.packed(np.empty(Planes.nbytes(len(wanted), box), np.uint8), len(wanted), box)
            _decode_clip(clip, planes)
        return to_pixels(planes.y, info.flow_bound)

    def audio(
        self, start: float | None = None, stop: float | None = None, rate: int | None = None, *, mono: bool = False
    ) -> AudioClip:
        """Decode the sound of some seconds of the video; a sample without audio is silent.

        At rate r the window contains the samples round(start * r) to round(stop * r) - 1, halves rounded up; sample n
        is the sound at n / r seconds, with the same bits in every window of the same video. The exception is noise that
        AAC encodes without its samples (PNS), which differs between windows.

        Args:
            start: Start in seconds from the first frame of the video; 0 by default. Before the track it is silent.
            stop: End in seconds; by default the end of the video. After the track it is silent.
            rate: Samples per second; by default those of the track, or 48,000 if there is none.
            mono: Whether to return the mean of all channels; by default all channels of the track are returned, or one
                if there is no track.

        Raises:
            UsageError: If the window ends before it begins, or the rate is out of range.
            StorageError: If the shard cannot be read.
            ChecksumError: If the shard's bytes differ from the indexed ones.
            FormatError: If the sidecar was written before audio was supported, or the M4A's tables are malformed.
            DecodeError: If the packets do not decode.
        """
        begin, end = _moment(start or 0), Fraction(self.num_frames) / self.fps if stop is None else _moment(stop)
        if end < begin:
            raise UsageError(f"audio from {float(begin)} to {float(end)} s ends before it begins", key=self.key)
        if rate is not None:
            rate = check_rate(rate)  # a product of times and one of numpy's integers may overflow
        with self._reading():
            reader = self._shard.audio(self._row)
            track = None if reader is None else load_track(reader)
            own = _SILENT_RATE if track is None else track.info.sample_rate
            window = AudioWindow.of(begin, end, rate or own, 1 if mono else None)
            encoded = None if reader is None or track is None else read_packets(reader, track, window)
            return decode_audio(encoded, window)


def _moment(seconds: Any) -> Fraction:
    """Return a time in seconds exactly, of any type of number; raise UsageError for anything else."""
    if not is_number(seconds) or not isfinite(seconds):
        raise UsageError(f"a time of the sound is {seconds!r}, expected a finite number of seconds")
    return seconds if isinstance(seconds, Fraction) else Fraction(float(seconds))


_CHUNK: Final = 32  # frames in memory at a time
# x264's guide calls 17 or 18 visually lossless; 12 leaves room for the conversion from RGB.
_X264: Final = {"crf": "12", "preset": "medium", "threads": "1"}
_AAC_BITS: Final = 160_000  # per second and channel; FFmpeg's guide calls 128k for two channels good
_LAYOUTS: Final = {1: "mono", 2: "stereo", 3: "3.0", 4: "4.0", 5: "5.0", 6: "5.1", 8: "7.1"}
_BT709: Final = 1  # AVColorSpace and AVColorPrimaries in libavutil/pixfmt.h


def clip_frames(video: Video, start: float, stop: float) -> IntArray:
    """Return the frames shown from `start` until before `stop` seconds, int64 [T]; both must be inside the video."""
    if not 0 <= start < stop <= float(video.duration):
        raise UsageError(
            f"seconds {start:.6g} to {stop:.6g} are not inside the video",
            key=video.key,
            hint=f"give START:STOP between 0 and {float(video.duration):.6g}",
        )
    first, end = video.info.clip(start, stop)
    first = min(first, video.num_frames - 1)
    return np.arange(first, max(first + 1, end), dtype=np.int64)


def encode_clip(video: Video, frames: IntArray) -> bytes:
    """Encode consecutive frames again as an H.264 MP4 at the video's frame rate, visually lossless; return its bytes.

    The sound of exactly these frames' seconds, if there is any, is encoded as AAC.
    """
    target = io.BytesIO()
    sound = _sound_of(video, frames)
    times = video.info.times
    tick = 1 / video.fps if times is None else times.tick
    stamps = (frames if times is None else times.ticks()[frames]).tolist()
    with av.open(target, "w", format="mp4") as container:
        try:
            stream = cast(Any, container.add_stream("libx264", rate=video.fps))
        except ValueError as error:
            raise DecodeError(
                "this build of FFmpeg has no libx264", key=video.key, hint="install PyAV from PyPI"
            ) from error
        stream.width, stream.height, stream.pix_fmt = video.width & ~1, video.height & ~1, "yuv420p"
        stream.options = _X264
        stream.codec_context.time_base = tick
        stream.codec_context.colorspace = stream.codec_context.color_primaries = _BT709
        stream.codec_context.color_trc = stream.codec_context.color_range = 1  # BT.709, limited range
        track = None if sound is None else _add_track(container, sound)
        for begin in range(0, len(frames), _CHUNK):
            shown = video.frames(frames[begin : begin + _CHUNK]).data
            for number, picture in enumerate(shown, begin):
                frame = VideoFrame.from_ndarray(picture, format="rgb24").reformat(
                    format=stream.pix_fmt, dst_colorspace="ITU709", dst_color_range="MPEG", threads=1
                )
                frame.pts, frame.time_base = stamps[number] - stamps[0], tick
                container.mux(stream.encode(frame))
            if sound is not None:
                # Write sound next to its pictures, so that players need not seek.
                first, last = (int(at / video.fps * sound.rate) for at in (begin, begin + len(shown)))
                _mux_sound(container, track, sound, first, last if begin + _CHUNK < len(frames) else None)
        for one in (stream, track):
            if one is not None:
                container.mux(one.encode(None))
    return target.getvalue()


def _sound_of(video: Video, frames: IntArray) -> AudioClip | None:
    """Return the sound of exactly the seconds of consecutive frames; None if the video has none there."""
    if not video.has_sound:
        return None
    begin, end = float(frames[0] / video.fps), float((frames[-1] + 1) / video.fps)
    sound = video.audio(begin, end)
    if sound.data.shape[0] not in _LAYOUTS:
        sound = video.audio(begin, end, mono=True)
    return sound if sound.mask.any() else None


def _add_track(container: Any, sound: AudioClip) -> Any:
    channels = sound.data.shape[0]
    track = container.add_stream("aac", rate=sound.rate, layout=_LAYOUTS[channels])
    track.bit_rate = _AAC_BITS * channels
    return track


def _mux_sound(container: Any, track: Any, sound: AudioClip, first: int, last: int | None) -> None:
    samples = np.ascontiguousarray(sound.data[:, first:last])
    if samples.shape[1]:
        frame = AudioFrame.from_ndarray(samples, format="fltp", layout=_LAYOUTS[len(samples)])
        frame.sample_rate, frame.pts, frame.time_base = sound.rate, first, Fraction(1, sound.rate)
        container.mux(track.encode(frame))


def encode_still(rgb: UInt8Array, suffix: str) -> bytes:
    """Encode a picture, uint8 [H, W, 3], as ``.png`` or ``.jpg``."""
    if suffix == ".png":
        return png(rgb)
    if suffix not in (".jpg", ".jpeg"):
        raise UsageError(f"cannot write a picture as {suffix or 'a file without a suffix'}", hint="use .png or .jpg")
    return pictures.encode_frame(rgb, "mjpeg", "yuvj444p", {"qmin": "2", "qmax": "2"})
