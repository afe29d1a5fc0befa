"""The video tensor of a batch: its rows' shapes, and how rows of different shapes are put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch

from fastvid.decode.colours import Layout, Pixels, empty_batch
from fastvid.errors import UsageError
from fastvid.load.clips.clip import BatchRow, Clip
from fastvid.load.clips.rules import ClipRules
from fastvid.load.memory.device import LoaderStream
from fastvid.load.options import Output
from fastvid.load.order.batches import ClipShape
from fastvid.load.order.buckets import Buckets
from fastvid.load.order.packed import Packed
from fastvid.runtime.checks import check_choice

Collate = Literal["stack", "pad", "list"]

Video = torch.Tensor | list[torch.Tensor]
"""One tensor of all rows, or a list of one tensor a row."""


_SMALLEST: Final = (1, 2, 2)
"""Shape of a batch that has only masked rows, if nothing else decides it."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """Shapes of a batch's rows, each (T, H, W) in pixels."""

    rows: list[ClipShape]  # shape of each row; (0, 0, 0) for a masked row of a batch whose rows differ
    uniform: ClipShape | None  # the shape of all rows; None if they differ, or are delivered as a list
    padded: ClipShape | None = None  # the shape that rows are padded to; None if they are not


def one_shape(clips: Sequence[BatchRow | None], planned: ClipShape | None) -> ClipShape:
    """Return the shape of all clips.

    `clips`: the clip of each row; None for a masked row.
    """
    shapes = [planned, *(one.clip_shape for one in clips if isinstance(one, Clip))]
    kinds = list(dict.fromkeys(shape for shape in shapes if shape is not None)) or [_SMALLEST]
    if len(kinds) > 1:
        raise UsageError(
            f"clips of a batch have the shapes {', '.join(map(str, kinds))} (frames, height, width)",
            hint="use collate='pad' or 'list', Buckets, or a sampler and a crop of one shape",
        )
    return kinds[0]


@dataclass(frozen=True)
class VideoSpec:
    """Shape, normalisation and device of a batch's video tensor."""

    shape: ClipShape | None  # frames per clip, height and width in pixels; None if they differ between clips
    layout: Layout
    pixels: Pixels | None  # how values are normalised; None for uint8 levels 0 to 255 as decoded
    stream: LoaderStream
    channels_last: bool = False
    collate: Collate = "stack"  # how rows are put together

    def shapes(self, clips: Sequence[BatchRow | None], planned: ClipShape | None) -> Shapes:
        """Return the shapes of a batch's rows.

        `clips`: the clip of each row; None for a masked row. `planned`: shape of the largest clip of the global
        batch, of which these are one rank's rows; None if it is not known before clips are planned.
        """
        whole = self.shape if planned is None else planned
        if self.collate == "stack":
            whole = one_shape(clips, whole)
            return Shapes([whole] * len(clips), whole)
        rows = [one.clip_shape if isinstance(one, Clip) else None for one in clips]
        kinds = [shape for shape in (whole, *rows) if shape is not None] or [_SMALLEST]
        each = [shape or (0, 0, 0) for shape in rows]
        if self.collate == "list":
            return Shapes(each, None)
        largest = max(t for t, _, _ in kinds), max(h for _, h, _ in kinds), max(w for _, _, w in kinds)
        if whole not in (None, largest):
            raise UsageError(
                f"a clip has more frames, rows or columns than counted: {largest}, expected at most {whole}",
                hint="let the sampler's count() and the crop's sizes() return what draw() makes",
            )
        whole = largest
        return Shapes(each, None, whole) if set(each) != {whole} else Shapes(each, whole)

    def arranged(self, levels: torch.Tensor) -> torch.Tensor:
        """Return uint8 levels [B, 3, T, H, W] on the device in the layout and memory format of the batch."""
        if self.layout == "BCTHW" and not self.channels_last:
            return levels
        clips, channels, *shape = levels.shape
        whole = (clips, channels, shape[0], shape[1], shape[2])
        video = empty_batch(whole, self.layout, torch.uint8, self.stream.device, channels_last=self.channels_last)
        return video.copy_(levels if self.layout == "BCTHW" else levels.transpose(1, 2))

    def collated(self, rows: list[torch.Tensor], shapes: Shapes) -> Video:
        """Put rows of different shapes together.

        `rows`: tensors [3, T, H, W] or [T, 3, H, W], in the layout of the batch.
        """
        if shapes.padded is None:
            return rows
        whole = (len(rows), 3, *shapes.padded)
        dtype, device = rows[0].dtype, rows[0].device
        video = empty_batch(whole, self.layout, dtype, device, channels_last=self.channels_last).zero_()
        for into, row, (frames, height, width) in zip(video, rows, shapes.rows, strict=True):
            along = into if self.layout == "BCTHW" else into.transpose(0, 1)
            along[:, :frames, :height, :width] = row if self.layout == "BCTHW" else row.transpose(0, 1)
        return video


def check_collate(
    collate: Collate, streams: Sequence[str], *, views: bool, batches: Buckets | Packed | None
) -> Collate:
    """Return how a loader puts rows together: as asked, or as a list from which packed patches are made.

    `views`: whether each row is several clips of one sample.
    """
    check_choice("collate", collate, get_args(Collate))
    if batches is not None and collate != "stack":
        raise UsageError(f"collate={collate!r} was given with batches=", hint="leave out collate: the plan decides")
    packed = isinstance(batches, Packed)
    if (packed or collate != "stack") and (views or "flow" in streams):
        raise UsageError(
            f"{'batches=Packed' if packed else f'collate={collate!r}'} was given with {'views' if views else 'flow'}",
            hint="use collate='stack', and a sampler and a crop of one shape",
        )
    return "list" if packed else collate


def video_spec(rules: ClipRules, output: Output, stream: LoaderStream, collate: Collate) -> VideoSpec:
    """Return the specification of a loader's batches."""
    count, size = rules.num_frames, rules.output
    shape = None if count is None or size is None else (count, *size)
    pixels = None if output.dtype is torch.uint8 else output.pixels
    return VideoSpec(shape, output.layout, pixels, stream, output.channels_last, collate)
