"""One video stream of a sample: its facts, its frames, and what a notebook shows of it."""

from __future__ import annotations

import base64
import copy
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fastvid.audio.decoding import decode_audio
from fastvid.audio.packets import read_packets
from fastvid.audio.window import AudioClip, AudioWindow, check_rate
from fastvid.decode.access.frames import FrameBatch, decode_frames, thread_decoder
from fastvid.decode.access.indices import spread, wanted_frames
from fastvid.decode.access.pictures import tile_size
from fastvid.decode.access.shown import Shown
from fastvid.decode.clips import check_packets, read_clip
from fastvid.decode.request import Box, ClipRequest, Planes
from fastvid.errors import FastvidError, UsageError
from fastvid.format.flow import to_pixels
from fastvid.format.listed_samples import whole_file
from fastvid.format.mp4.audio import load_track
from fastvid.format.packets import PacketTable, StreamInfo, packet_offsets
from fastvid.format.schema import ANNOTATION_FIELDS, FACT_FIELDS, FLOW, Codec, StreamFlag
from fastvid.format.shard import Shard
from fastvid.report.fragment import fragment, missing_tile, player, tiles
from fastvid.runtime.arrays import Float32Array, UInt8Array
from fastvid.runtime.units import duration, size

_STRIP: Final = 8  # frames that a notebook shows of a video
_COLUMNS: Final = 12  # annotation columns that a notebook shows
_PLAYED: Final = {Codec.H264, Codec.VP9, Codec.AV1}  # what browsers play
# Samples per second of the silence of a sample without audio, if no rate is asked for.
_SILENT_RATE: Final = 48_000
_PLAYED_BYTES: Final = 16 << 20  # a larger video would make the notebook's file too large


class Video(Shown):
    """One video stream of a sample.

    Args:
        shard: Shard that contains it.
        row: Row of the sample in the shard.
        key: The sample's key.
        label: The sample's label, -1 if it has none.
        class_name: Name of the label, None if it has none.
        annotations: The dataset's annotations, and the sample's row there.
        stream: Name of the stream.
    """

    _NAME: ClassVar[str] = "video"
    _SUFFIXES: ClassVar[tuple[str, ...]] = (".mp4", ".m4a", ".png", ".html")

    def __init__(
        self,
        shard: Shard,
        row: int,
        *,
        key: str,
        label: int,
        class_name: str | None,
        annotations: tuple[pa.Table, int],
        stream: str = "rgb",
    ) -> None:
        self.key = key
        self.label = label
        self.class_name = class_name
        self.stream = stream
        self.info: StreamInfo = shard.info(row, stream)
        self._shard, self._row, self._annotations = shard, row, annotations

    def __getstate__(self) -> dict[str, Any]:
        # Another process needs one row of the annotations, not all.
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
        if name not in self.cameras:
            raise UsageError(
                f"sample has no camera {name!r}", key=self.key, hint=f"use one of {', '.join(self.cameras)}"
            )
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
            strip = self._strip(tile_size(info.height, info.width))._tiles(_STRIP)
        except FastvidError as error:
            strip = tiles([missing_tile(error.message, "not decoded")])
        return fragment(self.key, facts, above + strip)

    def _picture(self) -> UInt8Array:
        return self._strip()._picture()

    def _strip(self, size: tuple[int, int] | None = None) -> FrameBatch:
        return self._decode(spread(self.num_frames, _STRIP), None, size)

    def _middle(self, size: tuple[int, int] | None = None) -> UInt8Array:
        """Return the frame in the middle, uint8 [1, H, W, 3]."""
        return self._decode([self.num_frames // 2], None, size).data

    def _file(self, suffix: str) -> bytes | None:
        if suffix == ".m4a":
            return self._m4a()
        return self._mp4() if suffix == ".mp4" else super()._file(suffix)

    def _m4a(self) -> bytes:
        """Return the sample's sound as stored after checking it."""
        try:
            reader = self._shard.audio(self._row)
            if reader is not None:
                return bytes(reader.bytes(0, reader.size))
        except FastvidError as error:
            error.at_sample(self._shard.stem, self.key)
            raise
        raise UsageError("sample has no sound", key=self.key, hint="choose a sample with sound, or omit --audio")

    def _mp4(self) -> bytes:
        """Return the stream's file after checking its packets."""
        try:
            if self._shard.root is not None:
                _, data = whole_file(self._shard, self._row, self.stream)
            else:
                reader = self._shard.reader(self._row, self.stream)
                whole = bytearray(reader.size)
                reader([(0, memoryview(whole))])
                data = bytes(whole)
            records = self.table.records
            if not self.info.flags & StreamFlag.UNCHECKED:
                sizes, crc32 = records["size"].tolist(), records["crc32"].tolist()
                check_packets(memoryview(data), packet_offsets(records), sizes, crc32, np.arange(len(records)))
        except FastvidError as error:
            error.at_sample(self._shard.stem, self.key)
            raise
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
        """Seconds, exact: `num_frames` / `fps`."""
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
            frames: Indices in display order, 0 <= f < num_frames; any order, repeats allowed. Or a slice, which means
                what it means for a list.
            seconds: Times instead of `frames`, 0 <= s < duration; any order, repeats allowed. Each yields the frame
                that is shown then: the last whose own time is not later, where the time of frame f is the double
                nearest to f / fps.

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
        try:
            return decode_frames(
                self.info, self.table, reader, frames, seconds=seconds, size=size, gap=reader.gap, key=self.key
            )
        except FastvidError as error:
            error.at_sample(shard.stem, self.key)
            raise

    def flow(
        self,
        frames: slice | Sequence[int] | npt.ArrayLike | None = None,
        *,
        seconds: Sequence[float] | npt.ArrayLike | None = None,
    ) -> Float32Array:
        """Return the optical flow from frames to their next frames, float32 [T, H, W, 2]: x and y in pixels per frame.

        Args:
            frames: Indices in display order, as in `frames`; the last frame repeats the flow before it.
            seconds: Times instead of `frames`, as there.

        Raises:
            FormatError: If the sample has no flow.
            UsageError: If no frame is requested, or one is outside the video.
            StorageError: If the shard cannot be read.
            ChecksumError: If the shard's bytes differ from the indexed ones.
            DecodeError: If the packets do not decode to the frames.
        """
        shard, row = self._shard, self._row
        try:
            info = shard.info(row, "flow")
            wanted = wanted_frames(info, frames, seconds)
            box = Box(0, 0, info.height, info.width)
            request = ClipRequest(0, wanted, box, (info.height, info.width), stream="flow")
            clip = read_clip(request, info, shard.table(row, "flow"), shard.reader(row, "flow"))
            planes = Planes.packed(np.empty(Planes.nbytes(len(wanted), box), np.uint8), len(wanted), box)
            (error,) = thread_decoder().decode([clip], [planes])
            if error is not None:
                raise error
        except FastvidError as error:
            error.at_sample(shard.stem, self.key)
            raise
        return to_pixels(planes.y, info.flow_bound)

    def audio(
        self, start: float | None = None, stop: float | None = None, rate: int | None = None, *, mono: bool = False
    ) -> AudioClip:
        """Decode the sound of some seconds of the video; a sample without audio is silent.

        At rate r the window contains the samples round(start * r) to round(stop * r) - 1, halves rounded up; sample n
        is the sound at n / r seconds, with the same bits in every window of the same video. AAC that encodes noise
        without its samples (PNS) is the exception: such noise differs between windows.

        Args:
            start: First second, counted from the first frame of the video; 0 by default. Before the track it is silent.
            stop: Last second; by default the end of the video. After the track it is silent.
            rate: Samples per second; by default those of the track, 48,000 without one.
            mono: Whether to return the mean of all channels; by default all channels of the track, one without.

        Raises:
            UsageError: If the window ends before it begins, or the rate is out of range.
            StorageError: If the shard cannot be read.
            ChecksumError: If the shard's bytes differ from the indexed ones.
            FormatError: If the sidecar is older than audio, or the M4A's tables are malformed.
            DecodeError: If the packets do not decode.
        """
        begin, end = Fraction(start or 0), Fraction(self.num_frames) / self.fps if stop is None else Fraction(stop)
        if end < begin:
            raise UsageError(f"audio from {float(begin)} to {float(end)} s ends before it begins", key=self.key)
        if rate is not None:
            check_rate(rate)
        try:
            reader = self._shard.audio(self._row)
            track = None if reader is None else load_track(reader)
            own = _SILENT_RATE if track is None else track.info.sample_rate
            window = AudioWindow.of(begin, end, rate or own, 1 if mono else None)
            encoded = None if reader is None or track is None else read_packets(reader, track, window)
            return decode_audio(encoded, window)
        except FastvidError as error:
            error.at_sample(self._shard.stem, self.key)
            raise
