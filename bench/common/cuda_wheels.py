"""Load torchcodec's wheel for CUDA beside a torch without CUDA, for its decoders on the CPU.

The wheels on PyPI are linked with CUDA's libraries and torch's for CUDA. What decodes on a CPU calls none of them. So
their names are given to empty libraries (CUDA's runtime, which registers kernels when it is loaded, is the real one),
and torchcodec's are loaded lazily: a function is looked for when it is called, not when its library is loaded.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any, Final

import av

from fastvid.decode import engines

_EMPTY: Final = ("libc10_cuda.so", "libtorch_cuda.so", "libnvrtc.so.13")
_RUNTIME: Final = "libcudart.so.13"
_PARTS: Final = ("core", "custom_ops", "pybind_ops", "image")


def video_decoder() -> Any:
    """Import and return torchcodec's ``VideoDecoder``."""
    prepare()
    from torchcodec.decoders import VideoDecoder

    return VideoDecoder


@cache
def prepare() -> None:
    """Prepare the import of torchcodec; does nothing if it is not installed or needs no preparation."""
    import torch

    engines.expose_ffmpeg()
    spec = importlib.util.find_spec("torchcodec")
    runtime = _runtime()
    if sys.platform != "linux" or torch.version.cuda or spec is None or spec.origin is None or runtime is None:
        return
    package = Path(spec.origin).parent
    engines.expose({_RUNTIME: runtime, **dict.fromkeys(_EMPTY)})
    ffmpeg = av.library_versions["libavcodec"][0] - 54  # libavcodec 58 came with FFmpeg 4
    for part in _PARTS:
        for path in (package / f"libtorchcodec_{part}{ffmpeg}.so", package / f"libtorchcodec_{part}.so"):
            if path.exists():
                _load_lazily(path)


def _load_lazily(path: Path) -> None:
    system = ctypes.CDLL(None)
    system.dlopen.argtypes, system.dlopen.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    system.dlopen(os.fsencode(path), os.RTLD_LAZY)  # torchcodec's own import reports what cannot be loaded


def _runtime() -> str | None:
    for folder in sys.path:
        path = Path(folder, "nvidia", "cu13", "lib", _RUNTIME)
        if path.exists():
            return str(path)
    return None
