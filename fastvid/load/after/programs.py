"""Programs: the operations that each clip of a batch goes through, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torch import Tensor

from fastvid.load.after import colour_ops
from fastvid.load.after.affine import warp
from fastvid.load.after.transform import change_rows

Program = Sequence[tuple[str, Any]]
"""Name of each operation in `OPERATIONS`, with its number; empty leaves the clip as it is."""

OPERATIONS: Final[Mapping[str, Callable[[Tensor, Sequence[Any]], Tensor]]] = {
    "autocontrast": colour_ops.autocontrast,
    "brightness": colour_ops.brightness,
    "contrast": colour_ops.contrast,
    "equalize": colour_ops.equalize,
    "hue": colour_ops.hue,
    "posterize": colour_ops.posterize,
    "saturation": colour_ops.saturation,
    "sharpness": colour_ops.sharpness,
    "solarize": colour_ops.solarize,
    "warp": warp,
}


def run_programs(clips: Tensor, programs: Sequence[Program]) -> Tensor:
    """Return the clips after their programs: step by step, clips with the same operation together.

    `clips`: float32 [N, 3, T, H, W] in 0 to 1; may be changed.
    """
    for step in range(max(map(len, programs), default=0)):
        groups: dict[str, list[int]] = {}
        for row, program in enumerate(programs):
            if step < len(program):
                groups.setdefault(program[step][0], []).append(row)
        for name, rows in groups.items():
            numbers = [programs[row][step][1] for row in rows]
            clips = change_rows(clips, rows, lambda part, name=name, numbers=numbers: OPERATIONS[name](part, numbers))  # type: ignore[misc]
    return clips
