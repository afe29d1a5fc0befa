"""What the video engines of an NVIDIA GPU are: how many, what they decode, and why they cannot be used.

The count comes from the driver's own ``cuvidGetDecoderCaps`` (NVIDIA Video Codec SDK, ``cuviddec.h``), which answers
for the device or MIG slice that this process sees: 7 on H100 and H200, 5 on A100, none on some slices.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Final

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


def current_device() -> int:
    """Number of torch's current GPU.

    Raises:
        MissingDependency: torch is absent or sees none.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingDependency(f"torch does not load: {error}", hint="pip install torch") from error
    if not torch.cuda.is_available():
        raise MissingDependency("torch sees no CUDA device", hint="needs an NVIDIA GPU, its driver, and torch for CUDA")
    return torch.cuda.current_device()


def synchronize(device_id: int) -> None:
    """Waits until everything that was begun on a GPU by this process is done."""
    import torch

    torch.cuda.synchronize(device_id)


def require(device_id: int) -> None:
    """Raises MissingDependency unless the GPU has engines that decode."""
    if not engines(device_id):
        raise MissingDependency(
            f"GPU {device_id} has no NVDEC engine", hint="choose another GPU, or a MIG slice that has one"
        )


def engines(device_id: int, codec: Codec = Codec.H264) -> int:
    """How many engines of a GPU decode a codec, 8 bits and 4:2:0.

    Raises:
        MissingDependency: The driver's decoding library is not there, as in a container without the ``video``
            capability, or does not answer.
    """
    return capabilities(device_id).get(codec, 0)


@cache
def capabilities(device_id: int) -> dict[Codec, int]:
    """Engines for each codec that a GPU decodes.

    Raises:
        MissingDependency: See `engines`.
    """
    import torch

    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise MissingDependency(
            f"{_LIBRARY} of the NVIDIA driver does not load: {error}",
            hint="give the container the `video` capability: NVIDIA_DRIVER_CAPABILITIES=compute,utility,video",
        ) from error
    with torch.cuda.device(device_id):
        torch.cuda.synchronize()  # cuvidGetDecoderCaps needs a CUDA context, which torch makes at its first use
        found = {}
        for codec, number in _CODECS.items():
            caps = _Caps(codec=number, chroma_format=_CHROMA_420)
            code = library.cuvidGetDecoderCaps(ctypes.byref(caps))
            if code:
                raise MissingDependency(f"cuvidGetDecoderCaps failed with CUDA error {code}")
            if caps.is_supported:
                # Drivers before 440 leave the count zero where there is at least one engine.
                found[codec] = max(1, caps.num_engines)
    return found
