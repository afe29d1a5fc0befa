"""Models by name."""

import copy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fastvid.errors import UsageError
from fastvid.models.i3d import I3D_3X1X1, i3d
from fastvid.models.resnet import ResNet
from fastvid.models.shift import insert_shift, temporal_shift
from fastvid.models.zoo import build, model_cost, names, options


@pytest.mark.parametrize("name", names())
def test_every_zoo_model_maps_clips_to_logits(name):
    with torch.device("meta"):
        model = build(name, 7, 8)
    assert model.input_layout == "BCTHW"
    assert model.num_frames == 8
    channels = {"rgb": 3, "flow": 2 * getattr(model, "flow_stack", 0)}
    clips = [torch.empty(2, channels[stream], 8, 64, 64, device="meta") for stream in model.streams]
    assert model(*clips).shape == (2, 7)
    bare = [key.removeprefix("spatial.").removeprefix("temporal.") for key in model.state_dict()]
    assert all(key.startswith("backbone.") for key in bare)
    assert not any(".net." in key for key in model.state_dict())


def test_options_are_listed_and_applied():
    assert {"width", "shift_div", "recompute"} <= set(options("tsm-r50"))
    assert set(options("temporal-r18")) == {
        "width",
        "zero_init_residual",
        "recompute",
        "dropout",
        "drop_path",
        "flow_stack",
    }
    model = build("tsm-r18", 2, 4, width=16, shift_div=4, in_channels=2)
    assert model.backbone.conv1.weight.shape == (16, 2, 7, 7)
    assert model.backbone.layer1[0].conv1.shift_div == 4


def given(name, *shape):
    return build(name, 3, 8, width=8)(torch.ones(shape))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build("tsm-r51", 2, 4), r"unknown model 'tsm-r51'[\s\S]*tsm-r101, tsm-r18[\s\S]*module:callable"),
        (lambda: build("tsn-r18", 2, 4, shift_div=4), r"no option 'shift_div'[\s\S]*drop_path, in_channels"),
        (lambda: build("tsm-r18", 2, 0), "num_frames must be at least 1, not 0"),
        (lambda: build("no_such_module:make", 2, 4), "no module 'no_such_module'"),
        (lambda: build("json:no_such", 2, 4), "module 'json' has no 'no_such'"),
        (lambda: ResNet(51), "unknown ResNet depth 51.*\n.*18, 34, 50, 101"),
        (lambda: ResNet(18, width=0), "width must be at least 1, not 0"),
        (lambda: build("tsm-r18", 2, 4, width=8.5), "model.options.width is 8.5, expected a whole number"),
        (lambda: build("tsm-r18", 2, 4, zero_init_residual="no"), "zero_init_residual is 'no', expected true or false"),
        (lambda: build("tsm-r18", 2, 4, dropout=2), "dropout is 2, expected 0 to 1"),
        (lambda: ResNet(18, num_classes=0), "num_classes must be at least 1, not 0"),
        (lambda: given("tsm-r18", 1, 3, 16, 32, 32), r"clips of 8 frames, not 16[\s\S]*num_frames=16"),
        (lambda: given("tsm-r18", 8, 3, 32, 32), r"a clip is \[B, C, T, H, W\], not \[8, 3, 32, 32\]"),
        (lambda: build("i3d-r18", 2, 4), "a clip of 4 frames is too short: this net needs at least 8"),
        (lambda: given("i3d-r18", 1, 3, 7, 32, 32), "a clip of 7 frames is too short"),
        (lambda: given("i3d-r18", 8, 3, 32, 32), r"a clip is \[B, C, T, H, W\]"),
        (
            lambda: i3d(18, I3D_3X1X1, num_classes=2, num_frames=8),
            "ResNet-18 has no 1x1 convolution to inflate to 3x1x1",
        ),
        (lambda: temporal_shift(torch.ones(7, 8, 1, 1), 4), "7 frames are not a multiple of num_segments=4"),
        (lambda: temporal_shift(torch.ones(8, 8, 1, 1), 0), "multiple of num_segments=0"),
        (lambda: temporal_shift(torch.ones(8, 8, 1, 1), 4, shift_div=1), "shift_div=1 is too small"),
        (lambda: temporal_shift(torch.ones(8, 8, 1, 1), 4, direction="future"), "unknown shift direction 'future'"),
        (lambda: insert_shift(ResNet(18, width=4), 4), "moves none of 4 channels"),
        (lambda: build("two-stream-r18", 3, 2, fusion="product"), r"fusion is 'product'[\s\S]*scores, joint"),
        (lambda: build("two-stream-r18", 3, 2, flow_weight=0.0), "flow_weight is 0.0"),
        (lambda: build("two-stream-r18", 3, 2, flow_stack=0), "flow_stack must be at least 1"),
    ],
)
def test_wrong_models_options_and_clips_raise_clear_errors(make, message):
    with pytest.raises(UsageError, match=message):
        make()


ZOO = """
import torch
class Net(torch.nn.Module):
    def __init__(self, num_classes, num_frames, layout, scale=1):
        super().__init__()
        self.made_with = (num_classes, num_frames, scale)
        self.input_layout, self.scale = layout, torch.nn.Parameter(torch.ones(1))
    def forward(self, clips, flow=None):
        self.seen = (clips, flow)
        return self.scale * clips.mean((2, 3, 4))
def number(num_classes, num_frames): return 3
"""


@pytest.fixture
def zoo_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_zoo.py").write_text(ZOO)
    (tmp_path / "half_zoo.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_zoo", None)


@pytest.mark.usefixtures("zoo_of_ones_own")
def test_module_callable_builds_a_model():
    model = build("my_zoo:Net", 5, 16, layout="BTCHW", scale=2)
    assert model.made_with == (5, 16, 2)
    assert model.input_layout == "BTCHW", "what the model says about itself stands"
    assert model.num_frames == 16
    with pytest.raises(UsageError, match=r"returned int, not a torch\.nn\.Module"):
        build("my_zoo:number", 5, 16)
    # A package that is missing inside the user's module is not "no such module".
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        build("half_zoo:Net", 5, 16)


@pytest.mark.usefixtures("zoo_of_ones_own")
@pytest.mark.parametrize("layout", ["BCTHW", "BTCHW"])
def test_a_model_receives_the_layout_that_it_declares(layout: str) -> None:
    """With three frames, no shape would tell a model that frames and channels are swapped."""
    model = build("my_zoo:Net", 3, 3, layout=layout)
    clips = torch.randn(2, 3, 3, 4, 4)
    wanted = clips if layout == "BCTHW" else clips.transpose(1, 2)
    model(clips, clips + 1)
    assert torch.equal(model.seen[0], wanted)
    assert torch.equal(model.seen[1], wanted + 1)
    # Copies, as for the average of the weights, and counts of operations see the same.
    copied = copy.deepcopy(model)
    copied(clips)
    assert torch.equal(copied.seen[0], wanted)
    assert model_cost(model, clips.shape).macs == 0
    with pytest.raises(UsageError, match="has input_layout 'BTHWC'"):
        build("my_zoo:Net", 3, 3, layout="BTHWC")
