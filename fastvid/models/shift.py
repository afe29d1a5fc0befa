"""Temporal shift modules, from Lin, Gan, Han 2019, "TSM: Temporal Shift Module for Efficient Video Understanding".

Features [B*T, C, H, W] are viewed as [B, T, C, H, W]; ``fold = C // shift_div`` channels (rounded down) move one frame:

====================  =================================  ==============================
channels              ``direction="both"``               ``direction="past"``
====================  =================================  ==============================
``[0, fold)``         ``out[t] = x[t + 1]``, last 0      ``out[t] = x[t - 1]``, first 0
``[fold, 2 * fold)``  ``out[t] = x[t - 1]``, first 0     unchanged
the rest              unchanged                          unchanged
====================  =================================  ==============================

``"past"`` uses no later frame, for online inference (mit-han-lab/temporal-shift-module,
``online_demo/mobilenet_v2_tsm.py`` at 436e7cf); ``"both"`` is ``ops/temporal_shift.py`` at 4759ad8.

The shift copies: a residual block's input is read three times, by the identity path, and in backward by the ReLU that
produced it and by the downsampling convolution. ``recompute`` of the net saves more memory than a shift in place would.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd import Function

from fastvid.errors import UsageError
from fastvid.models.resnet import ResNet
from fastvid.runtime.values import check_choice

Direction = Literal["both", "past"]

# (first channel, end channel, offset): out[t] = x[t + offset] for channels in [first, end).
Moves = tuple[tuple[int, int, int], ...]


def temporal_shift(x: Tensor, num_segments: int, *, shift_div: int = 8, direction: Direction = "both") -> Tensor:
    """Return a shifted copy; ``x`` is not changed.

    `x`: [B * num_segments, C, H, W] of any dtype and memory format; the frames of a clip are consecutive.
    `num_segments`: frames per clip. Returns the shifted features, of the same shape, dtype and memory format.
    """
    check_segments(x, num_segments)
    return _shift(x, num_segments, channel_moves(x.shape[1], shift_div, direction))


def channel_moves(channels: int, shift_div: int, direction: Direction) -> Moves:
    """Return the ranges of channels that move, each as (first channel, end channel, offset in frames)."""
    check_choice("unknown shift direction {}", direction, get_args(Direction))
    least = 2 if direction == "both" else 1
    if shift_div < least:
        raise UsageError(f"shift_div={shift_div} is too small", hint=f"direction={direction!r} needs at least {least}")
    fold = channels // shift_div
    return ((0, fold, 1), (fold, 2 * fold, -1)) if direction == "both" else ((0, fold, -1),)


def _transposed(moves: Moves) -> Moves:
    return tuple((first, end, -offset) for first, end, offset in moves)


def check_segments(x: Tensor, num_segments: int) -> None:
    if num_segments < 1 or x.shape[0] % num_segments:
        raise UsageError(
            f"{x.shape[0]} frames are not a multiple of num_segments={num_segments}",
            hint="pass [batch * num_segments, channels, height, width]",
        )


def _shift(x: Tensor, num_segments: int, moves: Moves) -> Tensor:
    shifted: Tensor = _Shift.apply(x, num_segments, moves)  # type: ignore[no-untyped-call]
    return shifted


def _shifted(x: Tensor, num_segments: int, moves: Moves) -> Tensor:
    # Every element is written exactly once: on a CPU about eight times as fast as zeroing the result first.
    out = torch.empty_like(x)
    clips, out_clips = _as_clips(x, num_segments), _as_clips(out, num_segments)
    for first, end, offset in moves:
        _move(out_clips[:, :, first:end], clips[:, :, first:end], offset)
    moved = moves[-1][1]
    out_clips[:, :, moved:] = clips[:, :, moved:]
    return out


def _as_clips(x: Tensor, num_segments: int) -> Tensor:
    return x.view(-1, num_segments, *x.shape[1:])


def _move(out: Tensor, x: Tensor, offset: int) -> None:
    if offset > 0:
        out[:, :-1] = x[:, 1:]
        out[:, -1:] = 0
    else:
        out[:, 1:] = x[:, :-1]
        out[:, :1] = 0


class _Shift(Function):
    """Shift with one copy in forward and one in backward.

    The derivatives of slices, which autograd would use, allocate and zero whole tensors.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_segments: int, moves: Moves) -> Tensor:
        ctx.num_segments, ctx.moves = num_segments, moves
        return _shifted(x, num_segments, moves)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _shift(grad, ctx.num_segments, _transposed(ctx.moves)), None, None


# ResNets whose third stage has at least this many blocks are shifted only in every second block
# (mit-han-lab/temporal-shift-module, ops/temporal_shift.py, make_temporal_shift).
SPARSE_FROM_BLOCKS = 23


class ShiftConv2d(nn.Conv2d):
    """A 2D convolution over frames that first shifts its input in time.

    Its parameters are those of `nn.Conv2d`, under the same names, so a net keeps its state-dict keys.

    `num_segments`: frames per clip.
    """

    def __init__(
        self,
        conv: nn.Conv2d,
        num_segments: int,
        *,
        shift_div: int = 8,
        direction: Direction = "both",
    ) -> None:
        assert conv.padding_mode == "zeros"
        assert isinstance(conv.padding, tuple)
        super().__init__(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size,  # type: ignore[arg-type]
            stride=conv.stride,  # type: ignore[arg-type]
            padding=conv.padding,  # type: ignore[arg-type]
            dilation=conv.dilation,  # type: ignore[arg-type]
            groups=conv.groups,
            bias=conv.bias is not None,
            device="meta",
        )
        self.weight = conv.weight
        self.bias = conv.bias
        self.num_segments = num_segments
        self.shift_div = shift_div
        self.direction: Direction = direction
        if channel_moves(conv.in_channels, shift_div, direction)[0][1] == 0:
            raise UsageError(
                f"shift_div={shift_div} moves none of {conv.in_channels} channels",
                hint=f"widen the net or use shift_div <= {conv.in_channels}",
            )

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(temporal_shift(x, self.num_segments, shift_div=self.shift_div, direction=self.direction))

    def extra_repr(self) -> str:
        how = f"num_segments={self.num_segments}, shift_div={self.shift_div}, direction={self.direction!r}"
        conv = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{conv}, {how}"


def insert_shift(
    net: ResNet,
    num_segments: int,
    *,
    shift_div: int = 8,
    direction: Direction = "both",
) -> None:
    """Insert a shift at the start of the residual branches of ``net``; identity paths stay unshifted.

    It comes before ``conv1`` of every block; if ``layer3`` has at least `SPARSE_FROM_BLOCKS` blocks (ResNet-101), only
    of every second block of each stage, starting with the first. State-dict keys do not change.

    `net`: takes frames [B * num_segments, C, H, W]; changed in place. `num_segments`: frames per clip.
    """

    def shifted(conv: nn.Module) -> ShiftConv2d:
        assert isinstance(conv, nn.Conv2d)
        return ShiftConv2d(conv, num_segments, shift_div=shift_div, direction=direction)

    every = 2 if len(net.layer3) >= SPARSE_FROM_BLOCKS else 1
    for stage in net.stages():
        for block in net.blocks_of(stage)[::every]:
            assert isinstance(block.conv1, nn.Conv2d)
            block.conv1 = shifted(block.conv1)
