"""The registry of decoder back-ends: names, import strings and install hints.

A back-end's module is imported on first use. Third-party packages add a back-end through an entry point in the group
``fastvid.decoders`` whose value is a `Backend`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from types import MappingProxyType
from typing import Any

from fastvid.decode.request import Decoder
from fastvid.errors import FastvidError, MissingDependency, UsageError
from fastvid.format.schema import Codec

ENTRY_POINTS = "fastvid.decoders"  # the group of entry points

_OURS = "fastvid-toolkit"  # fastvid's own distribution


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
            how, hint = "is installed but fails to import", error.hint if isinstance(error, FastvidError) else None
            if _lacks(error, self.install) or (_is_absent(error) and not _is_installed(self.install)):
                how, hint = "is not available", hint or f"pip install {self.install!r}"
            raise MissingDependency(f"decoder {self.name!r} {how}: {_reason(error)}", hint=hint) from error

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


@dataclass(frozen=True, slots=True)
class _Broken(Backend):
    """An invalid plug-in; `entry` is the name of its entry point, `why` explains what is wrong."""

    entry: str = ""
    why: str = ""

    def load(self) -> Any:
        raise MissingDependency(self.why, hint="repair or uninstall the package that registers it")


_BUILT_IN = (
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


@cache
def backends() -> Mapping[str, Backend]:
    """Return all back-ends by name: the built-in ones and those of installed packages.

    An invalid plug-in is listed under the value of its entry point, and raises MissingDependency when it is used.
    """
    table = {backend.name: backend for backend in _BUILT_IN}
    for point in metadata.entry_points(group=ENTRY_POINTS):
        one = _registered(point)
        if one.name in table:
            one = _broken(point, f"decoder {one.name!r} is registered twice")
        table[one.name] = one
    return MappingProxyType(dict(sorted(table.items())))


def _registered(point: metadata.EntryPoint) -> Backend:
    try:
        one = point.load()
    except Exception as error:  # noqa: BLE001 - one broken package must not disable the others
        return _broken(point, f"import failed: {_reason(error)}")
    found = "class" if isinstance(one, type) else type(one).__name__
    return one if isinstance(one, Backend) else _broken(point, f"it is a {found}, not a Backend")


def _broken(point: metadata.EntryPoint, why: str) -> Backend:
    message = f"entry point {point.value!r} of group {ENTRY_POINTS}: {why}"
    return _Broken(point.value, "", "cpu", frozenset(), "", entry=point.name, why=message)


def _is_absent(error: BaseException | None) -> bool:
    """Return whether a module is missing: whether the error, or one of its causes, is a ModuleNotFoundError."""
    return error is not None and (isinstance(error, ModuleNotFoundError) or _is_absent(error.__cause__))


def _lacks(error: BaseException, package: str) -> bool:
    """Return whether the missing module is the package itself."""
    return isinstance(error, ModuleNotFoundError) and error.name == package


def _is_installed(requirement: str) -> bool:
    """Return whether a requirement is installed; of an extra of fastvid, whether any of its packages is."""
    matched = re.match(r"([\w.-]+)(?:\[([\w-]+)])?", requirement)
    names = [matched[1]] if matched else []
    if names == [_OURS]:
        extra = f"extra == '{matched[2] if matched else None}'"
        names = [re.split(r"[^\w.-]", line)[0] for line in _requirements() if extra in line.replace('"', "'")]
    return any(_has(name) for name in names)


def _requirements() -> list[str]:
    try:
        return metadata.requires(_OURS) or []
    except metadata.PackageNotFoundError:  # fastvid runs from a source tree that is not installed
        return []


def _has(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _reason(error: BaseException) -> str:
    """Return the first line of an error's text; with its type, unless it is an ImportError, which needs none."""
    if isinstance(error, FastvidError):
        return error.message
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, ImportError) and text else f"{type(error).__name__}: {text}"


def backend(name: str) -> Backend:
    """Return the back-end of this name; an invalid plug-in is also found by the name of its entry point.

    Raises:
        UsageError: If no back-end has the name.
    """
    known = backends()
    invalid = {one.entry: one for one in known.values() if isinstance(one, _Broken)}
    one = known.get(name) or invalid.get(name)
    if one is None:
        raise UsageError(f"unknown decoder {name!r}", hint=f"use one of {', '.join(known)}")
    return one
