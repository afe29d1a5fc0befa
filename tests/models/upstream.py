"""The nets of three other code bases, reimplemented as plain functions over their own checkpoint keys.

Nothing here uses fastvid: keys, shapes and arithmetic were written down from the upstream sources, so that a checkpoint
made here is loaded right only if our names and our nets are both right. Read were:

- pytorch/vision: ``torchvision/models/resnet.py`` at 054e54c;
- mit-han-lab/temporal-shift-module: ``ops/temporal_shift.py`` at 4759ad8, ``ops/models.py`` at 51328c0,
  ``main.py`` at 40bedbf (which saves the state dict of a DataParallel model);
- open-mmlab/mmaction2: ``mmaction/models/backbones/resnet_tsm.py`` at 03ff3fc, ``resnet.py`` at 017c449,
  ``resnet3d.py`` at 01436f0,
  ``mmaction/models/heads/tsm_head.py`` at 0532499, ``i3d_head.py`` at 0174ab4, ``configs/_base_/models/i3d_r50.py`` at
  38099c7.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

State = dict[str, Tensor]

RESNETS = {18: (False, (2, 2, 2, 2)), 50: (True, (3, 4, 6, 3)), 101: (True, (3, 4, 23, 3))}

# A key function names a tensor of a convolution or of the batch norm after it: key(block, part, kind, tensor), where
# block is "layer2.1" ("" for the stem), part "conv1" ("downsample", ...), kind "conv" or "bn", tensor "weight", ...
Key = Callable[[str, str, str, str], str]


def torchvision_key(block: str, part: str, kind: str, tensor: str) -> str:
    prefix = f"{block}." if block else ""
    if part == "downsample":
        return f"{prefix}downsample.{0 if kind == 'conv' else 1}.{tensor}"
    return f"{prefix}{part if kind == 'conv' else part.replace('conv', 'bn')}.{tensor}"


def mit_key(shifted: set[str]) -> Key:
    """``shifted``: blocks whose conv1 is inside a TemporalShift."""

    def key(block: str, part: str, kind: str, tensor: str) -> str:
        if block in shifted and part == "conv1" and kind == "conv":
            return f"module.base_model.{block}.conv1.net.weight"
        return f"module.base_model.{torchvision_key(block, part, kind, tensor)}"

    return key


def mmaction2_key(shifted: set[str]) -> Key:
    """As for MIT."""

    def key(block: str, part: str, kind: str, tensor: str) -> str:
        place = f"{block}." if block else ""
        net = ".net" if block in shifted and part == "conv1" and kind == "conv" else ""
        return f"backbone.{place}{part}.{kind}{net}.{tensor}"

    return key


def blocks(depth: int) -> list[str]:
    return [f"layer{s + 1}.{b}" for s, count in enumerate(RESNETS[depth][1]) for b in range(count)]


def shifted_blocks(depth: int) -> set[str]:
    """make_temporal_shift: every block, or with 23 blocks in layer3 those with an even number in their layer."""
    every = 2 if RESNETS[depth][1][2] >= 23 else 1
    return {block for block in blocks(depth) if int(block.split(".")[1]) % every == 0}


def resnet_state(depth: int, key: Key, *, width: int, kernel_t: Callable[[str, str], int] | None = None) -> State:
    """Random weights of a ResNet without its last layer; ``kernel_t(block, part)`` makes 3D kernels."""
    state: State = {}
    bottleneck, counts = RESNETS[depth]

    def add(block: str, part: str, out: int, inn: int, size: int) -> None:
        kernel = (size, size) if kernel_t is None else (kernel_t(block, part), size, size)
        _add_conv_bn(state, lambda kind, tensor: key(block, part, kind, tensor), (out, inn, *kernel))

    add("", "conv1", width, 3, 7)
    channels = width
    for s, count in enumerate(counts):
        inner = width * 2**s
        out = inner * (4 if bottleneck else 1)
        for b in range(count):
            block = f"layer{s + 1}.{b}"
            if bottleneck:
                add(block, "conv1", inner, channels, 1)
                add(block, "conv2", inner, inner, 3)
                add(block, "conv3", out, inner, 1)
            else:
                add(block, "conv1", inner, channels, 3)
                add(block, "conv2", out, inner, 3)
            if b == 0 and (s > 0 or channels != out):
                add(block, "downsample", out, channels, 1)
            channels = out
    return state


def _add_conv_bn(state: State, key: Callable[[str, str], str], shape: tuple[int, ...]) -> None:
    out, fan_in = shape[0], torch.Size(shape[1:]).numel()
    state[key("conv", "weight")] = torch.randn(shape, dtype=torch.float64) * (2 / fan_in) ** 0.5
    state[key("bn", "weight")] = torch.rand(out, dtype=torch.float64) + 0.5
    state[key("bn", "bias")] = torch.randn(out, dtype=torch.float64) * 0.1
    state[key("bn", "running_mean")] = torch.randn(out, dtype=torch.float64) * 0.1
    state[key("bn", "running_var")] = torch.rand(out, dtype=torch.float64) + 0.5
    state[key("bn", "num_batches_tracked")] = torch.tensor(7)


def head_state(prefix: str, features: int, classes: int) -> State:
    return {
        f"{prefix}.weight": torch.randn(classes, features, dtype=torch.float64) * 0.1,
        f"{prefix}.bias": torch.randn(classes, dtype=torch.float64),
    }


def resnet_features(
    state: State,
    depth: int,
    key: Key,
    x: Tensor,
    *,
    before_conv1: Callable[[str, Tensor], Tensor] = lambda block, x: x,
    time_strides: tuple[int, int, int] = (1, 1, 1),
) -> Tensor:
    """Pooled features [N, D]; x is [N, 3, H, W], or a clip when kernels are 3D.

    ``before_conv1`` is the temporal shift, ``time_strides`` those of the stem, of pool1 and of pool2 behind layer1.
    """
    is_3d = x.dim() == 5

    def conv_bn(block: str, part: str, x: Tensor, stride: int = 1, stride_t: int = 1) -> Tensor:
        weight = state[key(block, part, "conv", "weight")]
        padding = [size // 2 for size in weight.shape[2:]]
        if is_3d:
            x = F.conv3d(x, weight, stride=(stride_t, stride, stride), padding=padding)
        else:
            x = F.conv2d(x, weight, stride=stride, padding=padding)
        return _bn(x, lambda tensor: state[key(block, part, "bn", tensor)])

    x = F.relu(conv_bn("", "conv1", x, 2, time_strides[0]))
    x = F.max_pool3d(x, (1, 3, 3), (time_strides[1], 2, 2), (0, 1, 1)) if is_3d else F.max_pool2d(x, 3, 2, 1)
    bottleneck = RESNETS[depth][0]
    for block in blocks(depth):
        stride = 2 if block.endswith(".0") and block != "layer1.0" else 1
        if block == "layer2.0" and time_strides[2] > 1:
            x = F.max_pool3d(x, (2, 1, 1), (2, 1, 1))
        has_downsample = key(block, "downsample", "conv", "weight") in state
        identity = conv_bn(block, "downsample", x, stride) if has_downsample else x
        out = F.relu(conv_bn(block, "conv1", before_conv1(block, x), 1 if bottleneck else stride))
        out = conv_bn(block, "conv2", out, stride if bottleneck else 1)
        if bottleneck:
            out = conv_bn(block, "conv3", F.relu(out))
        x = F.relu(out + identity)
    return x.flatten(2).mean(2)


def _bn(x: Tensor, tensor: Callable[[str], Tensor]) -> Tensor:
    statistics = tensor("running_mean"), tensor("running_var")
    return F.batch_norm(x, *statistics, tensor("weight"), tensor("bias"), training=False)


def shift_by_loops(x: Tensor, num_segments: int, div: int = 8) -> Tensor:
    """TemporalShift.shift, one frame at a time."""
    out = torch.zeros_like(x)
    fold = x.shape[1] // div
    for i in range(x.shape[0]):
        t = i % num_segments
        out[i, 2 * fold :] = x[i, 2 * fold :]
        if t + 1 < num_segments:
            out[i, :fold] = x[i + 1, :fold]
        if t > 0:
            out[i, fold : 2 * fold] = x[i - 1, fold : 2 * fold]
    return out
