"""FFmpeg's libraries as PyAV has loaded them, for the few functions that PyAV does not offer."""

from __future__ import annotations

import ctypes
import ctypes.util
from functools import cache
from pathlib import Path
from typing import Any

import av

from fastvid.errors import MissingDependency


@cache
def library(name: str) -> Any:
    """A library by its name without "lib", such as "swscale".

    Raises:
        MissingDependency: The one that PyAV uses is not where its wheels have it, nor where the system has its own.
    """
    package = Path(av.__file__).parent
    # Linux wheels, macOS wheels, and a PyAV that was built against the system's FFmpeg.
    paths = [*(package.parent / "av.libs").glob(f"lib{name}-*"), *(package / ".dylibs").glob(f"lib{name}.*")]
    for path in filter(None, [*map(str, paths), ctypes.util.find_library(name)]):
        try:
            found = ctypes.CDLL(path)
        except OSError:
            continue
        if getattr(found, f"{name}_version")() >> 16 == av.library_versions[f"lib{name}"][0]:
            return found
    raise MissingDependency(f"lib{name} that PyAV uses is not found", hint="pip install --force-reinstall av")
