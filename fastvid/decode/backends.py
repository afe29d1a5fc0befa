"""The decoder back-ends: names, import strings and install hints.

A back-end's module is imported on first use. A back-end of one's own is a `Backend`, named as ``module:name``.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Final

from fastvid.decode.request import Decoder
from fastvid.errors import FastvidError, MissingDependency, UsageError
from fastvid.format.schema import Codec
from fastvid.runtime.names import import_name


@dataclass(frozen=True, slots=True)
class Backend:
    """A decoder back-end.

    Attributes:
        name: The name that users type.
        target: ``module:class`` of the decoder, a `fastvid.decode.request.Decoder`. The class takes keyword options,
            defines its ``outputs``, and may define class methods: ``check()`` raises MissingDependency if this machine
            cannot run it; ``lanes()`` returns the best number of decoders for the device, by default one per thread.
            If `device` is "cuda", the class, ``check`` and ``lanes`` take ``device_id``, the index of the GPU; None
            means the calling thread's current one. It is opened in the thread that uses it.
        device: Device of the decoded frames, "cpu" or "cuda".
        codecs: The codecs that it decodes.
        install: The pip requirement that installs it.
        bound: Largest allowed mean difference of a frame from `pyav`'s RGB, in levels of 255, for
            `fastvid.decode.parity`. The default leaves room for interpolated chroma, but not for wrong coefficients or
            a wrong range.
    """

    name: str
    target: str
    device: str
    codecs: frozenset[Codec]
    install: str
    bound: float = 4.0

    def load(self) -> Any:
        """Import and return the decoder's class.

        Raises:
            MissingDependency: If its package is missing or fails to import.
        """
        module, _, attribute = self.target.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except Exception as error:
            hint = error.hint if isinstance(error, FastvidError) else None
            hint = hint or (f"pip install {self.install!r}" if _is_absent(error) else None)
            raise MissingDependency(f"decoder {self.name!r} is not available: {_reason(error)}", hint=hint) from error

    def open(self, **options: Any) -> Decoder:
        """Create a decoder, to be used by one thread at a time."""
        decoder: Decoder = self.load()(**options)
        return decoder

    def lanes(self, num_threads: int, device_id: int | None = None) -> int:
        """Return how many decoders to open when `num_threads` threads may decode.

        Args:
            num_threads: Threads that may decode on the CPU.
            device_id: Index of the GPU; by default torch's current one. Back-ends of the CPU ignore it.
        """
        lanes = getattr(self.load(), "lanes", None)
        return num_threads if lanes is None else int(lanes(**self._where(device_id)))

    def why_unavailable(self, device_id: int | None = None) -> str | None:
        """Return None if the decoder runs on this machine, else one line that says what is missing.

        Args:
            device_id: Index of the GPU; by default torch's current one. Back-ends of the CPU ignore it.
        """
        try:
            check = getattr(self.load(), "check", None)
            if check is not None:
                check(**self._where(device_id))
        except FastvidError as error:
            return str(error).replace("\n", ";")
        except Exception as error:  # noqa: BLE001 - drivers and third-party code may raise any exception
            return f"check of decoder {self.name!r} failed: {_reason(error)}"
        return None

    def _where(self, device_id: int | None) -> dict[str, int | None]:
        return {"device_id": device_id} if self.device == "cuda" else {}


_BUILT_IN: Final = (
    Backend(
        name="dali-cpu",
        target="fastvid.decode.dali:DaliCpuDecoder",
        device="cpu",
        codecs=frozenset({Codec.VP9, Codec.MJPEG}),
        install="fastvid-toolkit[dali-cuda13]",
    ),
    Backend(
        name="dali-gpu",
        target="fastvid.decode.dali:DaliGpuDecoder",
        device="cuda",
        codecs=frozenset({Codec.H264, Codec.HEVC, Codec.VP9, Codec.MJPEG}),
        install="fastvid-toolkit[dali-cuda13]",
    ),
    Backend(
        name="nvdec",
        target="fastvid.decode.nvdec:NvdecDecoder",
        device="cuda",
        codecs=frozenset({Codec.H264, Codec.HEVC, Codec.VP9, Codec.AV1}),
        install="fastvid-toolkit[nvdec]",
        bound=1.5,
    ),
    Backend(
        name="pyav",
        target="fastvid.decode.pyav:PyAvDecoder",
        device="cpu",
        codecs=frozenset(Codec),
        install="fastvid-toolkit",
        bound=0.0,
    ),
)


BACKENDS: Final = {one.name: one for one in _BUILT_IN}
"""The built-in back-ends by name."""


def _is_absent(error: BaseException | None) -> bool:
    """Return whether a module is missing: whether the error, or one of its causes, is a ModuleNotFoundError."""
    return error is not None and (isinstance(error, ModuleNotFoundError) or _is_absent(error.__cause__))


def _reason(error: BaseException) -> str:
    """Return the first line of an error's text; with its type, unless it is an ImportError, which needs none."""
    if isinstance(error, FastvidError):
        return error.message
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, ImportError) and text else f"{type(error).__name__}: {text}"


def backend(name: str) -> Backend:
    """Return the built-in back-end of this name, or the one of one's own that ``module:name`` names.

    Raises:
        UsageError: If there is none, or the object is no `Backend`.
    """
    if ":" not in name and name not in BACKENDS:
        raise UsageError(f"unknown decoder {name!r}", hint=f"use one of {', '.join(BACKENDS)}, or module:name")
    one = BACKENDS[name] if name in BACKENDS else import_name("decoder", name)
    if not isinstance(one, Backend):
        found = "a class" if isinstance(one, type) else type(one).__name__
        raise UsageError(f"decoder is {name!r}, which is {found}, not a Backend", hint="name a Backend of the module")
    return one
