"""What every section of the GPU benchmark shares: the data, the device, the decoders, and where numbers go.

With ``--fake``, decoders on the CPU pose as GPU decoders: they have a GPU decoder's interface, arguments and outputs,
and the frames of PyAV, so that the whole script runs on a machine without a GPU. What they prove is the script.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch

import fastvid
from bench.common.harness import write_json
from fastvid.decode.backends import Backend, backends
from fastvid.decode.pyav import PyAvDecoder
from fastvid.decode.request import DecoderOutput, DevicePlanes, DeviceRgb, EncodedClip, Planes, Rgb
from fastvid.errors import FastvidError, StorageError
from fastvid.format.schema import Codec
from fastvid.train.config.config import Amp
from fastvid.videos.dataset import VideoDataset


class _Fake:
    """PyAV behind the interface of a GPU decoder."""

    max_clips = 4
    codecs: ClassVar[frozenset[Codec]] = frozenset({Codec.H264, Codec.HEVC})
    outputs: ClassVar[frozenset[type]]

    def __init__(self, *, device_id: int = 0, num_threads: int = 1) -> None:
        self.device_id, self.num_threads = device_id, num_threads
        self._decoder = PyAvDecoder()

    @staticmethod
    def lanes(device_id: int | None = None) -> int:  # noqa: ARG004
        """Return the number of engines, two."""
        return 2

    def close(self) -> None:
        """Release the decoder."""
        self._decoder.close()

    def decode(self, clips: Sequence[EncodedClip], outputs: Sequence[DecoderOutput]) -> list[FastvidError | None]:
        """See `fastvid.decode.request.Decoder`."""
        return [self._one(clip, output) for clip, output in zip(clips, outputs, strict=True)]

    def _one(self, clip: EncodedClip, output: DecoderOutput) -> FastvidError | None:
        assert isinstance(output, DeviceRgb | DevicePlanes)
        if isinstance(output, DeviceRgb):
            rgb = np.empty(tuple(output.data.shape), np.uint8)
            (error,) = self._decoder.decode([clip], [Rgb(rgb)])
            output.data.copy_(torch.from_numpy(rgb))
            return error
        frames, box = len(clip.request.frames), clip.request.box
        planes = Planes.packed(np.empty(Planes.nbytes(frames, box), np.uint8), frames, box)
        (error,) = self._decoder.decode([clip], [planes])
        output.y.copy_(torch.from_numpy(planes.y))
        for channel, plane in enumerate((planes.u, planes.v)):
            output.uv[..., channel].copy_(torch.from_numpy(plane))
        return error


class FakeRgb(_Fake):
    """Poses as a decoder that leaves RGB on the device."""

    outputs = frozenset({DeviceRgb})


class FakePlanes(_Fake):
    """Poses as a decoder that leaves NV12 on the device, or RGB where that is wanted."""

    outputs = frozenset({DevicePlanes, DeviceRgb})


BACKENDS: Final = tuple(
    Backend(name=name, target=f"bench.gpu.settings:{kind}", device="cpu", codecs=_Fake.codecs, install="")
    for name, kind in (("fake-planes", "FakePlanes"), ("fake-rgb", "FakeRgb"))
)
"""The decoders of ``--fake``."""


MANIFEST: Final = "pack.json"
REFERENCE: Final = "reference"
NUM_FRAMES: Final = 8


@dataclass(frozen=True)
class Settings:
    """The arguments of a section; a section runs in a process of its own, so they must pickle."""

    data: Path
    fake: bool = False
    seconds: float = 4.0
    batch: int = 32
    model: str = "tsm-r50"
    model_options: Mapping[str, Any] = field(default_factory=dict)
    amp: Amp = "bf16"

    @property
    def device(self) -> torch.device:
        """The device of batches and models."""
        return torch.device("cpu") if self.fake else torch.device("cuda", 0)

    def datasets(self, *, lines: int | None = None) -> dict[str, VideoDataset]:
        """Return the datasets of the pack by name, or those with a number of lines."""
        manifest = self.data / MANIFEST
        if not manifest.exists():
            raise StorageError(
                "not the data of this benchmark", file=manifest, hint="make them with `python -m bench gpu --pack DIR`"
            )
        rows = json.loads(manifest.read_text())["datasets"]
        wanted = [row["name"] for row in rows if lines in (None, row["lines"])]
        return {name: fastvid.open(self.data / name) for name in wanted}

    def smallest(self) -> tuple[str, VideoDataset]:
        """Return the dataset of sections that need only one: compact, with the fewest lines."""
        every = self.datasets()
        rows = json.loads((self.data / MANIFEST).read_text())["datasets"]
        name = min((row["lines"], row["name"]) for row in rows if row["name"].startswith("compact"))[1]
        return name, every[name]

    def on_device(self) -> tuple[list[Backend], dict[str, str]]:
        """Return the decoders that leave frames on the device, and why others cannot run here, by name."""
        if self.fake:
            return list(BACKENDS), {}
        found = [one for one in backends().values() if one.device == "cuda"]
        reasons = {one.name: why for one in found if (why := one.why_unavailable()) is not None}
        return [one for one in found if one.name not in reasons], reasons

    def index(self) -> int:
        """Return the device's index, as decoders take it."""
        return self.device.index or 0


class Notes:
    """The numbers of a section, written to a file with every addition, so that a time limit loses none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, Any] = {}

    def put(self, **values: Any) -> None:
        """Add values by name."""
        self._found |= values
        write_json(self._path, self._found)

    def get(self, name: str, default: Any) -> Any:
        """Return a value that was put, or the default."""
        return self._found.get(name, default)

    def row(self, table: str, **values: Any) -> None:
        """Add a row to a table."""
        self.put(**{table: [*self._found.get(table, []), values]})
