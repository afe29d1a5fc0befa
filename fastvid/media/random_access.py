"""Find the packets of a stream at which decoding can begin as if everything before them had been decoded.

A container's key flag does not promise that: it also marks open groups of pictures and recovery points. What promises
it is the packet's own header. At an IDR picture (H.264, H.265) or a key frame of VP9 a decoder discards all references
and derived state, so the frames from there on depend only on packets from there on and on the parameter sets. So the
parameter sets must not change inside the stream, and every packet that the container marks must be such a picture.
"""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np

from fastvid.errors import FormatError
from fastvid.format.codecs.bitstream import Bytes, nal_length_size, nal_units
from fastvid.format.schema import Codec
from fastvid.runtime.arrays import IntArray

# Containers whose packets have reliable presentation times and an index by them. Not MPEG-TS and -PS, whose demuxers
# guess positions, nor AVI, which stores no presentation times.
_CONTAINERS: Final = frozenset({"mov", "matroska"})
# Slices, IDR slices and parameter sets: ITU-T H.264 table 7-1, H.265 table 7-1.
_SLICES: Final = {Codec.H264: frozenset(range(1, 6)), Codec.HEVC: frozenset(range(32))}
_CLEAN: Final = {Codec.H264: frozenset({5}), Codec.HEVC: frozenset({19, 20})}
_PARAMETERS: Final = {Codec.H264: frozenset({7, 8, 13, 15}), Codec.HEVC: frozenset({32, 33, 34})}
# x264 writes its version into the first packet. Decoders work around bugs of versions before 151 if they have seen it.
_X264: Final = re.compile(rb"x264 - core (\d+)")
_FIXED_X264: Final = 151


class RandomAccess:
    """Collects the packets of a stream, in decode order."""

    def __init__(self, container: str, codec: str, extradata: bytes) -> None:
        known = {one.label: one for one in (Codec.H264, Codec.HEVC, Codec.VP9)}
        self._codec = known.get(codec)
        self._extradata = extradata
        self._length_size = None if self._codec in (None, Codec.VP9) else nal_length_size(self._codec, extradata)
        self._possible = container in _CONTAINERS and self._codec is not None
        if self._codec in _SLICES and self._length_size is None:
            self._possible = False
        self._keys: list[int] = []
        self._first = True
        self.old_x264 = False

    def add(self, packet: Any) -> None:
        """Take a packet of PyAV."""
        if not self._possible:
            return
        data = memoryview(packet)
        if self._first:
            self._first, found = False, _X264.search(data)
            # Its workarounds concern 4:4:4, and streams of 2006.
            self.old_x264 = found is not None and int(found[1]) < _FIXED_X264
        try:
            clean = self._is_clean(data)
        except (FormatError, IndexError):
            self._possible = False
            return
        if not packet.is_keyframe:
            return
        if clean and packet.pts is not None:
            self._keys.append(packet.pts)
        else:
            self._possible = False

    def keys(self, times: IntArray, shown: int) -> IntArray:
        """Return the times of the packets at which decoding can begin, in ticks, ascending; empty if unproven.

        `times`: presentation times of the shown frames, ascending. `shown`: number of shown frames.
        """
        distinct = len(times) == shown and bool((np.diff(times) > 0).all())
        if not self._possible or not distinct or any(b <= a for a, b in zip(self._keys, self._keys[1:], strict=False)):
            return np.zeros(0, np.int64)
        return np.asarray(self._keys, np.int64)

    def _is_clean(self, data: Bytes) -> bool:
        """Return whether a packet is a picture that discards everything before it; note changed parameter sets."""
        if self._codec is Codec.VP9:
            return _is_vp9_key(data)
        assert self._codec is not None
        kinds = set()
        for unit in nal_units(data, self._length_size):
            kind = unit[0] & 31 if self._codec is Codec.H264 else unit[0] >> 1 & 63
            if kind in _PARAMETERS[self._codec] and bytes(unit) not in self._extradata:
                raise FormatError("parameter sets change inside the stream")
            if kind in _SLICES[self._codec]:
                kinds.add(kind)
        return bool(kinds) and kinds <= _CLEAN[self._codec]


def _is_vp9_key(data: Bytes) -> bool:
    """Return whether the first frame of a packet is a key frame: VP9 bitstream specification, section 6.2."""
    bits = data[0] << 1 if data[0] & 0x30 == 0x30 else data[0]  # profile 3 has one bit more
    return data[0] >> 6 == 2 and not bits & 0x08 and not bits & 0x04
