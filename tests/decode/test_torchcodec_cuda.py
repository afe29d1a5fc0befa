"""torchcodec on a GPU: which versions, device, stream, back-end and cache it is asked for."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from fastvid.decode import engines
from fastvid.decode import torchcodec as ours
from fastvid.decode.backends import backend
from fastvid.decode.request import DeviceRgb
from fastvid.errors import DecodeError
from fastvid.format.schema import Codec
from tests import fake_cuda
from tests.conformance.outputs import empty, numbers


@pytest.fixture
def gpu(monkeypatch):
    """Replace CUDA, and torchcodec's decoders of a GPU by those of the CPU; the record of what was asked for."""
    cuda, real = fake_cuda.install(monkeypatch), ours.VideoDecoder
    seen = SimpleNamespace(cuda=cuda, capacity=20, backends=[], devices=[], streams=set(), fallback="")

    @contextlib.contextmanager
    def set_cuda_backend(name):
        seen.backends.append(name)
        yield

    class VideoDecoder:
        def __init__(self, source, *, device, **options):
            seen.devices.append(device)
            self.decoder, self.cpu_fallback = real(source, device="cpu", **options), seen.fallback

        def get_frames_at(self, positions):
            batch, stream = self.decoder.get_frames_at(positions), cuda.current_stream("cuda:1")
            seen.streams.add(stream.name)
            data = cuda.wrap(batch.data, 1).add_(0)
            return SimpleNamespace(data=data, pts_seconds=batch.pts_seconds)

    decoders = SimpleNamespace(
        set_cuda_backend=set_cuda_backend,
        get_nvdec_cache_capacity=lambda: seen.capacity,
        set_nvdec_cache_capacity=lambda capacity: setattr(seen, "capacity", capacity),
    )
    monkeypatch.setattr(ours, "VideoDecoder", VideoDecoder)
    monkeypatch.setattr(ours, "_cuda_decoders", lambda: decoders)
    monkeypatch.setattr(engines, "capabilities", lambda device_id: {Codec.H264: 5})
    yield seen
    assert not cuda.races


def test_decodes_on_its_device_and_stream_with_a_cache(gpu, videos):
    decoder = backend("torchcodec-cuda").open(device_id=1)
    gpu.cuda.syncs.clear()
    for frames in ([7, 60, 7], [3]):
        assert numbers(decoder, videos.painted("compact").clip(frames), DeviceRgb, "cuda:1") == frames
    assert not [what for _, what in gpu.cuda.syncs if what.startswith("device")]
    assert gpu.devices == ["cuda:1", "cuda:1"]
    assert gpu.backends == ["nvdec", "nvdec"]
    assert gpu.streams == {decoder._stream.stream.name}
    assert gpu.capacity == 64


def test_larger_cache_is_kept(gpu):
    gpu.capacity = 100
    backend("torchcodec-cuda").open(device_id=1)
    assert gpu.capacity == 100


def test_fallback_to_the_cpu_is_an_error(gpu, videos):
    decoder = backend("torchcodec-cuda").open(device_id=1)
    gpu.fallback = "Video not supported"
    clip = videos.painted("compact").clip([7])
    (error,) = decoder.decode([clip], [empty(clip, DeviceRgb, "cuda:1")])
    assert isinstance(error, DecodeError)
    assert "cannot decode this stream on the GPU: Video not supported" in str(error)


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("0.13.1+cu130", "torchcodec 0.13.1+cu130 has no cache of NVDEC decoders"),
        ("0.17.0+cpu", "torchcodec 0.17.0+cpu is built without CUDA"),
        ("0.14.0+cu130", None),
    ],
)
def test_version_without_nvdec_is_unavailable(version, why, monkeypatch):
    fake_cuda.install(monkeypatch)
    monkeypatch.setattr(engines, "capabilities", lambda device_id: {Codec.H264: 5})
    # By name: only the back-end's own import of torchcodec lets it use PyAV's FFmpeg.
    monkeypatch.setattr("torchcodec.__version__", version)
    found = backend("torchcodec-cuda").why_unavailable(3)
    assert found is None if why is None else why in found


def test_machine_whose_gpu_fails_says_why(monkeypatch):
    fake_cuda.install(monkeypatch)

    def full(device_id):
        raise RuntimeError("CUDA error: out of memory\nmore lines")

    monkeypatch.setattr(engines, "capabilities", full)
    for name in ("dali-gpu", "torchcodec-cuda"):
        assert (
            backend(name).why_unavailable(0)
            == f"check of decoder {name!r} failed: RuntimeError: CUDA error: out of memory"
        )
    assert torch.cuda.is_available()
