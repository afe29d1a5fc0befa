"""Cut several clips from frames decoded once, each identical to decoding it by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from av.video.frame import VideoFrame

from fastvid.decode.request import Box, ClipRequest, DecoderOutput, Planes, Rgb
from fastvid.decode.swscale import COLORSPACE, RgbConverter
from fastvid.format.packets import StreamInfo

SLACK: Final = 64
"""Bytes of padding required after the planes: the converter's SIMD code may read past the last row."""


class Recutter:
    """Cuts clips out of decoded planes. Not thread-safe."""

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
        """Write one clip.

        `planes`: decoded frames, followed by SLACK bytes. `index`: for each frame of the clip its index in
        `planes`, [T].
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
        self._converter.begin(info, replace(request, box=inside), output.data)
        first: dict[int, int] = {}
        for place, frame in enumerate(index):
            if first.setdefault(frame, place) == place:
                arrays = (planes.y[frame], planes.u[frame], planes.v[frame])
                self._converter.write(VideoFrame.from_dlpack(arrays, format="yuv420p"), place)
        for place, frame in enumerate(index):
            if first[frame] != place:
                output.data[:, place] = output.data[:, first[frame]]


def can_cut(info: StreamInfo) -> bool:
    """Return whether a stream's frames can be converted; for other streams the decoder raises an error."""
    return info.matrix in COLORSPACE


def _span(start: int, length: int, scale: int) -> slice:
    return slice(start // scale, (start + length) // scale)
