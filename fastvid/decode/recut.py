"""Several clips out of frames that were decoded once, other crops and frames, each as if decoded alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from av.video.frame import VideoFrame

from fastvid.decode.request import Box, ClipRequest, Output, Planes, Rgb
from fastvid.decode.swscale import COLORSPACE, RgbConverter
from fastvid.format.packets import StreamInfo

SLACK: Final = 64
"""Spare bytes that must follow the planes: the converter's vectors may read past the last row."""


class Recutter:
    """Cuts clips out of decoded planes; for one thread."""

    def __init__(self) -> None:
        self._converter = RgbConverter()

    def cut(
        self,
        info: StreamInfo,
        box: Box,
        planes: Planes,
        index: Sequence[int],
        request: ClipRequest,
        output: Output,
    ) -> None:
        """Writes one clip.

        Args:
            info: The stream.
            box: What `planes` show of it.
            planes: Decoded frames, with SLACK bytes behind them.
            index: Which of the planes' frames stands at each place of the clip, [T].
            request: The clip; its crop lies inside `box`.
            output: Where it goes.
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
    """Whether a stream's frames can be converted once they are decoded; a decoder says what is wrong with others."""
    return info.matrix in COLORSPACE


def _span(start: int, length: int, scale: int) -> slice:
    return slice(start // scale, (start + length) // scale)
