"""The shift operator, its gradients, and in-place safety."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from fastvid.errors import UsageError
from fastvid.models.resnet import ResNet
from fastvid.models.shift import ShiftConv2d, insert_shift, temporal_shift
from fastvid.models.tsn import tsm, tsn

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


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_in_place_shift_convolution_passes_gradcheck(stride, bias):
    plain = nn.Conv2d(5, 2, 3, stride=stride, padding=1, bias=bias).double()
    conv = ShiftConv2d(plain, 3, shift_div=4, inplace=True)
    x = torch.randn(3, 5, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y, *_: conv(y), (x, *conv.parameters()))


def test_shift_convolution_casts_like_a_convolution_under_autocast():
    conv = nn.Conv2d(16, 8, 1)
    x = torch.randn(8, 16, 4, 4)
    grads = []
    for inplace in (False, True):
        one = ShiftConv2d(copy.deepcopy(conv), 4, inplace=inplace)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = one(x)
        assert out.dtype is torch.bfloat16
        out.float().square().sum().backward()
        grads.append([one.weight.grad, one.bias.grad])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


# --- inside a residual block and a net ------------------------------------------------------------------------------


def train_steps(net: nn.Module, x: Tensor, steps: int) -> list[Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("depth", [18, 50])
def test_in_place_net_trains_bit_equal(depth):
    nets = []
    for inplace in (False, True):
        torch.manual_seed(0)
        nets.append(tsm(depth, num_classes=3, num_frames=4, width=8, dropout=0.0, shift_inplace=inplace))
    x = torch.randn(2, 3, 4, 32, 32)
    losses = [train_steps(net, x, steps=2) for net in nets]
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
    states = [net.state_dict() for net in nets]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def kept_for_backward(net: nn.Module, x: Tensor) -> int:
    """Bytes of distinct storages, other than weights, that autograd saves between forward and backward."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*net.parameters(), *net.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = net(x)
    assert out.requires_grad
    return sum(kept.values())


def test_in_place_shift_saves_no_more_activations_than_no_shift():
    x = torch.randn(2, 3, 4, 64, 64)
    plain, lean, unshifted = (
        kept_for_backward(net, x)
        for net in (
            tsm(50, num_classes=3, num_frames=4, width=16),
            tsm(50, num_classes=3, num_frames=4, width=16, shift_inplace=True),
            tsn(50, num_classes=3, num_frames=4, width=16),
        )
    )
    assert lean == unshifted
    assert plain > 1.15 * unshifted  # one more input per block


# --- position of shifts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: temporal_shift(torch.ones(7, 8, 1, 1), 4), "7 frames are not a multiple of num_segments=4"),
        (lambda: temporal_shift(torch.ones(8, 8, 1, 1), 0), "multiple of num_segments=0"),
        (lambda: temporal_shift(torch.ones(8, 8, 1, 1), 4, shift_div=1), "shift_div=1 is too small"),
        (lambda: temporal_shift(torch.ones(8, 8, 1, 1), 4, direction="future"), "unknown shift direction 'future'"),
        (lambda: insert_shift(ResNet(18, width=4), 4), "moves none of 4 channels"),
    ],
)
def test_invalid_shifts_raise_clear_errors(call, message):
    with pytest.raises(UsageError, match=message):
        call()
