"""Checkpoints of other code bases: the loaded net computes what the upstream net computes from the same file."""

import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fastvid.errors import FormatError, StorageError
from fastvid.models.weights import load_weights, read_state_dict
from fastvid.models.zoo import build
from tests.models import upstream

CLASSES, FRAMES, WIDTH = 5, 4, 8


def features_of(depth: int, width: int) -> int:
    return width * 8 * (4 if depth >= 50 else 1)


def assert_all_loaded(report, state: upstream.State) -> None:
    assert report.complete
    assert report.unexpected == ()
    assert len(report.matched) == len(state)


def check_logits(model: nn.Module, video: Tensor, features: Tensor, state: upstream.State, head: str) -> None:
    """Compare logits with the mean over frames of the upstream features' last layer."""
    scores = torch.nn.functional.linear(features, state[f"{head}.weight"], state[f"{head}.bias"])
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(video), scores.reshape(len(video), -1, CLASSES).mean(1))


# By origin: the net, what makes the key function from the names of the shifted blocks, and the last layer.
FRAME_NETS = {
    "torchvision": ("tsn", lambda shifted: upstream.torchvision_key, "fc"),
    "mit": ("tsm", upstream.mit_key, "module.new_fc"),
    "mmaction2": ("tsm", upstream.mmaction2_key, "cls_head.fc_cls"),
}


@pytest.mark.parametrize("depth", [18, 50, 101])
@pytest.mark.parametrize("origin", FRAME_NETS)
def test_checkpoints_of_2d_nets_load(origin, depth):
    net, make, head = FRAME_NETS[origin]
    shifted = upstream.shifted_blocks(depth) if net == "tsm" else set()
    key = make(shifted)
    state = upstream.resnet_state(depth, key, width=WIDTH)
    state |= upstream.head_state(head, features_of(depth, WIDTH), CLASSES)
    model = build(f"{net}-r{depth}", CLASSES, FRAMES, width=WIDTH).double()
    report = load_weights(model, state)
    assert_all_loaded(report, state)
    assert report.origin == origin
    video = torch.randn(2, 3, FRAMES, 32, 32, dtype=torch.float64)
    features = upstream.resnet_features(
        state,
        depth,
        key,
        torch.stack([clip[:, t] for clip in video for t in range(FRAMES)]),
        before_conv1=lambda block, x: upstream.shift_by_loops(x, FRAMES) if block in shifted else x,
    )
    check_logits(model, video, features, state, head)


# configs/_base_/models/i3d_r50.py and slowonly_r50.py: inflate; stem kernel, strides of stem, pool1 and pool2.
I3D_BLOCKS = {
    *("layer1.0", "layer1.1", "layer1.2", "layer2.0", "layer2.2", "layer3.0", "layer3.2", "layer3.4", "layer4.1")
}
LATE_BLOCKS = {block for block in upstream.blocks(50) if block[:6] in ("layer3", "layer4")}
CLIP_NETS = {
    "i3d-r50-3x1x1": (I3D_BLOCKS, "conv1", 5, (2, 2, 2)),
    "i3d-r50": (I3D_BLOCKS, "conv2", 5, (2, 2, 2)),
    "i3d-r50-heavy": (set(upstream.blocks(50)), "conv1", 5, (1, 1, 2)),
    "slowonly-r50": (LATE_BLOCKS, "conv1", 1, (1, 1, 1)),
}


@pytest.mark.parametrize("name", CLIP_NETS)
def test_mmaction2_3d_checkpoints_load(name):
    inflated, part, stem, strides = CLIP_NETS[name]

    def kernel_t(block: str, this_part: str) -> int:
        return stem if not block else 3 if block in inflated and this_part == part else 1

    key, head = upstream.mmaction2_key(set()), "cls_head.fc_cls"
    state = upstream.resnet_state(50, key, width=WIDTH, kernel_t=kernel_t)
    state |= upstream.head_state(head, features_of(50, WIDTH), CLASSES)
    model = build(name, CLASSES, 16, width=WIDTH).double()
    report = load_weights(model, state)
    assert_all_loaded(report, state)
    assert report.inflated == ()
    video = torch.randn(1, 3, 16, 32, 32, dtype=torch.float64)
    check_logits(model, video, upstream.resnet_features(state, 50, key, video, time_strides=strides), state, head)


def test_imagenet_weights_are_inflated_for_3d_nets():
    state = upstream.resnet_state(50, upstream.torchvision_key, width=WIDTH)
    state |= upstream.head_state("fc", features_of(50, WIDTH), 1000)
    model = build("i3d-r50-3x1x1", CLASSES, 8, width=WIDTH).double()
    report = load_weights(model, state)
    assert [name for name, *_ in report.mismatched] == ["backbone.fc.weight", "backbone.fc.bias"]
    assert report.missing == report.unexpected == ()
    assert len(report.inflated) == 53  # every convolution of ResNet-50
    stem = state["conv1.weight"]
    assert torch.equal(model.backbone.conv1.weight, torch.stack([stem / 5] * 5, dim=2))
    conv = state["layer4.1.conv1.weight"]
    assert torch.equal(model.backbone.layer4[1].conv1.weight, torch.stack([conv / 3] * 3, dim=2))


def parts():
    """A model of a user's own, with parts beside its backbone."""
    return nn.ModuleDict({name: nn.Linear(3, 3) for name in ("backbone", "fc")})


@pytest.mark.parametrize("make", [lambda: build("tsm-r18", CLASSES, FRAMES, width=WIDTH), parts])
def test_own_checkpoints_load_with_and_without_wrapper_prefixes(tmp_path, make):
    model = make()
    wrapped = {f"module._orig_mod.{key}": tensor for key, tensor in model.state_dict().items()}
    torch.save({"state_dict": wrapped, "epoch": 3, "best": 71.5}, tmp_path / "run.pt")
    torch.save(model.state_dict(), tmp_path / "bare.pt")
    for file in ("run.pt", "bare.pt"):
        other = make()
        report = load_weights(other, tmp_path / file)
        assert report.origin == "fastvid"
        assert report.complete
        loaded = other.state_dict()
        assert all(torch.equal(tensor, loaded[key]) for key, tensor in model.state_dict().items())


def test_load_report_lists_mismatched_missing_and_unexpected_keys():
    state = upstream.resnet_state(18, upstream.torchvision_key, width=WIDTH)
    state |= upstream.head_state("fc", features_of(18, WIDTH), 1000)
    state["extra.weight"] = torch.ones(1)
    del state["layer4.1.bn2.weight"], state["layer4.1.bn2.num_batches_tracked"]
    model = build("tsn-r18", CLASSES, FRAMES, width=WIDTH)
    fresh = model.backbone.fc.weight.clone()
    report = load_weights(model, state)
    assert report.missing == ("backbone.layer4.1.bn2.weight",)
    assert report.unexpected == ("extra.weight",)
    assert report.mismatched == (("backbone.fc.weight", (1000, 64), (5, 64)), ("backbone.fc.bias", (1000,), (5,)))
    assert not report.complete
    assert torch.equal(model.backbone.fc.weight, fresh)
    assert str(report).splitlines() == [
        "torchvision checkpoint: 118 tensors loaded",
        "  2 not loaded because shapes differ: backbone.fc.weight [1000, 64] in the checkpoint, [5, 64] here, "
        "backbone.fc.bias [1000] in the checkpoint, [5] here",
        "  1 missing from the checkpoint: backbone.layer4.1.bn2.weight",
        "  1 only in the checkpoint: extra.weight",
    ]


def test_head_is_skipped_on_request():
    state = upstream.resnet_state(18, upstream.torchvision_key, width=WIDTH)
    state |= upstream.head_state("fc", features_of(18, WIDTH), CLASSES)
    model = build("tsn-r18", CLASSES, FRAMES, width=WIDTH)
    fresh = model.backbone.fc.weight.clone()
    report = load_weights(model, state, head=False)
    assert report.skipped == ("backbone.fc.weight", "backbone.fc.bias")
    assert torch.equal(model.backbone.fc.weight, fresh)
    load_weights(model, state)
    assert not torch.equal(model.backbone.fc.weight, fresh)


class _Harmful:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (str(self.trace), "w"))


def test_unsafe_files_are_not_unpickled_and_errors_name_the_file(tmp_path):
    model = build("tsn-r18", CLASSES, FRAMES, width=WIDTH)
    trace = tmp_path / "executed"
    (tmp_path / "text.pt").write_text("not a checkpoint")
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps(_Harmful(trace), protocol=2))
    torch.save({"state_dict": model.state_dict(), "meta": _Harmful(trace)}, tmp_path / "object.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"lr": 0.1}, tmp_path / "empty.pt")
    whole = tmp_path / "whole.pt"
    torch.save(model.state_dict(), whole)
    (tmp_path / "cut.pt").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    with zipfile.ZipFile(whole) as parts, zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as packed:
        for part in parts.infolist():
            packed.writestr(part.filename, parts.read(part))
    assert (
        torch.load(tmp_path / "bomb.pt", weights_only=True).keys() == model.state_dict().keys()
    )  # which torch unpacks
    for file in ("text.pt", "pickle.pt", "object.pt", "list.pt", "empty.pt", "cut.pt", "bomb.pt"):
        with pytest.raises(FormatError, match=file):
            read_state_dict(tmp_path / file)
    assert not trace.exists()
    with pytest.raises(StorageError, match=r"absent\.pt"):
        load_weights(model, tmp_path / "absent.pt")
    torch.save({"roberta.embeddings.weight": torch.ones(3)}, tmp_path / "foreign.pt")
    with pytest.raises(FormatError, match="no tensor of the checkpoint matches this ResNet"):
        load_weights(model, tmp_path / "foreign.pt")


@pytest.mark.parametrize("depth", [1, 2])
def test_a_checkpoint_that_contains_itself_is_refused(tmp_path: Path, depth: int) -> None:
    content: dict[str, object] = {"weight": torch.zeros(2)}
    inner = content
    for _ in range(depth - 1):
        inner["model"] = {"weight": torch.zeros(2)}
        inner = inner["model"]
    inner["state_dict"] = content
    torch.save(content, tmp_path / "loop.pt")
    with pytest.raises(FormatError, match="contains itself") as failed:
        read_state_dict(tmp_path / "loop.pt")
    assert failed.value.where["file"] == str(tmp_path / "loop.pt")
    # Nesting without a loop is read.
    torch.save({"replica": {"state_dict": {"model": {"weight": torch.zeros(2)}}}}, tmp_path / "nested.pt")
    assert list(read_state_dict(tmp_path / "nested.pt")) == ["weight"]


def test_a_damaged_safetensors_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class SafetensorError(Exception):  # derives from nothing else in its library, which need not be installed
        pass

    def load(*_: object, **__: object) -> None:
        raise SafetensorError("invalid JSON in header")

    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"\x08\0\0\0\0\0\0\0{garbage")
    with pytest.raises(FormatError, match="not a readable") as found:
        read_state_dict(path)
    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(FormatError, match="not a readable safetensors file: invalid JSON in header") as raised:
        read_state_dict(path)
    assert found.value.where["file"] == raised.value.where["file"] == str(path)
