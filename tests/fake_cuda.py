"""Replaces torch's CUDA for tests on a CPU; see `tests.fake_cuda_state` for what it models."""

from types import SimpleNamespace

import torch

from tests.fake_cuda_state import DeviceTensor, FakeCuda
from tests.fake_cuda_streams import Event, Stream

_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "empty_strided", "as_tensor")


def install(monkeypatch, devices=4):
    """Replace torch's CUDA for a test; returns the `FakeCuda`."""
    cuda = FakeCuda(devices)
    properties = SimpleNamespace(name="Fake", total_memory=1 << 34, multi_processor_count=8, major=9, minor=0)
    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "device_count": lambda: devices,
        "current_device": cuda.current_device,
        "set_device": cuda.set_device,
        "device": cuda.device,
        "Stream": Stream,
        "Event": Event,
        "current_stream": cuda.current_stream,
        "default_stream": cuda.default_stream,
        "set_stream": cuda.set_stream,
        "stream": cuda.stream,
        "synchronize": cuda.synchronize,
        "get_device_properties": lambda _device=None: properties,
        "get_device_name": lambda _device=None: properties.name,
        "get_device_capability": lambda _device=None: (properties.major, properties.minor),
        "memory_allocated": lambda _device=None: 0,
        "max_memory_allocated": lambda _device=None: 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in _FACTORIES:
        monkeypatch.setattr(torch, name, _factory(cuda, name, getattr(torch, name)))
    plain_to, plain_cpu, plain_tolist = torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.tolist

    def to(self, *args, **kwargs):
        like = args[0] if args and isinstance(args[0], DeviceTensor) else None
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        device = like.device if like is not None else device
        if device is None or torch.device(device).type not in ("cuda", "cpu"):
            return plain_to(self, *args, **kwargs)
        on_device = isinstance(self, DeviceTensor)
        if device.type == "cpu":
            moved = cuda.download(self) if on_device else self
        elif on_device and self.block.device == cuda.index(device):
            moved = self
        else:
            moved = cuda.upload(cuda.download(self) if on_device else self, device, non_blocking)
        return moved if dtype is None or dtype == moved.dtype else plain_to(moved, dtype)

    for name, method in {
        "to": to,
        "cuda": lambda self, device=None, non_blocking=False: to(
            self, torch.device("cuda", cuda.index(device)), non_blocking=non_blocking
        ),
        "cpu": lambda self: cuda.download(self) if isinstance(self, DeviceTensor) else plain_cpu(self),
        "tolist": lambda self: plain_tolist(cuda.download(self) if isinstance(self, DeviceTensor) else self),
        "pin_memory": lambda self: cuda.pin(self.clone()),
        "is_pinned": lambda self: not isinstance(self, DeviceTensor) and cuda.is_pinned(self),
    }.items():
        monkeypatch.setattr(torch.Tensor, name, method)
    return cuda


def _factory(cuda, name, plain):
    def make(*args, **options):
        pinned, device = options.pop("pin_memory", False), options.pop("device", None)
        if device is not None and (isinstance(device, int) or torch.device(device).type == "cuda"):
            if name in ("tensor", "as_tensor"):
                return cuda.upload(plain(*args, **options), device, non_blocking=False)
            with cuda.lock:
                made = cuda.wrap(plain(*args, **options), device)
                if not name.startswith("empty"):
                    stream = cuda.current_stream(device)
                    stream.launch()
                    cuda.access("write", made, stream, name)
                return made
        made = plain(*args, **options | ({} if device is None else {"device": device}))
        return cuda.pin(made) if pinned else made

    return make
