"""Choice of decoders: "auto", several back-ends on one queue, and frames that stay on a device."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import fastvid
from fastvid.decode.backends import Backend, backend
from fastvid.decode.dali import DaliCpuDecoder
from fastvid.decode.request import DeviceRgb
from fastvid.errors import UsageError
from fastvid.format.schema import Codec
from fastvid.load.batch.sinks import DeviceRgbSink, VideoSpec
from fastvid.load.device import LoaderStream
from fastvid.load.workers import auto, lanes
from tests.datasets import REPOSITORY, pack
from tests.load.fakes import FakeDataset
from tests.load.loaders import clip_loader
from tests.load.tools import plans
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
    table = dict(backend_table()) | {"device": replace(DEVICE)}
    monkeypatch.setattr(lanes, "backend", lambda name: table[name])


def backend_table():
    from fastvid.decode.backends import backends

    return backends()


def make(dataset, **options):
    options = {
        "frames": fastvid.Segments(3),
        "spatial": [fastvid.CenterCrop((96, 160))],
        "global_batch_size": 3,
        "dtype": torch.uint8,
        "num_threads": 2,
        "seed": 5,
        **options,
    }
    return clip_loader(dataset, **options)


def frames_of(loader):
    """Return for each clip of an epoch its key and the frame numbers painted on its pictures."""
    found = []
    for batch in loader:
        for key, video, wanted in zip(batch.key, batch.video, batch.frame_index.tolist(), strict=True):
            assert read_numbers(video[1].numpy()) == wanted
            found.append((key, wanted))
    loader.close()
    return found


def test_several_backends_serve_one_queue_in_order(dataset, known):
    alone = frames_of(make(dataset, decoder="pyav"))
    for decoder in ("pyav+dali-cpu", "pyav+device"):
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
    loader = make(
        dataset, decoder="device", on_error="skip", max_skip_rate=1.0, dtype=torch.float32, device_lanes=1, last="keep"
    )
    valid = {}
    for batch in loader:
        for key, ok, video in zip(batch.key, batch.valid.tolist(), batch.video, strict=True):
            valid[key] = ok
            assert ok or not video.any()
    assert valid == {f"v{n}": n != 2 for n in range(6)}


def test_auto_measures_available_backends_and_logs_the_reason(dataset, monkeypatch, caplog):
    rates = {"pyav": 100.0, "dali-cpu": 300.0}
    monkeypatch.setattr(auto, "measure", lambda chosen, *_: rates[chosen[0].name])
    loader = make(dataset)
    assert loader.backend.name == "auto"
    assert "decoder" not in loader.state_dict()
    with caplog.at_level(logging.INFO, "fastvid"):
        frames_of(loader)
    assert loader.backend.name == "dali-cpu"
    assert "decoder dali-cpu: clips/s with 2 threads: dali-cpu 300, pyav 100" in caplog.text
    state = loader.state_dict()
    assert state["decoder"] == "dali-cpu"

    # A checkpoint keeps the choice: nothing is measured again.
    monkeypatch.setattr(auto, "measure", lambda *_: pytest.fail("tried again"))
    resumed = make(dataset)
    resumed.load_state_dict(state)
    frames_of(resumed)
    assert resumed.backend.name == "dali-cpu"
    # A back-end that is not available here is chosen anew.
    elsewhere = make(dataset)
    elsewhere.load_state_dict({**state, "decoder": "dali-gpu"})
    assert elsewhere.backend.name == "auto"


def test_auto_resumes_at_the_end_of_an_epoch(dataset, monkeypatch):
    rates = {"pyav": 100.0, "dali-cpu": 300.0}
    monkeypatch.setattr(auto, "measure", lambda chosen, *_: rates[chosen[0].name])
    whole = make(dataset)
    for _ in whole:
        state = whole.state_dict()
    assert (state["epoch"], state["position"], state["decoder"]) == (0, 6, "dali-cpu")
    following = frames_of(whole)
    unchosen = {name: value for name, value in state.items() if name != "decoder"}
    for saved, at_first in ((unchosen, "auto"), (state, "dali-cpu")):
        if saved is state:
            monkeypatch.setattr(auto, "measure", lambda *_: pytest.fail("tried again"))
        resumed = make(dataset)
        resumed.load_state_dict(saved)
        # A state of the last batch begins the next epoch, which has batches to measure a decoder on.
        assert (resumed.epoch, resumed.position, resumed.backend.name) == (1, 0, at_first)
        assert frames_of(resumed) == following
        assert resumed.backend.name == "dali-cpu"


def test_auto_measures_real_clips(dataset):
    loader = make(dataset)
    frames_of(loader)
    assert loader.backend.name in ("pyav", "dali-cpu")


def test_auto_skips_measuring_h264_on_a_cpu(videos, tmp_path):
    """Neither a measurement of one second nor the import of a slower library."""
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


def test_default_is_replaced_only_for_a_clear_gain(dataset, monkeypatch):
    for dali, name in ((149.0, "pyav"), (151.0, "dali-cpu")):
        rates = {"pyav": 100.0, "dali-cpu": dali}
        monkeypatch.setattr(auto, "measure", lambda chosen, *_, rates=rates: rates[chosen[0].name])
        assert auto.choose(plans(dataset), CPU, 1).name == name


def test_failing_backend_is_not_chosen(dataset, monkeypatch, caplog):
    def broken(self, clips, outputs):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(DaliCpuDecoder, "decode", broken)
    clips = plans(dataset)
    assert auto.choose(clips, CPU, 1).rates["dali-cpu"] == 0
    assert "dali-cpu is not used: no such luck" in caplog.text


def test_default_is_kept_when_no_clip_can_be_read(monkeypatch):
    dataset = FakeDataset(40)
    for sample in range(40):
        dataset.damage(sample)
    monkeypatch.setattr(auto, "measure", lambda *_: pytest.fail("tried damaged clips"))
    verdict = auto.choose(plans(dataset), CPU, 1)
    assert verdict.name == "pyav"


def test_ranks_use_the_default_without_a_process_group(dataset):
    verdict = auto.agree(plans(dataset), fastvid.runtime.processes.World(1, 2), CPU, 1, frozenset())
    assert verdict.name == "pyav"


RANKS = """
import os, sys
import torch
import torch.distributed as dist
from fastvid.load.device import LoaderStream
from fastvid.load.workers import auto
from fastvid.runtime.processes import World
from tests.load.loaders import clip_loader

child = os.fork()
rank = 0 if child else 1
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
auto.choose = lambda *_: auto.BackendChoice(f"chosen-by-{rank}", {}, "")
verdict = auto.agree([], World(rank, 2), LoaderStream(torch.device("cpu")), 1, frozenset())
sys.stdout.write(f"rank {rank} takes {verdict.name}\\n")
sys.stdout.flush()
dist.destroy_process_group()
if child:
    os.waitpid(child, 0)
"""


def test_all_ranks_use_the_choice_of_rank_0(tmp_path):
    command = [sys.executable, "-c", RANKS, str(tmp_path / "store")]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert sorted(run.stdout.split("\n"))[1:] == ["rank 0 takes chosen-by-0", "rank 1 takes chosen-by-0"]


def test_invalid_decoder_names_are_refused(dataset, known):
    with pytest.raises(UsageError, match="twice"):
        make(dataset, decoder="pyav+pyav")
    gpu = Backend("gpu", f"{__name__}:DeviceLane", "cuda", frozenset(Codec), "nothing")
    with pytest.raises(UsageError, match="leaves frames on a GPU"):
        make(dataset, decoder=gpu)
    with pytest.raises(UsageError, match="device_lanes"):
        make(dataset, decoder="pyav", device_lanes=0)


def test_device_canvas_keeps_the_layout_of_uint8_values():
    product = VideoSpec((2, 4, 6), "BTCHW", None, CPU)
    canvas = DeviceRgbSink(product, [None, None], None)
    output = canvas.output(0, frozenset({DeviceRgb}))
    output.data.copy_(torch.arange(3 * 2 * 24, dtype=torch.uint8).view(3, 2, 4, 6))
    canvas.done(0, good=True)
    canvas.output(1, frozenset({DeviceRgb})).data.fill_(9)
    canvas.done(1, good=False)
    video = canvas.finish()
    assert video.shape == (2, 2, 3, 4, 6)
    assert np.array_equal(video[0].transpose(0, 1).numpy(), output.data.numpy())
    assert not video[1].any()
