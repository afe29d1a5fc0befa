"""FFmpeg's libraries as PyAV has loaded them: for what PyAV does not offer, and for packages that bring no FFmpeg."""

from __future__ import annotations

import ctypes
import ctypes.util
import struct
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import av

from fastvid.errors import MissingDependency

# All of FFmpeg's, each after those that it needs.
_FFMPEG: Final = ("avutil", "swresample", "swscale", "avcodec", "avformat", "avfilter", "avdevice")


@cache
def library(name: str) -> Any:
    """A library by its name without "lib", such as "swscale".

    Raises:
        MissingDependency: The one that PyAV uses is not where its wheels have it, nor where the system has its own.
    """
    for path in filter(None, [*map(str, _in_wheel(name)), ctypes.util.find_library(name)]):
        try:
            found = ctypes.CDLL(path)
        except OSError:
            continue
        if getattr(found, f"{name}_version")() >> 16 == _major(name):
            return found
    raise MissingDependency(f"lib{name} that PyAV uses is not found", hint="pip install --force-reinstall av")


@cache
def share() -> None:
    """Lets this process find PyAV's copies by the names that others ask for, such as ``libavcodec.so.62``.

    PyAV's wheels give their files names of their own, ``libavcodec-5e6b81c2.so.62.28.102``, so what was linked to
    FFmpeg does not find them. Linux's loader adds a name to a library that it has loaded when a search for that name
    leads to the same file. So it is given a library that holds nothing but a list of needed names, in a folder where
    these names are links to PyAV's files. Both are deleted at once: the names stay for as long as the process runs,
    and for processes forked from it.

    Nothing happens where PyAV uses the system's FFmpeg, which everybody finds, and on other systems than Linux.

    Raises:
        MissingDependency: A library of PyAV is not where its wheels have it, or the loader does not take the list.
    """
    if sys.platform != "linux" or not _in_wheel("avutil"):
        return
    files = {f"lib{name}.so.{_major(name)}": library(name)._name for name in _FFMPEG}
    with tempfile.TemporaryDirectory(prefix="fastvid-") as folder:
        for name, file in files.items():
            Path(folder, name).symlink_to(file)
        path = Path(folder, "names.so")
        with open(next(iter(files.values())), "rb") as like:
            path.write_bytes(_list_of_needed(list(files), like.read(_HEADER.size)))
        try:
            ctypes.CDLL(str(path))
        except OSError as error:
            raise MissingDependency(f"PyAV's FFmpeg libraries cannot be shared: {error}") from error


def _in_wheel(name: str) -> list[Path]:
    """PyAV's own copies of a library: none where it was built against the system's FFmpeg."""
    package = Path(av.__file__).parent
    # Linux wheels, macOS wheels.
    return [*(package.parent / "av.libs").glob(f"lib{name}-*"), *(package / ".dylibs").glob(f"lib{name}.*")]


def _major(name: str) -> int:
    return av.library_versions[f"lib{name}"][0]


# ELF, 64 bits, little-endian: file header, segment, entry of the dynamic section, symbol.
_HEADER: Final = struct.Struct("<16s2HI3QI6H")
_SEGMENT: Final = struct.Struct("<2I6Q")
_ENTRY: Final = struct.Struct("<2Q")
_SYMBOL: Final = struct.Struct("<IBBHQQ")
_NEEDED, _STRTAB, _SYMTAB, _STRSZ, _SYMENT, _RPATH = 1, 5, 6, 10, 11, 15
_LOAD, _DYNAMIC, _STACK = 1, 2, 0x6474E551


def _list_of_needed(names: Sequence[str], like: bytes) -> bytes:
    """A shared library that needs `names`, looks for them in its own folder, and holds neither code nor symbols.

    Args:
        names: The libraries.
        like: The file header of one for the same machine.
    """
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
    # Readable and writable, never executable: so it loads from a file system that is mounted noexec, too.
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
