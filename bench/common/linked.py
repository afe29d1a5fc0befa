"""Load torchcodec and SPDL beside PyAV's FFmpeg and a torch without CUDA.

Both are linked with FFmpeg's libraries by their standard names, which are given to those that PyAV has loaded.

torchcodec's wheels on PyPI are also linked with CUDA's libraries and torch's for CUDA. What decodes on a CPU calls none
of them. So their names are given to empty libraries (CUDA's runtime, which registers kernels when it is loaded, is the
real one), and torchcodec's are loaded lazily: a function is looked for when it is called, not when its library is
loaded.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import struct
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import av

from fastvid.decode import engines
from fastvid.errors import MissingDependency

# All FFmpeg libraries.
_FFMPEG: Final = ("avutil", "swresample", "swscale", "avcodec", "avformat", "avfilter", "avdevice")


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

    expose_ffmpeg()
    spec = importlib.util.find_spec("torchcodec")
    runtime = _runtime()
    if sys.platform != "linux" or torch.version.cuda or spec is None or spec.origin is None or runtime is None:
        return
    package = Path(spec.origin).parent
    expose({_RUNTIME: runtime, **dict.fromkeys(_EMPTY)})
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


@cache
def expose_ffmpeg() -> None:
    """Let this process find PyAV's FFmpeg libraries by their standard names, such as ``libavcodec.so.62``.

    PyAV's wheels rename their files (``libavcodec-5e6b81c2.so.62.28.102``), so libraries linked to FFmpeg do not find
    them. Linux's loader adds a name to a loaded library when a search for that name leads to the same file. So this
    loads an empty library that only needs the standard names, from a folder where these names are links to PyAV's
    files. Both are deleted immediately: the names remain valid in this process and in processes forked from it.

    Does nothing if PyAV uses the system's FFmpeg, which has the standard names, or on systems other than Linux.
    """
    if sys.platform != "linux" or not list((Path(av.__file__).parents[1] / "av.libs").glob("libavutil-*")):
        return
    expose({f"lib{name}.so.{av.library_versions[f'lib{name}'][0]}": engines.library(name)._name for name in _FFMPEG})


def expose(files: Mapping[str, str | None]) -> None:
    """Let this process find libraries by other names than their files have, see `expose_ffmpeg`. Linux only."""
    like = Path(engines.library("avutil")._name).read_bytes()[: _HEADER.size]
    with tempfile.TemporaryDirectory(prefix="fastvid-") as folder:
        for name, file in files.items():
            if file is None:
                Path(folder, name).write_bytes(_list_of_needed([], like))
            else:
                Path(folder, name).symlink_to(file)
        path = Path(folder, "names.so")
        path.write_bytes(_list_of_needed(list(files), like))
        try:
            ctypes.CDLL(str(path))
        except OSError as error:
            raise MissingDependency(f"cannot share the libraries {', '.join(files)}: {error}") from error


# 64-bit little-endian ELF: file header, program header, entry of the dynamic section, symbol.
_HEADER: Final = struct.Struct("<16s2HI3QI6H")
_SEGMENT: Final = struct.Struct("<2I6Q")
_ENTRY: Final = struct.Struct("<2Q")
_SYMBOL: Final = struct.Struct("<IBBHQQ")
_NEEDED, _STRTAB, _SYMTAB, _STRSZ, _SYMENT, _RPATH = 1, 5, 6, 10, 11, 15
_LOAD, _DYNAMIC, _STACK = 1, 2, 0x6474E551


def _list_of_needed(names: Sequence[str], like: bytes) -> bytes:
    """Build a shared library without code or symbols that depends on `names`, searched in its own folder."""
    words = [word.encode() + b"\0" for word in ("", "$ORIGIN", *names)]
    text, starts = b"".join(words), list(accumulate(map(len, words), initial=0))
    segments_at = _HEADER.size
    dynamic_at = segments_at + 3 * _SEGMENT.size
    dynamic_size = (len(names) + 6) * _ENTRY.size
    symbols_at = dynamic_at + dynamic_size
    text_at = symbols_at + _SYMBOL.size
    size = text_at + len(text)

    kind, _, machine, version, _, _, _, flags, *_ = _HEADER.unpack(like)
    sizes = (_HEADER.size, _SEGMENT.size, 3, 0, 0, 0)
    header = _HEADER.pack(kind, 3, machine, version, 0, segments_at, 0, flags, *sizes)
    # Readable and writable but not executable, so that it also loads from a file system mounted noexec.
    segments = b"".join(
        _SEGMENT.pack(what, 6, at, at, at, length, length, align)
        for what, at, length, align in (
            (_LOAD, 0, size, 1 << 16),
            (_DYNAMIC, dynamic_at, dynamic_size, 8),
            (_STACK, 0, 0, 16),
        )
    )
    entries = [(_RPATH, starts[1]), *[(_NEEDED, start) for start in starts[2:-1]]]
    entries += [(_STRTAB, text_at), (_SYMTAB, symbols_at), (_STRSZ, len(text)), (_SYMENT, _SYMBOL.size), (0, 0)]
    dynamic = b"".join(_ENTRY.pack(*entry) for entry in entries)
    return header + segments + dynamic + bytes(_SYMBOL.size) + text
