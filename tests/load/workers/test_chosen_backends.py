"""Choice of decoders: "auto", several back-ends on one queue, and frames that stay on a device."""

import logging
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

import fastvid
from fastvid.decode.backends import BACKENDS, Backend, backend
from fastvid.decode.dali import DaliCpuDecoder
from fastvid.decode.request import DeviceRgb
from fastvid.errors import UsageError
from fastvid.format.packets import StreamInfo
from fastvid.format.schema import Codec
from fastvid.load.device import LoaderStream
from fastvid.load.workers import lanes
from tests import fake_cuda
from tests.datasets import REPOSITORY, pack
from tests.load.fakes import FakeDataset, FakeShard, fake
from tests.load.gpu_fakes import gpu
from tests.load.loaders import clip_loader
from tests.load.tools import make as fake_loader
from tests.makers import read_numbers

CPU = LoaderStream(torch.device("cpu"))


class DeviceLane(DaliCpuDecoder):
    """DALI on a CPU instead of a GPU: returns frames by DLPack, with one lane for each of three engines."""

    outputs = frozenset({DeviceRgb})
    opened = 0

    def __init__(self):
        DeviceLane.opened += 1
        super().__init__(max_clips=2)

    @staticmethod
    def lanes():
        return 3


DEVICE = Backend("device", f"{__name__}:DeviceLane", "cpu", frozenset({Codec.VP9, Codec.MJPEG}), "nothing")


@pytest.fixture(scope="module")
def dataset(videos, tmp_path_factory):
    pytest.importorskip("nvidia.dali")
    folder = tmp_path_factory.mktemp("served")
    samples = [(f"v{n}", videos.painted("vp9", frames=20 + n).data, 0) for n in range(6)]
    pack(folder, [samples], classes=("a",))
    return fastvid.open(folder)


@pytest.fixture
def known(monkeypatch):
    """Register a back-end of this file by name."""
    table = BACKENDS | {"device": replace(DEVICE)}
    monkeypatch.setattr(lanes, "backend", table.__getitem__)


def make(dataset, **options):
    standard = {"frames": fastvid.Segments(3), "spatial": fastvid.CenterCrop((96, 160)), "global_batch_size": 3}
    return clip_loader(dataset, **standard | {"dtype": torch.uint8, "num_threads": 2, "seed": 5} | options)


def frames_of(loader):
    """Return for each clip of an epoch its key and the frame numbers painted on its pictures."""
    found = []
    for batch in loader:
        for key, video, wanted in zip(batch.key, batch.video, batch.frame_index.tolist(), strict=True):
            assert read_numbers(video[1].numpy()) == wanted
            found.append((key, wanted))
    loader.close()  # without clips of the next epoch
    return found


def test_several_backends_serve_one_queue_in_order(dataset, known):
    alone = frames_of(make(dataset, decoder="pyav"))
    for decoder in ("dali-cpu", "pyav+dali-cpu", "pyav+device"):
        assert frames_of(make(dataset, decoder=decoder)) == alone


def test_every_backend_of_a_hybrid_takes_part(dataset, known, monkeypatch):
    counts = {}
    for name, kind in (("pyav", backend("pyav").load()), ("device", DeviceLane)):
        counts[name] = 0
        decode = kind.decode

        def spy(self, clips, outputs, name=name, decode=decode):
            counts[name] += len(clips)
            return decode(self, clips, outputs)

        monkeypatch.setattr(kind, "decode", spy)
    loader = make(dataset, decoder="pyav+device", global_batch_size=6, prefetch=8, num_threads=1)
    for _ in range(4):
        frames_of(loader)
    assert sum(counts.values()) == 24
    assert all(counts.values())


def test_frames_stay_on_the_device_and_every_engine_has_a_lane(dataset, known):
    DeviceLane.opened = 0
    loader = make(dataset, decoder="device", dtype=torch.float32, mean=(0, 0, 0), std=(1, 1, 1))
    plain = make(dataset, decoder="dali-cpu", dtype=torch.float32, mean=(0, 0, 0), std=(1, 1, 1))
    for ours, theirs in zip(loader, plain, strict=True):
        assert torch.equal(ours.video, theirs.video)
    assert DeviceLane.opened == 3
    DeviceLane.opened = 0
    frames_of(make(dataset, decoder="device", device_lanes=2))
    assert DeviceLane.opened == 2


def test_damaged_clip_is_masked_and_its_lane_continues(dataset, known, monkeypatch):
    monkeypatch.setattr(DeviceLane, "wrong", 0, raising=False)
    decode = DeviceLane.decode

    def damage(self, clips, outputs):
        clips = [replace(clip, data=memoryview(bytes(len(clip.data)))) if clip.key == "v2" else clip for clip in clips]
        return decode(self, clips, outputs)

    monkeypatch.setattr(DeviceLane, "decode", damage)
    options = {"on_error": "skip", "max_skip_rate": 1.0, "dtype": torch.float32, "last": "keep"}
    loader = make(dataset, decoder="device", device_lanes=1, **options)
    valid = {}
    for batch in loader:
        for key, ok, video in zip(batch.key, batch.valid.tolist(), batch.video, strict=True):
            valid[key] = ok
            assert ok or not video.any()
    assert valid == {f"v{n}": n != 2 for n in range(6)}


def test_auto_is_the_default_on_a_cpu_and_part_of_a_state(dataset):
    loader = make(dataset)
    assert loader.backend.name == loader.state_dict()["decoder"] == "pyav"
    assert "decoder" not in make(dataset, decoder="pyav").state_dict()


def test_a_state_keeps_the_decoder_that_auto_chose(dataset, caplog):
    saved = make(dataset, decoder="dali-cpu")
    following = frames_of(saved)
    resumed = make(dataset)
    resumed.load_state_dict({**make(dataset).state_dict(), "decoder": "dali-cpu"})
    assert frames_of(resumed) == following
    assert resumed.backend.name == resumed.state_dict()["decoder"] == "dali-cpu"
    # A back-end that is not available here is replaced by the one of the table.
    elsewhere = make(dataset)
    elsewhere.load_state_dict({**elsewhere.state_dict(), "decoder": "dali-gpu"})
    assert elsewhere.backend.name == "pyav"
    assert "decoder dali-gpu of the state is not available here" in caplog.text
    # A decoder that was named stays.
    named = make(dataset, decoder="pyav")
    named.load_state_dict({**named.state_dict(), "decoder": "dali-cpu"})
    assert named.backend.name == "pyav"


@pytest.mark.parametrize(
    ("codec", "options", "missing", "expected"),
    [
        (Codec.H264, {}, None, "nvdec"),
        (Codec.AV1, {}, None, "nvdec"),
        (Codec.MJPEG, {}, None, "pyav"),
        (Codec.H264, {"views": fastvid.Views(1, 3)}, None, "pyav"),
        (Codec.H264, {}, "no such device", "pyav"),
    ],
)
def test_auto_on_a_gpu_depends_on_the_codec(monkeypatch, caplog, codec, options, missing, expected):
    fake_cuda.install(monkeypatch)
    ours = {"pyav": fake("PlanesDecoder"), "nvdec": gpu("GpuPlanesDecoder")}
    table = {name: replace(one, name=name) for name, one in ours.items()}
    monkeypatch.setattr(lanes, "backend", table.__getitem__)
    monkeypatch.setattr(Backend, "why_unavailable", lambda one, _: missing if one.name == "nvdec" else None)
    monkeypatch.setattr(FakeShard, "info", lambda *_: StreamInfo(codec, 48, 32, 9, Fraction(25)))
    with caplog.at_level(logging.INFO, "fastvid"):
        options |= {"decoder": "auto", "device": "cuda:1", "spatial": fastvid.CenterCrop(16)}
        loader = fake_loader(FakeDataset(40), **options)
    assert loader.backend.name == loader.state_dict()["decoder"] == expected
    assert ("decoder pyav instead of nvdec: no such device" in caplog.text) == bool(missing)


def test_auto_imports_no_other_library_on_a_cpu(videos, tmp_path):
    pack(tmp_path / "set", [[("v", videos.painted("compact", frames=20).data, 0)]], classes=("a",))
    script = f"""
import sys, fastvid
loader = fastvid.ClipLoader(
    fastvid.open({str(tmp_path / "set")!r}), frames=fastvid.Segments(3), spatial=fastvid.CenterCrop(64), last="keep",
    global_batch_size=1, workers=fastvid.Workers(num_threads=1),
)
list(loader)
print(loader.backend.name, [name for name in ("torchcodec", "nvidia.dali") if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert run.stdout == "pyav []\n", run.stderr


def test_invalid_decoder_names_are_refused(dataset, known):
    with pytest.raises(UsageError, match="twice"):
        make(dataset, decoder="pyav+pyav")
    gpu = Backend("gpu", f"{__name__}:DeviceLane", "cuda", frozenset(Codec), "nothing")
    with pytest.raises(UsageError, match="leaves frames on a GPU"):
        make(dataset, decoder=gpu)
    with pytest.raises(UsageError, match="device_lanes"):
        make(dataset, decoder="pyav", device_lanes=0)
