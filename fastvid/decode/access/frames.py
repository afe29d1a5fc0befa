"""Decode frames of a stream to a batch that people can look at."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from fastvid.decode.access.indices import shown_at, wanted_frames
from fastvid.decode.access.pictures import contact_sheet, encode_picture, shrink, tile_size
from fastvid.decode.access.shown import Shown
from fastvid.decode.clips import Read, read_clip
from fastvid.decode.pyav import PyAvDecoder
from fastvid.decode.request import Box, ClipRequest, Decoder, Rgb
from fastvid.format.packets import PacketTable, StreamInfo
from fastvid.report.fragment import fragment, tile, tiles
from fastvid.runtime.arrays import FloatArray, IntArray, UInt8Array
from fastvid.runtime.units import things

_TILES: Final = 16  # frames that a notebook shows of a batch

_local = threading.local()


@dataclass(frozen=True, slots=True, eq=False)
class FrameBatch(Shown):
    """Frames of one sample for display and inspection, for example in a notebook.

    Attributes:
        data: uint8 [T, H, W, 3], RGB.
        frames: Frame indices, int64 [T].
        seconds: When each frame is shown, float64 [T]: the doubles nearest to f / fps.
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
        return contact_sheet(self.data)

    def _tiles(self, most: int) -> str:
        """Return the first frames as markup, each with its number and time."""
        small = shrink(self.data[:most], *tile_size(*self.data.shape[1:3]))
        return tiles(
            tile(encode_picture(picture), picture.shape[1], f"frame {frame}", f"{second:.2f} s")
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
    decoder: Decoder | None = None,
    gap: int = 0,
    key: str = "",
) -> FrameBatch:
    """Decode whole frames of a stream to RGB. A stream of odd size loses its last row or column.

    Args:
        info: The stream.
        table: Its packets.
        read: Reads its bytes.
        frames: Indices in display order, any order, repeats allowed; or a slice.
        seconds: Times instead of `frames`.
        size: Height and width to resize to; by default those of the stream.
        decoder: Any decoder that writes `Rgb`; by default PyAV, kept open for the calling thread.
        gap: Packets at most this many bytes apart are read together.
        key: The sample's key, for the result.

    Raises:
        UsageError: If no frame is requested, or one is outside the stream.
        ChecksumError: If bytes differ from the indexed ones.
        DecodeError: If the packets do not decode to the frames.
    """
    wanted = wanted_frames(info, frames, seconds)
    whole = (info.height & ~1, info.width & ~1)
    size = size or whole
    clip = read_clip(ClipRequest(0, wanted, Box(0, 0, *whole), size), info, table, read, gap=gap)
    rgb = np.empty((3, len(wanted), *size), dtype=np.uint8)
    (error,) = (decoder or thread_decoder()).decode([clip], [Rgb(rgb)])
    if error is not None:
        raise error
    return FrameBatch(np.stack(tuple(rgb), axis=-1), wanted, shown_at(info, wanted), key)


def thread_decoder() -> PyAvDecoder:
    """Return the calling thread's decoder, which stays open."""
    decoder: PyAvDecoder | None = getattr(_local, "decoder", None)
    if decoder is None:
        decoder = _local.decoder = PyAvDecoder(max_contexts=4)
    return decoder
