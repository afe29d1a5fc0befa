"""ResNets, TSN and TSM over them, and their inflation to 3D nets."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from fastvid.models.i3d import I3D_3X3X3, SLOW_ONLY, i3d, inflate
from fastvid.models.resnet import ResNet
from fastvid.models.shift import temporal_shift
from fastvid.models.tsn import FrameAverage, fold_frames
from fastvid.models.zoo import build


@pytest.mark.parametrize("depth", [18, 50])
def test_zero_init_makes_every_block_an_identity(depth):
    plain = ResNet(depth, width=8)
    assert all((block.last_norm().weight == 1).all() for block in plain.residual_blocks())
    net = ResNet(depth, width=8, zero_init_residual=True).train()
    x = torch.rand(2, 8 * (4 if depth == 50 else 1), 8, 8)
    assert torch.equal(net.layer1[1](x.clone()), x)
    clip_net = i3d(18, I3D_3X3X3, num_classes=2, num_frames=8, width=8, zero_init_residual=True)
    assert all((block.last_norm().weight == 0).all() for block in clip_net.backbone.residual_blocks())


def test_channels_last_gives_the_same_logits():
    net = ResNet(18, width=16, num_classes=5).eval()
    x = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        expected = net(x)
        net.to(memory_format=torch.channels_last)
        seen = []
        net.layer3.register_forward_hook(lambda *call: seen.append(call[2]))
        out = net(x.contiguous(memory_format=torch.channels_last))
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_fold_frames_keeps_frames_of_a_clip_together():
    video = torch.arange(2 * 3 * 4).reshape(2, 3, 4, 1, 1)
    frames = fold_frames(video)
    for b in range(2):
        for t in range(4):
            assert torch.equal(frames[b * 4 + t], video[b, :, t])


def test_channels_last_3d_clips_fold_without_a_copy():
    video = torch.randn(2, 3, 4, 8, 8).contiguous(memory_format=torch.channels_last_3d)
    frames = fold_frames(video)
    assert frames.data_ptr() == video.data_ptr()
    assert frames.is_contiguous(memory_format=torch.channels_last)


def test_tsn_averages_logits_over_frames():
    class Red(nn.Module):
        def forward(self, frames: torch.Tensor) -> torch.Tensor:
            return frames[:, 0].mean((1, 2)).unsqueeze(1)

    video = torch.rand(2, 3, 5, 4, 4)
    out = FrameAverage(Red(), num_frames=5, any_length=False)(video)
    torch.testing.assert_close(out, video[:, 0].mean((1, 2, 3)).unsqueeze(1))


def test_tsn_accepts_any_number_of_frames():
    assert build("tsn-r18", 3, 8, width=8)(torch.randn(1, 3, 25, 32, 32)).shape == (1, 3)


@pytest.mark.parametrize("name", ["tsm-r18", "tsn-r50"])
def test_the_last_layer_starts_small_and_dropout_is_half(name):
    model = build(name, 1000, 8)
    head = model.backbone.get_submodule(model.backbone.head_name)
    assert head.weight.std().item() == pytest.approx(0.001, rel=0.05)
    assert not head.bias.any()
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == [0.5]


def test_inflated_net_equals_the_2d_net_on_a_repeated_frame():
    # SlowOnly has no temporal stride; with 9 inflated kernels of 3, padding affects 9 frames at both ends.
    net = ResNet(50, width=4, num_classes=3).double().train()
    with torch.no_grad():
        net(torch.randn(8, 3, 32, 32, dtype=torch.float64))  # makes the running statistics non-trivial
    net.eval()
    deep = inflate(copy.deepcopy(net), SLOW_ONLY)
    assert deep.state_dict().keys() == net.state_dict().keys()
    frame = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    seen = []
    deep.avgpool.register_forward_hook(lambda module, inputs, out: seen.append(inputs[0]))
    flat = []
    net.avgpool.register_forward_hook(lambda module, inputs, out: flat.append(inputs[0]))
    with torch.no_grad():
        deep(torch.stack([frame] * 21, dim=2))
        net(frame)
    assert seen[0].shape[2] == 21
    for t in (9, 10, 11):
        torch.testing.assert_close(seen[0][:, :, t], flat[0])
    assert not torch.allclose(seen[0][:, :, 0], flat[0])


def test_new_3d_kernels_are_not_constant_in_time():
    kernel = build("i3d-r18", 2, 8, width=8).backbone.conv1.weight
    assert not torch.equal(kernel[:, :, 0], kernel[:, :, 1])
    fan_out = kernel.shape[0] * 5 * 7 * 7
    assert kernel.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.05)


SHAPES = st.tuples(
    st.integers(1, 3),  # clips
    st.integers(1, 6),  # frames
    st.integers(1, 20),  # channels, including fewer than shift_div and not divisible by it
    st.integers(1, 3),
    st.integers(1, 3),
)


def by_convolution(x: Tensor, num_segments: int, shift_div: int, direction: str) -> Tensor:
    """The shift as a depthwise temporal convolution of kernel 3 with one-hot weights and zero padding."""
    channels, fold = x.shape[1], x.shape[1] // shift_div
    weight = torch.zeros(channels, 1, 3, dtype=x.dtype)
    weight[:, 0, 1] = 1
    later, earlier = ((0, fold), (fold, 2 * fold)) if direction == "both" else ((0, 0), (0, fold))
    weight[slice(*later), 0] = torch.tensor([0.0, 0.0, 1.0], dtype=x.dtype)
    weight[slice(*earlier), 0] = torch.tensor([1.0, 0.0, 0.0], dtype=x.dtype)
    clips = x.reshape(-1, num_segments, *x.shape[1:])
    series = clips.permute(0, 3, 4, 2, 1).reshape(-1, channels, num_segments)
    out = F.conv1d(series, weight, padding=1, groups=channels)
    b, t, c, h, w = clips.shape
    return out.reshape(b, h, w, c, t).permute(0, 4, 3, 1, 2).reshape(x.shape)


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.integers(2, 9), st.sampled_from(["both", "past"]), st.booleans())
def test_shift_equals_a_depthwise_convolution_forward_and_backward(shape, shift_div, direction, channels_last):
    b, t, c, h, w = shape
    x = torch.randn(b * t, c, h, w, dtype=torch.float64)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    upstream = torch.randn(b * t, c, h, w, dtype=torch.float64)
    results = []
    for shift in (
        lambda y: by_convolution(y, t, shift_div, direction),
        lambda y: temporal_shift(y, t, shift_div=shift_div, direction=direction),
    ):
        leaf = x.detach().clone().requires_grad_()
        out = shift(leaf)
        (grad,) = torch.autograd.grad(out, leaf, upstream)
        results.append((out, grad))
    for out, grad in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(grad, results[0][1])


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_shift_keeps_its_input_and_the_memory_format(memory_format):
    x = torch.randn(8, 16, 3, 5).contiguous(memory_format=memory_format)
    before = x.clone()
    out = temporal_shift(x, 4)
    assert torch.equal(x, before)
    assert out.is_contiguous(memory_format=memory_format)
