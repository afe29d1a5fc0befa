"""Random access to frames of samples, for notebooks, pages and checks.

    dataset = fastvid.open("shards/mine", split="train")
    video = dataset["some_key"]
    video.frames([0, 8]).data        # uint8 [2, H, W, 3]
    video.audio(1.2, 3.4).data       # float32 [C, S]

Like the loader, reads and decodes only the planned packets, and checks their checksums.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Final, overload

import numpy as np
import numpy.typing as npt

from fastvid.audio.decoding import decode_audio
from fastvid.audio.packets import read_packets
from fastvid.audio.window import AudioClip, AudioWindow, check_rate
from fastvid.decode.clips import Read, read_clip
from fastvid.decode.pyav import PyAvDecoder
from fastvid.decode.request import Box, ClipRequest, Decoder, FrameBatch, Planes, Rgb
from fastvid.errors import FastvidError, SampleNotFoundError, UsageError
from fastvid.format.audio import load_track
from fastvid.format.dataset import Dataset
from fastvid.format.flow import to_pixels
from fastvid.format.packets import PacketTable, StreamInfo
from fastvid.format.shard import Shard
from fastvid.runtime.arrays import Float32Array, IntArray
from fastvid.runtime.checks import check_integer

_local = threading.local()

# Samples per second of the silence of a sample without audio, if no rate is asked for.
_SILENT_RATE: Final = 48_000


class Video:
    """One video stream of a sample.

    Args:
        shard: Shard that contains it.
        row: Row of the sample in the shard.
        key: The sample's key.
        label: The sample's label, -1 if it has none.
        stream: Name of the stream.
    """

    def __init__(self, shard: Shard, row: int, *, key: str, label: int, stream: str = "rgb") -> None:
        self.key = key
        self.label = label
        self.stream = stream
        self.info: StreamInfo = shard.info(row, stream)
        self._shard, self._row = shard, row

    def __len__(self) -> int:
        return self.info.num_frames

    def __repr__(self) -> str:
        info = self.info
        rate = f"{float(info.fps):.6g} fps"
        return (
            f"Video({self.key!r}, {info.num_frames} frames of {info.width}x{info.height}, {rate}, {info.codec.label})"
        )

    @property
    def num_frames(self) -> int:
        """Number of frames."""
        return self.info.num_frames

    @property
    def fps(self) -> Fraction:
        """Frames per second, exact."""
        return self.info.fps

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

    def frames(self, frames: Sequence[int] | npt.ArrayLike) -> FrameBatch:
        """Decode frames.

        Args:
            frames: Indices in display order, 0 <= f < num_frames; any order, repeats allowed.

        Raises:
            UsageError: If no frame is requested, or one is outside the video.
            StorageError: If the shard cannot be read.
            ChecksumError: If the shard's bytes differ from the indexed ones.
            DecodeError: If the packets do not decode to the frames.
        """
        shard = self._shard
        reader = shard.reader(self._row, self.stream)
        try:
            return decode_frames(self.info, self.table, reader, frames)
        except FastvidError as error:
            error.at_sample(shard.stem, self.key)
            raise

    def flow(self, frames: Sequence[int] | npt.ArrayLike) -> Float32Array:
        """Return the optical flow from frames to their next frames, float32 [T, H, W, 2]: x and y in pixels per frame.

        Args:
            frames: Indices in display order, 0 <= f < num_frames; the last frame repeats the flow before it.

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
            wanted = np.atleast_1d(np.asarray(frames, dtype=np.int64))
            box = Box(0, 0, info.height, info.width)
            request = ClipRequest(0, wanted, box, (info.height, info.width), stream="flow")
            clip = read_clip(request, info, shard.table(row, "flow"), shard.reader(row, "flow"))
            planes = Planes.packed(np.empty(Planes.nbytes(len(wanted), box), np.uint8), len(wanted), box)
            (error,) = _decoder().decode([clip], [planes])
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


class VideoDataset(Dataset):
    """A `Dataset` whose samples are videos: ``dataset["key"]``, ``dataset[7]``, ``for video in dataset``.

    ``dataset[10:20]`` and ``dataset[[1, 5, 8]]`` are datasets of these samples, see `Dataset.select`.
    """

    @overload
    def __getitem__(self, sample: str | int) -> Video: ...

    @overload
    def __getitem__(self, sample: slice | Sequence[int] | IntArray) -> VideoDataset: ...

    def __getitem__(self, sample: str | int | slice | Sequence[int] | IntArray) -> Video | VideoDataset:
        """Return a sample by its key or number, or a dataset of several.

        Raises:
            SampleNotFoundError: If the selection has no such sample; also a KeyError and an IndexError.
            UsageError: If the numbers of several samples are not ascending integers.
        """
        if isinstance(sample, slice | Sequence | np.ndarray) and not isinstance(sample, str):
            return self.select(sample)
        number = self.find(sample) if isinstance(sample, str) else check_integer("sample", sample)
        if not 0 <= number < len(self):
            raise SampleNotFoundError(
                f"sample {number} is outside the selection of {len(self)}",
                file=self.storage.url,
                hint=f"give a number from 0 to {len(self) - 1}",
            )
        shards, rows = self.locate([number])
        shard = self.shard(int(shards[0]))
        return Video(shard, int(rows[0]), key=self.key(number), label=int(self.labels[number]))

    def __iter__(self) -> Iterator[Video]:
        return (self[number] for number in range(len(self)))

    def __contains__(self, key: object) -> bool:
        return key in self._by_key


def open(  # noqa: A001 - users type fastvid.open
    path: str | os.PathLike[str], split: str | None = None, where: str | None = None, generation: int | None = None
) -> VideoDataset:
    """Open a dataset.

    Args:
        path: Folder or URL of the dataset.
        split: Value of the column ``split``, or ``column:value`` for another split column; all samples by default.
        where: Condition in DuckDB's SQL over the annotations' columns and ``class``, for example
            ``"duration > 2 and class = 'archery'"``.
        generation: Number of the generation; the current one by default.

    Raises:
        StorageError: If there is no dataset.
        VersionError: If its major version is newer.
        UsageError: If the split or the condition is wrong, or no sample matches.
    """
    return VideoDataset(os.fspath(path), split=split, where=where, generation=generation)


def decode_frames(
    info: StreamInfo,
    table: PacketTable,
    read: Read,
    frames: Sequence[int] | npt.ArrayLike,
    *,
    decoder: Decoder | None = None,
) -> FrameBatch:
    """Decode whole frames of a stream to RGB. A stream of odd size loses its last row or column.

    Args:
        info: The stream.
        table: Its packets.
        read: Reads its bytes.
        frames: Indices in display order; any order, repeats allowed.
        decoder: Any decoder that writes `Rgb`; by default PyAV, kept open for the calling thread.

    Raises:
        UsageError: If no frame is requested, or one is outside the stream.
        ChecksumError: If bytes differ from the indexed ones.
        DecodeError: If the packets do not decode to the frames.
    """
    wanted = np.atleast_1d(np.asarray(frames, dtype=np.int64))
    size = (info.height & ~1, info.width & ~1)
    clip = read_clip(ClipRequest(0, wanted, Box(0, 0, *size), size), info, table, read)
    rgb = np.empty((3, len(wanted), *size), dtype=np.uint8)
    (error,) = (decoder or _decoder()).decode([clip], [Rgb(rgb)])
    if error is not None:
        raise error
    seconds = wanted * info.fps.denominator / info.fps.numerator
    return FrameBatch(np.ascontiguousarray(rgb.transpose(1, 2, 3, 0)), wanted, seconds)


def _decoder() -> PyAvDecoder:
    decoder: PyAvDecoder | None = getattr(_local, "decoder", None)
    if decoder is None:
        decoder = _local.decoder = PyAvDecoder(max_contexts=4)
    return decoder
