"""The temporal shift as an operator on tensors; see `fastvid.models.shift` for its use.

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
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fastvid.errors import UsageError

Direction = Literal["both", "past"]

# (first channel, end channel, offset): out[t] = x[t + offset] for channels in [first, end).
Moves = tuple[tuple[int, int, int], ...]

# Stride, padding, dilation and groups of a convolution.
ConvSettings = tuple[Any, Any, Any, int]


def temporal_shift(x: Tensor, num_segments: int, *, shift_div: int = 8, direction: Direction = "both") -> Tensor:
    """Return a shifted copy; ``x`` is not changed.

    `x`: [B * num_segments, C, H, W] of any dtype and memory format; the frames of a clip are consecutive.
    `num_segments`: frames per clip. Returns the shifted features, of the same shape, dtype and memory format.
    """
    check_segments(x, num_segments)
    return _shift(x, num_segments, channel_moves(x.shape[1], shift_div, direction))


def temporal_shift_(x: Tensor, num_segments: int, *, shift_div: int = 8, direction: Direction = "both") -> Tensor:
    """Shift in place and return ``x``; arguments as for `temporal_shift`.

    Safe only when nothing reads the old values of ``x`` afterwards. Autograd raises in backward if an earlier operation
    has saved ``x``, but it does not detect later readers: they get the shifted values.
    """
    check_segments(x, num_segments)
    moves = channel_moves(x.shape[1], shift_div, direction)
    shifted: Tensor = _ShiftInPlace.apply(x, num_segments, moves)  # type: ignore[no-untyped-call]
    return shifted


def shift_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, settings: ConvSettings, num_segments: int, moves: Moves
) -> Tensor:
    """Convolve the shifted ``x`` and save ``x`` for backward instead of a shifted copy.

    Not differentiable twice.

    `x`: [B * num_segments, C, H, W]. `weight`: [O, C / groups, kernel, kernel]. `bias`: [O] or None.
    `num_segments`: frames per clip.
    """
    device = x.device.type
    if _has_autocast(device) and torch.is_autocast_enabled(device):
        # Cast here: autocast would cast inside the convolution, out of sight of the custom backward.
        dtype = torch.get_autocast_dtype(device)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    check_segments(x, num_segments)
    out: Tensor = _ShiftConv.apply(x, weight, bias, settings, num_segments, moves)  # type: ignore[no-untyped-call]
    return out


# Evaluated at compile time: torch.compile of 2.11 cannot trace this call.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


def channel_moves(channels: int, shift_div: int, direction: Direction) -> Moves:
    """Return which channels move, and by how many frames."""
    if direction not in get_args(Direction):
        raise UsageError(
            f"unknown shift direction {direction!r}", hint=f"use one of {', '.join(map(repr, get_args(Direction)))}"
        )
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
    # Write each element once: about eight times as fast on a CPU as zeroing the result first.
    out = torch.empty_like(x)
    clips, out_clips = _as_clips(x, num_segments), _as_clips(out, num_segments)
    for first, end, offset in moves:
        _move(out_clips[:, :, first:end], clips[:, :, first:end], offset)
    moved = moves[-1][1]
    out_clips[:, :, moved:] = clips[:, :, moved:]
    return out


def _shift_in_place(x: Tensor, num_segments: int, moves: Moves) -> None:
    clips = _as_clips(x, num_segments)
    for first, end, offset in moves:
        part = clips[:, :, first:end]
        # Source and target overlap, so copy the moving channels, and only those.
        _move(part, part.clone(), offset)


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
    """Shift with one copy in forward and in backward.

    Differentiated slicing would allocate and zero whole tensors.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_segments: int, moves: Moves) -> Tensor:
        ctx.num_segments, ctx.moves = num_segments, moves
        return _shifted(x, num_segments, moves)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _shift(grad, ctx.num_segments, _transposed(ctx.moves)), None, None


class _ShiftInPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, num_segments: int, moves: Moves) -> Tensor:
        ctx.mark_dirty(x)
        ctx.num_segments, ctx.moves = num_segments, moves
        _shift_in_place(x, num_segments, moves)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # Not in place: an addition passes the same gradient tensor to both of its inputs.
        return _shift(grad, ctx.num_segments, _transposed(ctx.moves)), None, None


class _ShiftConv(Function):
    """Convolution of the shifted input that saves the unshifted one, which the net saves anyway."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        settings: ConvSettings,
        num_segments: int,
        moves: Moves,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_sizes = None if bias is None else list(bias.shape)
        ctx.settings, ctx.num_segments, ctx.moves = settings, num_segments, moves
        return functional.conv2d(_shifted(x, num_segments, moves), weight, bias, *settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.settings
        shifted = _shifted(x, ctx.num_segments, ctx.moves)
        needed = list(ctx.needs_input_grad[:3])
        grad_x, grad_weight, grad_bias = torch.ops.aten.convolution_backward(
            grad, shifted, weight, ctx.bias_sizes, stride, padding, dilation, False, [0, 0], groups, needed
        )
        if grad_x is not None:
            _shift_in_place(grad_x, ctx.num_segments, _transposed(ctx.moves))
        return grad_x, grad_weight, grad_bias, None, None, None
