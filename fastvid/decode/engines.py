"""Decoding hardware and libraries of this machine: a GPU's NVDEC engines, and the FFmpeg libraries that PyAV loaded.

The driver's ``cuvidGetDecoderCaps`` (NVIDIA Video Codec SDK, ``cuviddec.h``) reports the engines of the device or MIG
slice that this process sees: 7 on H100 and H200, 5 on A100, none on some slices.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from functools import cache
from pathlib import Path
from typing import Any, Final

import av

from fastvid.errors import MissingDependency
from fastvid.format.schema import Codec

# cudaVideoCodec of cuviddec.h.
_CODECS: Final = {Codec.H264: 4, Codec.MJPEG: 5, Codec.HEVC: 8, Codec.VP8: 9, Codec.VP9: 10, Codec.AV1: 11}
_CHROMA_420: Final = 1
_LIBRARY: Final = "libnvcuvid.so.1"


class _Caps(ctypes.Structure):
    """CUVIDDECODECAPS of cuviddec.h."""

    _fields_ = (
        ("codec", ctypes.c_int),
        ("chroma_format", ctypes.c_int),
        ("bit_depth_minus_8", ctypes.c_uint),
        ("reserved_1", ctypes.c_uint * 3),
        ("is_supported", ctypes.c_ubyte),
        ("num_engines", ctypes.c_ubyte),
        ("output_formats", ctypes.c_ushort),
        ("max_width", ctypes.c_uint),
        ("max_height", ctypes.c_uint),
        ("max_macroblocks", ctypes.c_uint),
        ("min_width", ctypes.c_ushort),
        ("min_height", ctypes.c_ushort),
        ("histogram", ctypes.c_ubyte * 4),
        ("reserved_3", ctypes.c_uint * 10),
    )


def gpu_index(device_id: int | None = None) -> int:
    """Return the index of a GPU, by default the calling thread's current one."""
    try:
        import torch
    except ImportError as error:
        raise MissingDependency(f"torch fails to import: {error}", hint="pip install torch") from error
    if not torch.cuda.is_available():
        raise MissingDependency(
            "torch finds no CUDA device", hint="use a machine with an NVIDIA GPU, its driver, and torch for CUDA"
        )
    return torch.cuda.current_device() if device_id is None else device_id


def require(device_id: int | None = None) -> None:
    """Raise MissingDependency if the GPU, by default the current one, has no NVDEC engine."""
    index = gpu_index(device_id)
    if not engines(index):
        raise MissingDependency(f"GPU {index} has no NVDEC engine", hint="choose another GPU or MIG slice with one")


def engines(device_id: int, codec: Codec = Codec.H264) -> int:
    """Return how many engines of a GPU decode a codec in 8-bit 4:2:0."""
    return capabilities(device_id).get(codec, 0)


@cache
def capabilities(device_id: int) -> dict[Codec, int]:
    """Return the number of engines for each codec that a GPU decodes."""
    import torch

    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise MissingDependency(
            f"cannot load {_LIBRARY} of the NVIDIA driver: {error}",
            hint="give the container the `video` capability: NVIDIA_DRIVER_CAPABILITIES=compute,utility,video",
        ) from error
    found: dict[Codec, int] = {}
    with torch.cuda.device(device_id):
        torch.empty(1, device="cuda")  # cuvidGetDecoderCaps needs a CUDA context, which torch creates on first use
        for codec, number in _CODECS.items():
            caps = _Caps(codec=number, chroma_format=_CHROMA_420)
            code = library.cuvidGetDecoderCaps(ctypes.byref(caps))
            if code:
                raise MissingDependency(f"cuvidGetDecoderCaps failed with CUDA error {code}")
            if caps.is_supported:
                # Drivers before version 440 report 0 engines even if there is one.
                found[codec] = max(1, caps.num_engines)
    return found


@cache
def library(name: str) -> Any:
    """Load one of PyAV's FFmpeg libraries, by its name without "lib", such as "swscale"."""
    for path in filter(None, [*map(str, _in_wheel(name)), ctypes.util.find_library(name)]):
        try:
            found = ctypes.CDLL(path)
        except OSError:
            continue
        if getattr(found, f"{name}_version")() >> 16 == _major(name):
            return found
    raise MissingDependency(f"cannot find the lib{name} that PyAV uses", hint="pip install --force-reinstall av")


def _in_wheel(name: str) -> list[Path]:
    """Return the paths of a library inside PyAV's wheel; none if PyAV was built against the system's FFmpeg."""
    package = Path(av.__file__).parent
    # The folders of Linux and of macOS wheels.
    return [*(package.parent / "av.libs").glob(f"lib{name}-*"), *(package / ".dylibs").glob(f"lib{name}.*")]


def _major(name: str) -> int:
    return av.library_versions[f"lib{name}"][0]
