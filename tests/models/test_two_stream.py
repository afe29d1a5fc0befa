"""Two-stream nets: initialisation across modalities, fusion, and what each kind of fusion can learn."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from fastvid.errors import UsageError
from fastvid.models.two_stream import FLOW_SCALE, fuse_scores, load_stream_weights
from fastvid.models.weights import load_weights
from fastvid.models.zoo import build

CLASSES, FRAMES, STACK, WIDTH = 3, 2, 4, 8


def small(name="two-stream-r18", **options):
    torch.manual_seed(0)
    if not name.startswith("tsn"):
        options.setdefault("flow_stack", STACK)
    return build(name, CLASSES, FRAMES, width=WIDTH, dropout=0.0, **options).eval()


def clips(count=2, size=32):
    generator = torch.Generator().manual_seed(1)
    video = torch.randn(count, 3, FRAMES, size, size, generator=generator)
    return video, 5 * torch.randn(count, 2 * STACK, FRAMES, size, size, generator=generator)


def test_imagenet_weights_load_into_both_nets(tmp_path):
    pictures = small("tsn-r18").backbone.state_dict()
    model = small()
    torch.save(pictures, tmp_path / "imagenet.pt")
    spatial, temporal = load_stream_weights(model, [str(tmp_path / "imagenet.pt")])
    assert spatial.complete
    assert not spatial.crossed
    assert temporal.complete
    assert temporal.crossed == ("backbone.conv1.weight",)
    assert "from RGB" in str(temporal)
    assert torch.equal(model.temporal.backbone.conv1.weight[:, 5], pictures["conv1.weight"].mean(1))
    assert torch.equal(model.spatial.backbone.layer3[0].conv1.weight, model.temporal.backbone.layer3[0].conv1.weight)


def test_separately_trained_nets_load_into_one_two_stream_model(tmp_path):
    spatial, temporal = small("tsn-r18"), small("temporal-r18")
    for parameter in temporal.parameters():
        parameter.data.add_(0.01)
    # In the format of the trainer's checkpoints.
    torch.save({"version": 1, "replica": {"model": spatial.state_dict()}}, tmp_path / "spatial.pt")
    torch.save(temporal.state_dict(), tmp_path / "temporal.pt")
    model = small()
    reports = load_stream_weights(model, [str(tmp_path / "spatial.pt"), str(tmp_path / "temporal.pt")])
    assert all(report.complete for report in reports)
    video, flow = clips()
    expected = F.softmax(spatial(video), 1) / 2.5 + F.softmax(temporal(flow), 1) * 1.5 / 2.5
    torch.testing.assert_close(F.softmax(model(video, flow), 1), expected)
    torch.save(model.state_dict(), tmp_path / "both.pt")
    again = small()
    assert all(report.complete for report in load_stream_weights(again, [str(tmp_path / "both.pt")]))
    assert torch.equal(again(video, flow), model(video, flow))
    with pytest.raises(UsageError, match="3 weight files"):
        load_stream_weights(model, ["a", "b", "c"])


def test_cross_modality_applies_only_to_another_number_of_channels():
    state = small("tsn-r18").state_dict()
    wider = build("temporal-r18", CLASSES, FRAMES, width=2 * WIDTH, flow_stack=STACK)
    state |= {key: tensor for key, tensor in wider.state_dict().items() if "fc" in key}
    report = load_weights(wider, state)
    assert not report.crossed
    assert "backbone.conv1.weight" in [key for key, _, _ in report.mismatched]


def test_late_fusion_is_the_weighted_mean_of_probabilities():
    a, b = torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    fused = fuse_scores([a, b], [1.0, 3.0])
    torch.testing.assert_close(fused.exp(), (F.softmax(a, 1) + 3 * F.softmax(b, 1)) / 4)
    # Logits so far apart that the probabilities underflow to zero.
    far = fuse_scores([torch.tensor([[0.0, -2000.0]]), torch.tensor([[0.0, -1500.0]])], [1.0, 1.0])
    assert far.isfinite().all()


def test_temporal_net_scales_flow_to_the_range_of_rgb():
    net = small("temporal-r18")
    _, flow = clips()
    torch.testing.assert_close(
        net(flow), net.backbone((flow * FLOW_SCALE).transpose(1, 2).flatten(0, 1)).view(2, 2, -1).mean(1)
    )
    # 20 pixels per frame is the end of the TSN code's range: (1 - 0.5) / 0.226.
    assert pytest.approx(0.5 / 0.226) == 20 * FLOW_SCALE


@pytest.mark.parametrize("fusion", ["scores", "joint"])
def test_both_streams_are_trained_together(fusion):
    model = small(fusion=fusion).train()
    video, flow = clips()
    F.cross_entropy(model(video, flow), torch.tensor([0, 2])).backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not without
    assert model.streams == ("rgb", "flow")
