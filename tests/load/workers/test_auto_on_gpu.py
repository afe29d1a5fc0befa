"""decoder="auto" for batches on a GPU, which is the fake one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from fastvid.decode import pixels
from fastvid.decode.backends import Backend
from fastvid.load.device import LoaderStream
from fastvid.load.workers import auto, lanes
from fastvid.runtime.processes import World
from tests import fake_cuda
from tests.load.fakes import FakeDataset, fake
from tests.load.gpu_fakes import GpuDecoder, gpu
from tests.load.tools import make, plans

PYAV = replace(fake("PlanesDecoder"), name="pyav")


@pytest.fixture
def cuda(monkeypatch):
    cuda = fake_cuda.install(monkeypatch)
    monkeypatch.setattr(pixels, "_fused", lambda *_: None)  # a kernel needs a real device
    GpuDecoder.opened.clear()
    return cuda


def know(monkeypatch, *known):
    """Make these the only back-ends."""
    table = {one.name: one for one in (PYAV, *known)}
    monkeypatch.setattr(auto, "backends", lambda: table)
    monkeypatch.setattr(lanes, "backend", table.__getitem__)


def test_backends_are_measured_on_the_device_of_the_loader(cuda, monkeypatch):
    know(monkeypatch, gpu(), gpu("GpuPlanesDecoder"))
    monkeypatch.setattr(auto, "_SECONDS", 0.2)
    verdict = auto.choose(plans(FakeDataset(40), 16), LoaderStream(torch.device("cuda", 3)), 1)
    assert sorted(verdict.rates) == [
        "GpuDecoder",
        "GpuPlanesDecoder",
        "pyav",
        "pyav+GpuDecoder",
        "pyav+GpuPlanesDecoder",
    ]
    assert all(verdict.rates.values())
    assert {device for device, _ in GpuDecoder.opened} == {3}
    # Every decoder has its own stream and waits before it writes to memory that another one has written.
    assert {entry.device for entry in cuda.log} == {3}
    assert len({entry.stream for entry in cuda.entries("write")}) == len(GpuDecoder.opened) == 8
    assert not cuda.races


def test_frames_that_are_not_complete_are_noticed(cuda, monkeypatch):
    """Positive control: a decoder returns before its frames are written, into memory that the next one gets."""
    know(monkeypatch, gpu("Hasty"))
    monkeypatch.setattr(auto, "_SECONDS", 0.2)
    auto.choose(plans(FakeDataset(40), 16), LoaderStream(torch.device("cuda", 3)), 1)
    assert cuda.races


MISSING = Backend("Missing", "no_such_package.module:Decoder", "cuda", PYAV.codecs, "nothing")


@pytest.mark.parametrize("bad", ["NoOutputs", "NoLanes", "NoCheck", "NoOpen", "Missing"])
def test_backend_that_cannot_work_is_passed_over(cuda, monkeypatch, bad):
    know(monkeypatch, MISSING if bad == "Missing" else gpu(bad), gpu())
    rates = {"pyav": 1.0, "GpuDecoder": 9.0, "pyav+GpuDecoder": 5.0}
    measure = auto.measure

    def measured(chosen, *rest):
        name = "+".join(one.name for one in chosen)
        return rates[name] if name in rates else measure(chosen, *rest)

    monkeypatch.setattr(auto, "measure", measured)
    loader = make(FakeDataset(40), decoder="auto", device="cuda:2")
    assert len(list(loader)) == 5
    assert loader.backend.name == "GpuDecoder"
    assert {device for device, _ in GpuDecoder.opened} == {2}


@pytest.mark.parametrize(
    ("group", "device"), [("cuda:nccl", "cuda:2"), ("cpu:gloo,cuda:nccl", "cpu"), ("cpu:gloo,cuda:gloo", "cpu")]
)
def test_ranks_agree_over_what_their_process_group_can_send(cuda, monkeypatch, group, device):
    """A group of NCCL alone cannot send a tensor of the CPU, whatever the device of the batches is."""
    sent = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda: group)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src: (sent.append(tensor.device), tensor.fill_(65)))
    cuda.set_device(2)
    verdict = auto.agree([], World(1, 2), LoaderStream(torch.device("cpu")), 1, frozenset())
    assert set(verdict.name) == {"A"}
    assert sent == [torch.device(device)]
