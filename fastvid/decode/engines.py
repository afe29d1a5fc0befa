"""What other libraries decode with: the NVDEC engines of a GPU, and the FFmpeg libraries that PyAV has loaded.

The driver's ``cuvidGetDecoderCaps`` (NVIDIA Video Codec SDK, ``cuviddec.h``) reports the engines of the device or MIG
slice that this process sees: 7 on H100 and H200, 5 on A100, none on some slices.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import struct
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
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
        raise MissingDependency(
            f"GPU {index} has no NVDEC engine", hint="choose another GPU, or a MIG slice that has one"
        )


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
                # Drivers before 440 report 0 even if there is an engine.
                found[codec] = max(1, caps.num_engines)
    return found


# All FFmpeg libraries, each after its dependencies.
_FFMPEG: Final = ("avutil", "swresample", "swscale", "avcodec", "avformat", "avfilter", "avdevice")


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


@cache
def expose_ffmpeg() -> None:
    """Let this process find PyAV's FFmpeg libraries by their standard names, such as ``libavcodec.so.62``.

    PyAV's wheels rename their files (``libavcodec-5e6b81c2.so.62.28.102``), so libraries linked to FFmpeg do not find
    them. Linux's loader adds a name to a loaded library when a search for that name leads to the same file. So this
    loads an empty library that only needs the standard names, from a folder where these names are links to PyAV's
    files. Both are deleted immediately: the names remain valid in this process and in processes forked from it.

    Does nothing if PyAV uses the system's FFmpeg, which has the standard names, or on systems other than Linux.
    """
    if sys.platform != "linux" or not _in_wheel("avutil"):
        return
    expose({f"lib{name}.so.{_major(name)}": library(name)._name for name in _FFMPEG})


def expose(files: Mapping[str, str | None]) -> None:
    """Let this process find libraries by other names than their files have, see `expose_ffmpeg`. Linux only."""
    like = Path(library("avutil")._name).read_bytes()[: _HEADER.size]
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


def _in_wheel(name: str) -> list[Path]:
    """Return the files of a library in PyAV's wheel; none if PyAV was built against the system's FFmpeg."""
    package = Path(av.__file__).parent
    # Linux wheels, macOS wheels.
    return [*(package.parent / "av.libs").glob(f"lib{name}-*"), *(package / ".dylibs").glob(f"lib{name}.*")]


def _major(name: str) -> int:
    return av.library_versions[f"lib{name}"][0]


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
