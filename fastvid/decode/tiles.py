"""Cut JPEG pictures to the tiles that a crop shows, without decoding them.

In a picture of profile `tiles`, a restart marker ends each tile, and the next tile depends on nothing before it (ITU-T
T.81, E.1.4). Some of the tiles, with their markers renumbered from 0 and a header with their total size, are a smaller
JPEG that any decoder decodes; its planes equal the same part of the whole picture bit for bit. In the same way, tiles
of several pictures are joined below one another to one JPEG, so that a clip takes one call of the decoder: between two
calls, a thread may have to wait for Python's global lock.

Markers are found by searching the bytes that were read: within a scan, no other byte FF is followed by one of their
codes. So no table of offsets is stored, which might contradict the bytes. Only pictures that fastvid encoded are cut,
because their structure was checked when they were written; a picture without this structure is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, NamedTuple

import numpy as np

from fastvid.decode.request import Box, ClipRequest, EncodedClip
from fastvid.format.headers import jpeg_segments
from fastvid.format.schema import INPUT_PADDING, Codec, StreamFlag
from fastvid.runtime.arrays import IntArray, UInt8Array

_BLOCK: Final = 16  # height and width in pixels of the blocks of 4:2:0 JPEG
# Decode so many pixels around the crop as well: conversion to RGB interpolates chroma between neighbours.
_MARGIN: Final = 2
# Most pixels in a JPEG picture made of several, so that all are converted while in the CPU cache.
_PIXELS: Final = 1 << 20
_MOST_ROWS: Final = 0xFFFF  # the height of a JPEG picture has 16 bits (ITU-T T.81, B.2.2)
_CONFORMS: Final = int(StreamFlag.CONFORMS)
# Codes of markers: frame header, restart interval, restart 0 to 7, end of the picture (ITU-T T.81, table B.1).
_FRAME, _INTERVAL, _RESTART, _END = 0xC0, 0xDD, 0xD0, 0xD9
# What follows the size in a frame header: three components, 4:2:0, and their tables.
_COMPONENTS: Final = bytes([3, 1, 0x22, 0, 2, 0x11, 1, 3, 0x11, 1])


@dataclass(frozen=True, slots=True)
class _Tiles:
    """The layout of the tiles in a clip's pictures, which all have the same header."""

    header: bytes
    size_at: int  # offset in the header of height and width, two bytes each
    width: int  # of a tile, in pixels; its height is one block
    columns: int  # tiles in a row of the picture
    rows: int

    def sized(self, height: int, width: int) -> bytes:
        """Return the header of a picture of another size."""
        size = height.to_bytes(2, "big") + width.to_bytes(2, "big")
        return self.header[: self.size_at] + size + self.header[self.size_at + 4 :]


class Cut(NamedTuple):
    """JPEGs, each with the parts of several pictures of a clip below one another."""

    data: memoryview  # followed by padding
    sizes: list[int]  # of each JPEG in bytes; each begins where the one before ends
    part: Box  # what is decoded of each picture
    rows: int  # of pixels from each picture to the next
    pictures: int  # in each JPEG; the last one may have fewer

    def jpegs(self, shows: Sequence[int]) -> Iterator[tuple[memoryview, int, Sequence[int]]]:
        """Yield each JPEG, its height, and which frames it shows; `shows`: those of all pictures."""
        end = 0
        for number, size in enumerate(self.sizes):
            some = shows[number * self.pictures : (number + 1) * self.pictures]
            start, end = end, end + size
            yield self.data[start:end], (len(some) - 1) * self.rows + self.part.height, some

    def request(self, request: ClipRequest) -> ClipRequest:
        """Return a request of the clip with its crop moved into a part."""
        box = request.box
        return replace(request, box=Box(box.y - self.part.y, box.x - self.part.x, box.height, box.width))


def cut_tiles(clip: EncodedClip, *, pictures: int | None = None) -> Cut | None:
    """Reduce JPEG pictures to the tiles that their crop shows; return None if they have no tiles.

    `pictures`: how many to put into each JPEG, by default as many as the CPU cache holds: one call then decodes them,
    and the tables in their header are read once.
    """
    tiles = _tiles(clip)
    if tiles is None:
        return None
    part = decoded_part(clip.request.box, (clip.info.height, clip.info.width), tiles.width)
    rows = -(-part.height // _BLOCK) * _BLOCK
    pictures = pictures or max(1, min(_PIXELS // part.width, _MOST_ROWS) // rows)
    top, left = part.y // _BLOCK, part.x // tiles.width
    places = slice(top, top + rows // _BLOCK), slice(left, left + -(-part.width // tiles.width))
    starts = _starts(clip, tiles)
    grid = (len(starts), tiles.rows, tiles.columns)
    begins, ends = (side.reshape(grid)[:, *places] for side in (starts[:, :-1], starts[:, 1:]))
    headers = [
        tiles.sized((min(pictures, len(starts) - first) - 1) * rows + part.height, part.width)
        for first in range(0, len(starts), pictures)
    ]
    data, sizes = _joined(clip.data, begins, ends, headers, pictures)
    return Cut(data, sizes, part, rows, pictures)


def _joined(
    source: memoryview, begins: IntArray, ends: IntArray, headers: Sequence[bytes], pictures: int
) -> tuple[memoryview, list[int]]:
    """Return JPEGs made of tiles, followed by padding, and their sizes in bytes.

    `begins`, `ends`: first byte in `source` of each tile, and the byte after its marker, int64 [P, rows, columns].
    `headers`: one for each JPEG, of equal length. `pictures`: how many to put into each.
    """
    # The kept tiles of a row are one range of bytes, from the first tile to the marker after the last one.
    ranges = zip(begins[:, :, 0].tolist(), ends[:, :, -1].tolist(), strict=True)
    parts = list[bytes | memoryview]()
    for number, row in enumerate(ranges):
        if number % pictures == 0:
            parts.append(headers[number // pictures])
        parts += [source[begin:end] for begin, end in zip(*row, strict=True)]
    data = bytearray().join([*parts, bytes(INPUT_PADDING)])
    before = len(headers[0]) * (np.arange(len(begins)) // pictures + 1)
    stops = np.cumsum(ends - begins).reshape(len(begins), -1) + before[:, None]
    sizes, end = list[int](), 0
    for first in range(0, len(stops), pictures):
        some = stops[first : first + pictures].ravel()
        np.frombuffer(data, np.uint8)[some - 1] = _codes(len(some))
        sizes.append(int(some[-1]) - end)
        end += sizes[-1]
    return memoryview(data), sizes


def reduced(clip: EncodedClip) -> EncodedClip:
    """Return a clip reduced to the tiles that its crop shows, its crop moved accordingly; without tiles unchanged."""
    cut = cut_tiles(clip, pictures=1) if clip.info.codec is Codec.MJPEG else None
    if cut is None or (cut.part.height, cut.part.width) == (clip.info.height, clip.info.width):
        return clip
    return replace(
        clip,
        request=cut.request(clip.request),
        info=replace(clip.info, height=cut.part.height, width=cut.part.width),
        data=cut.data,
        starts=np.cumsum([0, *cut.sizes[:-1]]),
        sizes=np.array(cut.sizes),
    )


def decoded_part(box: Box, sides: tuple[int, int], width: int) -> Box:
    """Return the part of a picture that is decoded for a crop: whole tiles.

    `sides`: height and width of the picture. `width`: width of a tile. All in pixels.
    """
    y, x = max(box.y - _MARGIN, 0) // _BLOCK * _BLOCK, max(box.x - _MARGIN, 0) // width * width
    below = min(-(-(box.y + box.height + _MARGIN) // _BLOCK) * _BLOCK, sides[0])
    right = min(-(-(box.x + box.width + _MARGIN) // width) * width, sides[1])
    return Box(y, x, below - y, right - x)


def _tiles(clip: EncodedClip) -> _Tiles | None:
    """Return the tiles of a clip's pictures; None if they have none, or if fastvid did not encode them."""
    if not int(clip.info.flags) & _CONFORMS:
        return None
    start, size = int(clip.starts[0]), int(clip.sizes[0])
    packet, info = clip.data[start : start + size], clip.info
    interval, size_at, end = 0, 0, 0
    for code, first, end in jpeg_segments(packet):
        if code == _FRAME and packet[first + 5 : end] == _COMPONENTS:
            size_at = first + 1
        elif code == _INTERVAL:
            interval = int.from_bytes(packet[first:end], "big")
    blocks, rows = -(-info.width // _BLOCK), -(-info.height // _BLOCK)
    if not interval or not size_at or blocks % interval:
        return None
    return _Tiles(bytes(packet[:end]), size_at, interval * _BLOCK, blocks // interval, rows)


def _starts(clip: EncodedClip, tiles: _Tiles) -> IntArray:
    """Return the first byte of each tile, and the byte after the last one's marker, int64 [P, tiles + 1]."""
    source = np.frombuffer(clip.data, np.uint8)
    wanted, header = _codes(tiles.rows * tiles.columns), tiles.header
    begins, ends = clip.starts + len(header), clip.starts + clip.sizes
    marks = np.flatnonzero(source[:-1] == 0xFF)
    codes = source[marks + 1]
    marks, codes = marks[codes != 0], codes[codes != 0]  # FF 00 is a byte FF of a scan
    first = np.searchsorted(marks, begins)
    intact = np.searchsorted(marks, ends) - first == len(wanted)
    if intact.all():
        places = first[:, None] + np.arange(len(wanted))
        after: IntArray = marks[places] + 2
        intact = (codes[places] == wanted).all(axis=1) & (after[:, -1] == ends)
        headers = zip(clip.starts.tolist(), begins.tolist(), strict=True)
        intact &= [clip.data[start:end] == header for start, end in headers]
    if not intact.all():
        raise clip.error(
            f"a JPEG picture does not have the {tiles.rows} x {tiles.columns} tiles that its header says",
            hint="run `fastvid verify`: it was not written by fastvid, or was changed",
            frame=int(clip.shows[np.argmin(intact)]),
        )
    return np.column_stack((begins, after))


@cache
def _codes(count: int) -> UInt8Array:
    """Return the code of the marker that ends each tile of a picture of `count` tiles, uint8 [count]."""
    codes = np.arange(count) % 8 + _RESTART
    codes[-1] = _END
    return codes.astype(np.uint8)
