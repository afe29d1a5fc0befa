"""Cut JPEG pictures to the tiles that a crop shows, without decoding them.

In a picture of profile `tiles`, a restart marker ends each tile, and the next tile depends on nothing before it (ITU-T
T.81, E.1.4). Some of the tiles, with their markers renumbered from 0 and a header with their total size, are a smaller
JPEG that any decoder decodes; its planes equal the same part of the whole picture bit for bit.

Markers are found by searching the bytes that were read: within a scan, no other byte FF is followed by one of their
codes. So no table of offsets is stored, which might contradict the bytes. Only pictures that fastvid encoded are cut,
because their structure was checked when they were written; a picture without this structure is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import numpy as np

from fastvid.decode.request import Box, EncodedClip
from fastvid.format.headers import jpeg_segments
from fastvid.format.schema import INPUT_PADDING
from fastvid.runtime.arrays import IntArray, UInt8Array

_BLOCK: Final = 16  # height and width in pixels of the blocks of 4:2:0 JPEG
# Decode so many pixels around the crop as well: conversion to RGB interpolates chroma between neighbours.
_MARGIN: Final = 2
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


def cut_tiles(clip: EncodedClip) -> EncodedClip:
    """Return a clip reduced to the tiles that its crop shows, its crop moved accordingly; without tiles unchanged.

    `clip`: of JPEG pictures that fastvid encoded.
    """
    tiles = _tiles(clip)
    if tiles is None:
        return clip
    info, box = clip.info, clip.request.box
    part = decoded_part(box, (info.height, info.width), tiles.width)
    if (part.height, part.width) == (info.height, info.width):
        return clip
    header = np.frombuffer(tiles.header, np.uint8).copy()
    header[tiles.size_at : tiles.size_at + 4] = divmod(part.height, 256) + divmod(part.width, 256)
    rows = np.arange(part.y // _BLOCK, -(-(part.y + part.height) // _BLOCK))
    columns = np.arange(part.x // tiles.width, -(-(part.x + part.width) // tiles.width))
    data, sizes = _join(clip, tiles, header, rows[:, None] * tiles.columns + columns)
    return replace(
        clip,
        request=replace(clip.request, box=Box(box.y - part.y, box.x - part.x, box.height, box.width)),
        info=replace(info, height=part.height, width=part.width),
        data=data.data,
        starts=np.cumsum(sizes) - sizes,
        sizes=sizes,
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
    """Return the tiles of a clip's pictures; None if they have none."""
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


def _join(clip: EncodedClip, tiles: _Tiles, header: UInt8Array, kept: IntArray) -> tuple[UInt8Array, IntArray]:
    """Return the bytes of smaller pictures made of some tiles, and the size of each picture in bytes, int64 [P].

    `kept`: numbers of the tiles, int64 [rows, columns].
    """
    source = np.frombuffer(clip.data, np.uint8)
    starts = _starts(clip, tiles, source)
    # The kept tiles of a row are one range of bytes, from the first tile to the marker after the last one.
    rows = zip(starts[:, kept[:, 0]].tolist(), starts[:, kept[:, -1] + 1].tolist(), strict=True)
    parts = []
    for firsts, ends in rows:
        parts += [header, *(source[first:end] for first, end in zip(firsts, ends, strict=True))]
    data = np.concatenate([*parts, np.zeros(INPUT_PADDING, np.uint8)])
    lengths = (starts[:, kept + 1] - starts[:, kept]).reshape(len(starts), -1)
    ends = np.cumsum(lengths, axis=1) + len(header)
    sizes: IntArray = ends[:, -1]
    data[(np.cumsum(sizes) - sizes)[:, None] + ends - 1] = _codes(kept.size)
    return data, sizes


def _starts(clip: EncodedClip, tiles: _Tiles, source: UInt8Array) -> IntArray:
    """Return the first byte of each tile, and the byte after the last one's marker, int64 [P, tiles + 1]."""
    wanted, header = _codes(tiles.rows * tiles.columns), np.frombuffer(tiles.header, np.uint8)
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
        intact &= (source[clip.starts[:, None] + np.arange(len(header))] == header).all(axis=1)
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
