"""Which decoders exist: a lazy table of names, import strings and install hints.

A back-end's module is imported when it is first used. Third parties add one by an entry point in the group
``fastvid.decoders`` whose value is a `Backend`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from types import MappingProxyType
from typing import Any

from fastvid.decode.request import Decoder
from fastvid.errors import FastvidError, MissingDependency, UsageError
from fastvid.format.schema import Codec

ENTRY_POINTS = "fastvid.decoders"


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to decode.

    Attributes:
        name: What users type.
        target: ``module:class`` of the decoder, a `fastvid.decode.request.Decoder`. The class takes keyword options,
            names its ``outputs``, and may define class methods: ``check()`` raises MissingDependency when this machine
            cannot run it; ``lanes()`` says how many decoders serve the device best, by default one for each thread.
        device: Where decoded frames are, "cpu" or "cuda".
        codecs: What it decodes.
        install: The pip requirement that brings it.
    """

    name: str
    target: str
    device: str
    codecs: frozenset[Codec]
    install: str

    def load(self) -> Any:
        """The decoder's class.

        Raises:
            MissingDependency: Its package is absent or does not load.
        """
        module, _, attribute = self.target.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except MissingDependency as error:
            raise MissingDependency(f"decoder {self.name!r} does not load: {error.message}", hint=error.hint) from error
        except ImportError as error:
            # What is installed and does not load is not helped by installing it.
            hint = f"pip install {self.install!r}" if isinstance(error, ModuleNotFoundError) else None
            raise MissingDependency(f"decoder {self.name!r} does not load: {error}", hint=hint) from error

    def open(self, **options: Any) -> Decoder:
        """A new decoder, to be used by one thread at a time."""
        decoder: Decoder = self.load()(**options)
        return decoder

    def lanes(self, num_threads: int) -> int:
        """How many decoders to open where `num_threads` threads may decode."""
        lanes = getattr(self.load(), "lanes", None)
        return num_threads if lanes is None else int(lanes())

    def why_unavailable(self) -> str | None:
        """None when the decoder runs on this machine, else one sentence that says what is missing."""
        try:
            check = getattr(self.load(), "check", None)
            if check is not None:
                check()
        except FastvidError as error:
            return str(error).replace("\n", ";")
        return None


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
        codecs=frozenset({Codec.H264, Codec.HEVC, Codec.VP9}),
        install="fastvid-toolkit[dali-cuda13]",
    ),
    Backend(
        name="pyav",
        target="fastvid.decode.pyav:PyAvDecoder",
        device="cpu",
        codecs=frozenset(Codec),
        install="fastvid-toolkit",
    ),
    Backend(
        name="torchcodec-cpu",
        target="fastvid.decode.torchcodec:TorchcodecCpuDecoder",
        device="cpu",
        codecs=frozenset({Codec.H264, Codec.HEVC, Codec.VP9}),
        install="torchcodec",
    ),
    Backend(
        name="torchcodec-cuda",
        target="fastvid.decode.torchcodec:TorchcodecCudaDecoder",
        device="cuda",
        codecs=frozenset({Codec.H264, Codec.HEVC, Codec.VP9}),
        install="torchcodec",
    ),
)


@cache
def backends() -> Mapping[str, Backend]:
    """All known back-ends by name: the built-in ones and those of installed packages."""
    table = {backend.name: backend for backend in _BUILT_IN}
    for point in metadata.entry_points(group=ENTRY_POINTS):
        backend = point.load()
        if not isinstance(backend, Backend):
            raise UsageError(f"entry point {point.value!r} of group {ENTRY_POINTS} is no Backend")
        if backend.name in table:
            raise UsageError(f"decoder {backend.name!r} is registered twice", file=point.value)
        table[backend.name] = backend
    return MappingProxyType(dict(sorted(table.items())))


def backend(name: str) -> Backend:
    """The back-end of that name.

    Raises:
        UsageError: No back-end has the name.
    """
    try:
        return backends()[name]
    except KeyError:
        raise UsageError(f"decoder {name!r} is not known", hint=f"known are {', '.join(backends())}") from None
