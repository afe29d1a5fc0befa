"""Call PyAV's copy of libswscale through its C interface, to convert into memory of our choice.

PyAV's own reformatter allocates its output, which costs another copy. The functions used here have not changed since
libswscale 2 (2011).
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Final

from fastvid.decode.libraries import library
from fastvid.errors import DecodeError

_BILINEAR: Final = 2  # SWS_BILINEAR
_ONE: Final = 1 << 16  # contrast and saturation are 16.16 fixed point

Pointers = ctypes.c_void_p * 4
Strides = ctypes.c_int * 4


@cache
def _functions() -> Any:
    """Load libswscale and declare the signatures of its functions."""
    scale = library("swscale")
    scale.sws_getContext.restype = scale.sws_getCoefficients.restype = ctypes.c_void_p
    scale.sws_getContext.argtypes = [ctypes.c_int] * 7 + [ctypes.c_void_p] * 3
    details = [*[ctypes.c_void_p] * 2, ctypes.c_int, ctypes.c_void_p, *[ctypes.c_int] * 4]
    scale.sws_setColorspaceDetails.argtypes = details
    scale.sws_freeContext.argtypes = [ctypes.c_void_p]
    scale.sws_scale.argtypes = [ctypes.c_void_p, Pointers, Strides, ctypes.c_int, ctypes.c_int, Pointers, Strides]
    return scale


class Scaler:
    """Converts 4:2:0 pictures of one size to planar RGB of one size. Not thread-safe.

    `full`: whether the input has full-range samples.
    """

    def __init__(self, source: tuple[int, int], target: tuple[int, int], colorspace: int, full: bool) -> None:
        scale = _functions()
        formats = [library("avutil").av_get_pix_fmt(name) for name in (b"yuv420p", b"gbrp")]
        self._free = scale.sws_freeContext
        self._context = scale.sws_getContext(
            source[1], source[0], formats[0], target[1], target[0], formats[1], _BILINEAR, None, None, None
        )
        if not self._context:
            raise DecodeError(f"libswscale cannot convert {source} to {target}")
        table = scale.sws_getCoefficients(colorspace)
        scale.sws_setColorspaceDetails(self._context, table, int(full), table, 1, 0, _ONE, _ONE)
        self._scale, self._rows = scale.sws_scale, source[0]

    def __call__(self, source: Any, source_strides: Any, target: Any, target_strides: Any) -> None:
        """Convert one picture from Y, U, V planes to G, B, R planes."""
        self._scale(self._context, source, source_strides, 0, self._rows, target, target_strides)

    def __del__(self) -> None:
        if getattr(self, "_context", None):
            self._free(self._context)
