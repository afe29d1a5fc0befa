"""The ResNet itself: its initial state, its options, its errors."""

import pytest
import torch
from torch import nn

from fastvid.errors import UsageError
from fastvid.models.i3d import I3D_3X3X3, i3d
from fastvid.models.resnet import ResNet


@pytest.mark.parametrize(
    ("depth", "parameters"), [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032), (101, 44_549_160)]
)
def test_resnet_has_torchvisions_number_of_parameters(depth, parameters):
    # torchvision/models/resnet.py, "num_params" of the IMAGENET1K weights.
    with torch.device("meta"):
        net = ResNet(depth)
    assert sum(parameter.numel() for parameter in net.parameters()) == parameters


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


def test_dropout_is_active_only_in_training():
    net = ResNet(18, width=8, num_classes=4, dropout=0.9)
    nn.init.ones_(net.fc.weight)
    x = torch.randn(4, 3, 32, 32)
    net.eval()
    assert torch.equal(net(x), net(x))
    net.train()
    assert not torch.equal(net(x), net(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ResNet(51), "unknown ResNet depth 51.*\n.*18, 34, 50, 101"),
        (lambda: ResNet(18, width=0), "width must be at least 1, not 0"),
        (lambda: ResNet(18, num_classes=0), "num_classes must be at least 1, not 0"),
    ],
)
def test_invalid_resnet_options_raise_clear_errors(make, message):
    with pytest.raises(UsageError, match=message):
        make()
