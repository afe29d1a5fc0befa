"""The nets of three other code bases, reimplemented as plain functions over their own checkpoint keys.

Nothing here uses fastvid: keys, shapes and arithmetic were written down from the upstream sources, so that a checkpoint
made here is loaded right only if our names and our nets are both right. Read were:

- pytorch/vision: ``torchvision/models/resnet.py`` at 054e54c, ``mobilenetv2.py`` at 0256d65;
- mit-han-lab/temporal-shift-module: ``ops/temporal_shift.py`` at 4759ad8, ``ops/models.py`` at 51328c0,
  ``ops/non_local.py`` at 298cd1d, ``archs/mobilenet_v2.py`` at d6da93d, ``main.py`` at 40bedbf (which saves the state
  dict of a DataParallel model);
- open-mmlab/mmaction2: ``mmaction/models/backbones/resnet_tsm.py`` at 03ff3fc, ``resnet.py`` at 017c449,
  ``resnet3d.py`` at 01436f0, ``mobilenet_v2.py`` at 06c11e3, ``mobilenet_v2_tsm.py`` at a067e27,
  ``mmaction/models/heads/tsm_head.py`` at 0532499, ``i3d_head.py`` at 0174ab4, ``configs/_base_/models/i3d_r50.py`` at
  38099c7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

State = dict[str, Tensor]

RESNETS = {18: (False, (2, 2, 2, 2)), 50: (True, (3, 4, 6, 3)), 101: (True, (3, 4, 23, 3))}

# expansion, channels, blocks, stride
MOBILENET = [
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
]

# A key function names a tensor of a convolution or of the batch norm after it: key(block, part, kind, tensor), where
# block is "layer2.1" ("" for the stem), part "conv1" ("downsample", ...), kind "conv" or "bn", tensor "weight", ...
Key = Callable[[str, str, str, str], str]


def torchvision_key(block: str, part: str, kind: str, tensor: str) -> str:
    prefix = f"{block}." if block else ""
    if part == "downsample":
        return f"{prefix}downsample.{0 if kind == 'conv' else 1}.{tensor}"
    return f"{prefix}{part if kind == 'conv' else part.replace('conv', 'bn')}.{tensor}"


def mit_key(shifted: set[str], wrapped: frozenset[str] = frozenset()) -> Key:
    """``shifted``: blocks whose conv1 is inside a TemporalShift; ``wrapped``: blocks inside an NL3DWrapper."""

    def key(block: str, part: str, kind: str, tensor: str) -> str:
        place = f"{block}.block" if block in wrapped else block
        if block in shifted and part == "conv1" and kind == "conv":
            return f"module.base_model.{place}.conv1.net.weight"
        return f"module.base_model.{torchvision_key(place, part, kind, tensor)}"

    return key


def mmaction2_key(shifted: set[str], wrapped: frozenset[str] = frozenset()) -> Key:
    """As for MIT; ``wrapped`` blocks are inside the NL3DWrapper of resnet_tsm.py."""

    def key(block: str, part: str, kind: str, tensor: str) -> str:
        place = f"{block}.block." if block in wrapped else f"{block}." if block else ""
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
    after_block: Callable[[str, Tensor], Tensor] = lambda block, x: x,
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
        x = after_block(block, F.relu(out + identity))
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


# --- non-local blocks -----------------------------------------------------------------------------------------------


def mit_non_local_state(block: str, channels: int) -> State:
    state: State = {}
    for name, out, inn in (
        ("g.0", channels // 2, channels),
        ("W.0", channels, channels // 2),
        ("theta", channels // 2, channels),
        ("phi.0", channels // 2, channels),
    ):
        state[f"module.base_model.{block}.nl.{name}.weight"] = torch.randn(out, inn, 1, 1, 1, dtype=torch.float64) * 0.2
        state[f"module.base_model.{block}.nl.{name}.bias"] = torch.randn(out, dtype=torch.float64) * 0.2
    bn: State = {}
    _add_conv_bn(bn, lambda kind, tensor: f"module.base_model.{block}.nl.W.1.{tensor}#{kind}", (channels, 1, 1))
    return state | {name.removesuffix("#bn"): tensor for name, tensor in bn.items() if name.endswith("#bn")}


def mit_non_local(state: State, block: str, x: Tensor, num_segments: int) -> Tensor:
    """NL3DWrapper after a block: embedded Gaussian, keys and values pooled (1, 2, 2), x [B * T, C, H, W]."""

    def tensor(name: str) -> Tensor:
        return state[f"module.base_model.{block}.nl.{name}"]

    clips = x.reshape(-1, num_segments, *x.shape[1:]).transpose(1, 2)
    g = F.max_pool3d(F.conv3d(clips, tensor("g.0.weight"), tensor("g.0.bias")), (1, 2, 2)).flatten(2)
    phi = F.max_pool3d(F.conv3d(clips, tensor("phi.0.weight"), tensor("phi.0.bias")), (1, 2, 2)).flatten(2)
    theta = F.conv3d(clips, tensor("theta.weight"), tensor("theta.bias")).flatten(2)
    weights = torch.einsum("bcn,bcm->bnm", theta, phi).softmax(2)
    y = torch.einsum("bnm,bcm->bcn", weights, g).reshape(clips.shape[0], -1, *clips.shape[2:])
    y = F.conv3d(y, tensor("W.0.weight"), tensor("W.0.bias"))
    y = _bn(y, lambda name: tensor(f"W.1.{name}"))
    return (y + clips).transpose(1, 2).reshape(x.shape)


# --- MobileNetV2 ----------------------------------------------------------------------------------------------------


def mobilenet_blocks() -> Iterator[tuple[int, int, int, int, int, int, int]]:
    """(feature index, stage, number in stage, expansion, input channels, output channels, stride)."""
    feature, channels = 1, 32
    for stage, (expansion, out, count, stride) in enumerate(MOBILENET):
        for number in range(count):
            yield feature, stage, number, expansion, channels, out, stride if number == 0 else 1
            feature, channels = feature + 1, out


def torchvision_mobilenet_key(feature: int, part: str, kind: str, tensor: str) -> str:
    if feature in (0, 18):
        return f"features.{feature}.{0 if kind == 'conv' else 1}.{tensor}"
    order = ["dw", "pl"] if feature == 1 else ["pw", "dw", "pl"]
    position = order.index(part)
    if part == "pl":
        return f"features.{feature}.conv.{position + (kind == 'bn')}.{tensor}"
    return f"features.{feature}.conv.{position}.{int(kind == 'bn')}.{tensor}"


def mit_mobilenet_key(feature: int, part: str, kind: str, tensor: str) -> str:
    if feature in (0, 18):
        return f"module.base_model.features.{feature}.{0 if kind == 'conv' else 1}.{tensor}"
    # conv, bn, relu6, conv, bn, relu6, conv, bn in one Sequential; the first three are absent from the first block.
    index = (["dw", "pl"] if feature == 1 else ["pw", "dw", "pl"]).index(part) * 3 + (kind == "bn")
    net = ".net" if part == "pw" and kind == "conv" and feature in mobilenet_shifted() else ""
    return f"module.base_model.features.{feature}.conv.{index}{net}.{tensor}"


def mmaction2_mobilenet_key(feature: int, part: str, kind: str, tensor: str) -> str:
    if feature in (0, 18):
        return f"backbone.conv{1 if feature == 0 else 2}.{kind}.{tensor}"
    stage, number = next((s, n) for f, s, n, *_ in mobilenet_blocks() if f == feature)
    index = (["dw", "pl"] if feature == 1 else ["pw", "dw", "pl"]).index(part)
    # MobileNetV2TSM wraps the whole first ConvModule, so both conv and bn have the prefix .net.
    net = ".net" if part == "pw" and feature in mobilenet_shifted() else ""
    return f"backbone.layer{stage + 1}.{number}.conv.{index}{net}.{kind}.{tensor}"


def mobilenet_shifted() -> set[int]:
    """online_demo/mobilenet_v2_tsm.py, shift_block_idx, whose indices do not count the stem."""
    return {index + 1 for index in (2, 4, 5, 7, 8, 9, 11, 12, 14, 15)}


def mobilenet_state(key: Callable[[int, str, str, str], str]) -> State:
    state: State = {}

    def add(feature: int, part: str, shape: tuple[int, ...]) -> None:
        _add_conv_bn(state, lambda kind, tensor: key(feature, part, kind, tensor), shape)

    add(0, "", (32, 3, 3, 3))
    for feature, _, _, expansion, inn, out, _ in mobilenet_blocks():
        hidden = inn * expansion
        if expansion > 1:
            add(feature, "pw", (hidden, inn, 1, 1))
        add(feature, "dw", (hidden, 1, 3, 3))
        add(feature, "pl", (out, hidden, 1, 1))
    add(18, "", (1280, 320, 1, 1))
    return state


def mobilenet_features(
    state: State, key: Callable[[int, str, str, str], str], x: Tensor, shift: Callable[[Tensor], Tensor] | None
) -> Tensor:
    def conv_bn(feature: int, part: str, x: Tensor, stride: int = 1, groups: int = 1) -> Tensor:
        weight = state[key(feature, part, "conv", "weight")]
        x = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2, groups=groups)
        return _bn(x, lambda tensor: state[key(feature, part, "bn", tensor)])

    x = F.relu6(conv_bn(0, "", x, stride=2))
    for feature, _, _, expansion, inn, out, stride in mobilenet_blocks():
        y = shift(x) if shift is not None and feature in mobilenet_shifted() else x
        if expansion > 1:
            y = F.relu6(conv_bn(feature, "pw", y))
        y = F.relu6(conv_bn(feature, "dw", y, stride=stride, groups=y.shape[1]))
        y = conv_bn(feature, "pl", y)
        x = x + y if stride == 1 and inn == out else y
    return F.relu6(conv_bn(18, "", x)).flatten(2).mean(2)
