"""With ``--fake``: libraries of GPU decoders, posed by PyAV, with the names and arguments that rivals are used with.

Tests compare the arguments with the real packages, and build DALI's graphs with the real DALI.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import sys
from enum import Enum
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import av
import numpy as np
import torch

OutputColorType = Enum("OutputColorType", ["NATIVE", "RGB", "RGBP"])


@cache
def _pictures(source: str | bytes) -> Any:
    """Return all frames of a file or of its bytes, uint8 [N, H, W, 3]."""
    with av.open(source if isinstance(source, str) else io.BytesIO(source)) as container:
        return torch.from_numpy(np.stack([one.to_ndarray(format="rgb24") for one in container.decode(video=0)]))


class SimpleDecoder:
    """Poses as PyNvVideoCodec's, which returns a repeated frame once, and planes below one another."""

    def __init__(self, enc_file_path: str, **options: Any) -> None:
        self.options = options
        self.reconfigure_decoder(enc_file_path)

    def reconfigure_decoder(self, new_source: str) -> None:
        """Use another file."""
        self._frames = _pictures(new_source).movedim(-1, 1)

    def get_batch_frames_by_index(self, indices: list[int]) -> list[Any]:
        """Return frames in the given order."""
        return [self._frames[index].flatten(0, 1) for index in dict.fromkeys(indices)]


class ThreadedDecoder:
    """Poses as PyNvVideoCodec's, whose next batch overwrites the one before."""

    def __init__(self, enc_file_path: str, buffer_size: int, start_frame: int = 0, **options: Any) -> None:
        self.options, self._most, self._lent = options, buffer_size, list[Any]()
        self.reconfigure_decoder(enc_file_path, start_frame)

    def reconfigure_decoder(self, new_source: str, start_frame: int = 0) -> None:
        """Use another file, from a frame on."""
        self._frames = iter(_pictures(new_source).movedim(-1, 1)[start_frame:])

    def get_batch_frames(self, batch_size: int) -> list[Any]:
        """Return the next frames."""
        assert batch_size <= self._most
        for frame in self._lent:
            frame.fill_(0x77)
        self._lent = [frame.clone() for frame in itertools.islice(self._frames, batch_size)]
        return self._lent


class VideoDecoder:
    """Poses as torchcodec's."""

    def __init__(self, source: bytes, **options: Any) -> None:
        self.options, self._frames = options, _pictures(source).movedim(-1, 1)

    def get_frames_at(self, indices: list[int]) -> Any:
        """Return frames in the given order."""
        return SimpleNamespace(data=self._frames[indices])


class Pipeline(contextlib.nullcontext[None]):
    """Poses as DALI's; a node of its graph is a function of what is fed."""

    size: ClassVar[int]

    def __init__(self, batch_size: int, **options: Any) -> None:
        super().__init__()
        Pipeline.size, self.options, self._fed = batch_size, options, dict[str, Any]()
        self.feed_input = self._fed.__setitem__

    def set_outputs(self, *outputs: Any) -> None:
        """Keep the graph."""
        self._outputs = outputs

    def build(self) -> None:
        """Do nothing."""

    def run(self, cuda_stream: Any) -> Any:  # noqa: ARG002
        """Return all outputs."""
        return [SimpleNamespace(at=list(output(self._fed)).__getitem__) for output in self._outputs]


def _source(name: str, **_: Any) -> Any:
    return lambda fed: fed[name]


def _decoded(mp4: Any, *, frames: Any, **_: Any) -> Any:
    return lambda fed: [_pictures(one.tobytes())[wanted] for one, wanted in zip(mp4(fed), frames(fed), strict=True)]


def _read(*, file_list: str, stride: int, **_: Any) -> Any:
    rows, size = itertools.cycle(Path(file_list).read_text().splitlines()), Pipeline.size
    clips = (_pictures(path)[int(first) : int(end) : stride] for path, _, first, end in map(str.split, rows))
    return lambda _: itertools.islice(clips, size), list


def install() -> None:
    """Let imports find the stand-ins from now on."""
    operators = {"decoders": SimpleNamespace(video=_decoded), "readers": SimpleNamespace(video=_read)}
    modules: dict[str, dict[str, Any]] = {
        "PyNvVideoCodec": {one.__name__: one for one in (SimpleDecoder, ThreadedDecoder, OutputColorType)},
        "torchcodec": {},
        "torchcodec.decoders": {"VideoDecoder": VideoDecoder},
        "nvidia.dali": {
            "fn": SimpleNamespace(external_source=_source, **operators),
            "pipeline": SimpleNamespace(Pipeline=Pipeline),
            "types": SimpleNamespace(UINT8="uint8", INT32="int32"),
        },
    }
    for name, values in modules.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(values, __spec__=ModuleSpec(name, None))
