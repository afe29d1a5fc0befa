"""The ResNet behind all ResNet models of the zoo: TSN and TSM use it unchanged, I3D inflates it.

Module names are those of torchvision's ``models/resnet.py``, so ImageNet checkpoints load without renaming. As in
torchvision, the 3x3 convolution of a bottleneck has the stride (ResNet "v1.5").

**Stochastic depth** skips residual branches at random for single clips in training (Huang et al. 2016, "Deep Networks
with Stochastic Depth"). A branch that is kept is divided by its probability of being kept, so evaluation uses all
branches without scaling.

**Activation checkpointing** of a block updates batch-norm statistics only once. `torch.utils.checkpoint` runs the
block's forward twice per training step: once as usual, once inside backward. Batch norm would then update its running
mean and variance twice with the same batch, so checkpointing would change the statistics used in evaluation. Here the
second run uses copies of the buffers: weights, gradients and running statistics are bit-equal with and without
checkpointing.

Under `torch.compile` this is not needed: the compiler updates the statistics only once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypedDict, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastvid.errors import UsageError
from fastvid.runtime.values import check_choice, check_share


class DropPath(nn.Module):
    """Drops a residual branch for randomly chosen clips, in training only.

    Random numbers come from torch's generator, which the training loop seeds in each step.

    `rate`: probability that a clip's branch is dropped. `frames`: number of consecutive rows of the input that belong
    to one clip and are dropped together.
    """

    def __init__(self, rate: float, frames: int = 1) -> None:
        super().__init__()
        self.rate, self.frames = rate, frames

    def forward(self, branch: Tensor) -> Tensor:
        """Return a branch [N, ...], zero for the dropped clips."""
        if not self.training or self.rate == 0:
            return branch
        rows = branch.shape[0]
        # If the rows are not clips of `frames` frames, each row is dropped independently.
        frames = self.frames if rows % self.frames == 0 else 1
        stays = torch.rand(rows // frames, device=branch.device) >= self.rate
        scale = stays.repeat_interleave(frames).view(-1, *[1] * (branch.dim() - 1)).to(branch.dtype)
        return branch * scale / (1 - self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}, frames={self.frames}"


def rates(rate: float, blocks: int) -> list[float]:
    """Return the drop rate of each block of a net, rising linearly from 0 in the first to `rate` in the last."""
    if not 0 <= rate < 1:
        raise UsageError(f"drop_path is {rate}, expected 0 <= x < 1")
    return [rate * block / max(1, blocks - 1) for block in range(blocks)]


def after_dropouts(layers: Sequence[Sequence[nn.Module]], rate: float) -> None:
    """Add stochastic depth to a transformer, in place: a `DropPath` after the dropout that ends each residual branch.

    `layers`: for each layer the modules of its branches, which have a child ``dropout``. `rate`: drop rate of the last
    layer, see `rates`.
    """
    for branches, one in zip(layers, rates(rate, len(layers)), strict=True):
        for branch in branches:
            if one:
                branch.add_module("dropout", nn.Sequential(branch.get_submodule("dropout"), DropPath(one)))


def recomputed(block: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor, *, random: bool = False) -> Tensor:
    """Run ``forward(x)``, save only ``x`` for backward, and run ``forward`` again in backward.

    `block`: the module whose buffers ``forward`` may update; the second run does not change them. `random`: whether
    ``forward`` draws random numbers, which the second run must repeat. Returns the result of ``forward(x)``.
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _copied_buffers(block)

    out: Tensor
    if torch.compiler.is_compiling():
        out = checkpoint(forward, x, use_reentrant=False, preserve_rng_state=random)
    else:
        out = checkpoint(forward, x, use_reentrant=False, preserve_rng_state=random, context_fn=contexts)
    return out


@contextmanager
def _copied_buffers(block: nn.Module) -> Iterator[None]:
    originals = [
        (module, name, buffer) for module in block.modules() for name, buffer in module.named_buffers(recurse=False)
    ]
    for module, name, buffer in originals:
        setattr(module, name, buffer.clone())
    try:
        yield
    finally:
        # In `finally`, because checkpoint ends the second run by an exception once backward has what it needs.
        for module, name, buffer in originals:
            setattr(module, name, buffer)


class ResidualBlock(nn.Module):
    """Base class of residual blocks: input [N, C, H, W], output [N, C', H / stride, W / stride]."""

    expansion: int
    drop_path: nn.Module | None
    recompute: bool

    def __init__(self, downsample: nn.Module | None) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample
        self.register_module("drop_path", None)
        self.recompute = False

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            return recomputed(self, self._run, x, random=self.drop_path is not None)
        return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out: Tensor = self.residual(x)
        if self.drop_path is not None:
            out = self.drop_path(out)
        out += identity
        activated: Tensor = self.relu(out)
        return activated

    @abstractmethod
    def residual(self, x: Tensor) -> Tensor:
        """Return the residual branch, which is added to the identity path. It must not write to ``x``."""

    def last_norm(self) -> nn.BatchNorm2d | nn.BatchNorm3d:
        """Return the last batch norm of the residual branch; if its weight is 0, the block is an identity."""
        *_, last = (one for one in self.children() if isinstance(one, nn.BatchNorm2d | nn.BatchNorm3d))
        return last


class BasicBlock(ResidualBlock):
    """Two 3x3 convolutions (ResNet-18 and -34)."""

    expansion = 1

    def __init__(self, in_channels: int, channels: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__(downsample)
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def residual(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return cast("Tensor", out)


class Bottleneck(ResidualBlock):
    """1x1, 3x3 and 1x1 convolutions; the output has four times the inner channels (ResNet-50 and -101)."""

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__(downsample)
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, channels * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels * self.expansion)

    def residual(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return cast("Tensor", out)


# Blocks per stage; He et al. 2015, "Deep Residual Learning for Image Recognition", table 1.
DEPTHS: dict[int, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, int, int, int]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
}


class StreamOptions(TypedDict, total=False):
    """Options of `ResNet` that models whose stream (RGB or flow) determines `in_channels` accept too."""

    width: int
    zero_init_residual: bool
    recompute: bool
    drop_path: float


class ResNetOptions(StreamOptions, total=False):
    """Options of `ResNet` that the other models built on it accept too."""

    in_channels: int


class ResNet(nn.Module):
    """ResNet: frames [N, in_channels, H, W] to logits [N, num_classes]."""

    head_name = "fc"

    def __init__(
        self,
        depth: int,
        *,
        num_classes: int = 1000,
        width: int = 64,
        in_channels: int = 3,
        dropout: float = 0.0,
        head_std: float | None = None,
        zero_init_residual: bool = False,
        recompute: bool = False,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        check_choice("unknown ResNet depth {}", depth, DEPTHS)
        for name, value in (("num_classes", num_classes), ("width", width), ("in_channels", in_channels)):
            if value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}")
        check_share("dropout", dropout)
        block, blocks = DEPTHS[depth]
        self.depth = depth
        self.conv1 = nn.Conv2d(in_channels, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool: nn.Module = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(block, width, width, blocks[0], stride=1)
        self.layer2 = _stage(block, width * block.expansion, width * 2, blocks[1], stride=2)
        self.layer3 = _stage(block, width * 2 * block.expansion, width * 4, blocks[2], stride=2)
        self.layer4 = _stage(block, width * 4 * block.expansion, width * 8, blocks[3], stride=2)
        self.avgpool: nn.Module = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.num_features = width * 8 * block.expansion
        self.fc = nn.Linear(self.num_features, num_classes)
        if head_std is not None:
            nn.init.normal_(self.fc.weight, std=head_std)
            nn.init.zeros_(self.fc.bias)
        init_weights(self, zero_init_residual=zero_init_residual)
        residual_blocks = list(self.residual_blocks())
        for one, rate in zip(residual_blocks, rates(drop_path, len(residual_blocks)), strict=True):
            one.recompute = recompute
            if rate:
                one.drop_path = DropPath(rate)

    def stages(self) -> list[nn.Sequential]:
        return [self.layer1, self.layer2, self.layer3, self.layer4]

    def blocks_of(self, stage: nn.Sequential) -> list[ResidualBlock]:
        """Return the residual blocks of a stage, without the pool that may follow them."""
        return [module for module in stage if isinstance(module, ResidualBlock)]

    def residual_blocks(self) -> Iterator[ResidualBlock]:
        for stage in self.stages():
            yield from self.blocks_of(stage)

    def features(self, x: Tensor) -> Tensor:
        """Map frames [N, in_channels, H, W] to pooled features [N, num_features]."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in self.stages():
            x = stage(x)
        x = self.avgpool(x)
        return x.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.dropout(self.features(x)))
        return logits


def init_weights(net: nn.Module, *, zero_init_residual: bool = False) -> None:
    """Initialise 2D and 3D convolutions and batch norms like torchvision's ResNet.

    Convolutions: He normal with fan-out (He et al. 2015, "Delving Deep into Rectifiers"). Batch norms: weight 1, bias
    0; with `zero_init_residual` the weight of the last one of each residual block is 0. The last layer is not changed.
    """
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm2d | nn.BatchNorm3d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
    if zero_init_residual:
        for module in net.modules():
            if isinstance(module, ResidualBlock):
                nn.init.zeros_(module.last_norm().weight)


def _stage(
    block: type[BasicBlock] | type[Bottleneck], in_channels: int, channels: int, blocks: int, stride: int
) -> nn.Sequential:
    out_channels = channels * block.expansion
    downsample: nn.Module | None = None
    if stride != 1 or in_channels != out_channels:
        downsample = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False), nn.BatchNorm2d(out_channels)
        )
    first = block(in_channels, channels, stride, downsample)
    rest = (block(out_channels, channels, 1, None) for _ in range(1, blocks))
    return nn.Sequential(first, *rest)
