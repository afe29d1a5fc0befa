"""Temporal shift modules.

From Lin, Gan, Han 2019, "TSM: Temporal Shift Module for Efficient Video Understanding".

**When is an in-place shift safe?** Only when nothing reads the old values afterwards. A residual block's input has
three such readers: the identity path adds it, and the ReLU that produced it and the downsampling convolution both need
it in backward. So no module here overwrites a block's input. `ShiftConv2d` with ``inplace=True`` works in place only on
tensors of its own: the shifted copy exists only while its convolution runs and is recomputed in backward, and backward
applies the transposed shift to the input gradient that its convolution has just allocated. Training then saves no more
activations than the same net without shift, and weights and gradients are bit-equal to ``inplace=False``.
"""

from __future__ import annotations

from torch import Tensor, nn

from fastvid.errors import UsageError
from fastvid.models.mobilenet import MobileNetV2
from fastvid.models.resnet import ResNet
from fastvid.models.shift_ops import Direction, channel_moves, shift_conv2d, temporal_shift

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
        inplace: bool = False,
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
        self.inplace = inplace
        self._moves = channel_moves(conv.in_channels, shift_div, direction)
        if self._moves[0][1] == 0:
            raise UsageError(
                f"shift_div={shift_div} moves none of {conv.in_channels} channels",
                hint=f"widen the net or use shift_div <= {conv.in_channels}",
            )

    def forward(self, x: Tensor) -> Tensor:
        if self.inplace:
            settings = (self.stride, self.padding, self.dilation, self.groups)
            return shift_conv2d(x, self.weight, self.bias, settings, self.num_segments, self._moves)
        return super().forward(temporal_shift(x, self.num_segments, shift_div=self.shift_div, direction=self.direction))

    def extra_repr(self) -> str:
        how = f"num_segments={self.num_segments}, shift_div={self.shift_div}, direction={self.direction!r}"
        conv = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{conv}, {how}, inplace={self.inplace}"


def insert_shift(
    net: ResNet | MobileNetV2,
    num_segments: int,
    *,
    shift_div: int = 8,
    direction: Direction = "both",
    inplace: bool = False,
) -> None:
    """Insert a shift at the start of the residual branches of ``net``; identity paths stay unshifted.

    In a ResNet: before ``conv1`` of every block; if ``layer3`` has at least `SPARSE_FROM_BLOCKS` blocks (ResNet-101),
    only of every second block of each stage, starting with the first. In MobileNetV2: before the expansion of every
    block that has a skip connection and an expansion. State-dict keys do not change.

    `net`: the net over frames [B * num_segments, C, H, W]; changed in place. `num_segments`: frames per clip.
    """

    def shifted(conv: nn.Module) -> ShiftConv2d:
        assert isinstance(conv, nn.Conv2d)
        return ShiftConv2d(conv, num_segments, shift_div=shift_div, direction=direction, inplace=inplace)

    if isinstance(net, MobileNetV2):
        for inverted in net.expanding_skip_blocks():
            expand = inverted.conv[0]
            assert isinstance(expand, nn.Sequential)
            expand[0] = shifted(expand[0])
        return
    every = 2 if len(net.layer3) >= SPARSE_FROM_BLOCKS else 1
    for stage in net.stages():
        for block in net.blocks_of(stage)[::every]:
            assert isinstance(block.conv1, nn.Conv2d)
            block.conv1 = shifted(block.conv1)
