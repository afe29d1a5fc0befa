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

import torch

import fastvid
from bench.common.harness import write_json
from fastvid.decode.backends import BACKENDS as INSTALLED
from fastvid.decode.backends import Backend
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

    def __init__(self, *, device_id: int = 0, num_threads: int = 1) -> None:
        self.device_id, self.num_threads, self._decoder = device_id, num_threads, PyAvDecoder()
        self.close = self._decoder.close

    @staticmethod
    def lanes(device_id: int | None = None) -> int:  # noqa: ARG004
        """Return the number of engines, two."""
        return 2

    def decode(self, clips: Sequence[EncodedClip], outputs: Sequence[DecoderOutput]) -> list[FastvidError | None]:
        """Decode to the memory of the outputs, which is the host's."""
        return self._decoder.decode(clips, [_on_host(output) for output in outputs])


def _on_host(output: DecoderOutput) -> Rgb | Planes:
    if isinstance(output, DeviceRgb):
        return Rgb(output.data.numpy())
    assert isinstance(output, DevicePlanes)
    return Planes(output.y.numpy(), output.uv[..., 0].numpy(), output.uv[..., 1].numpy())


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

    def datasets(self) -> dict[str, VideoDataset]:
        """Return the datasets of the pack by name."""
        manifest = self.data / MANIFEST
        if not manifest.exists():
            raise StorageError(
                "not the data of this benchmark", file=manifest, hint="make them with `python -m bench gpu --pack DIR`"
            )
        names = [row["name"] for row in json.loads(manifest.read_text())["datasets"]]
        return {name: fastvid.open(self.data / name) for name in names}

    def smallest(self) -> tuple[str, VideoDataset]:
        """Return the dataset of sections that need only one: compact, with the fewest lines; a pack has it first."""
        return next(iter(self.datasets().items()))

    def crop(self, dataset: VideoDataset) -> int:
        """Return the side of a square crop: 224 of 256 lines, 624 of 720, even; a rehearsal has time for 112."""
        info = dataset[0].info
        return min(min(info.height, info.width) * 7 // 8 // 16 * 16, 112 if self.fake else 1 << 20)

    def on_device(self) -> tuple[list[Backend], dict[str, str]]:
        """Return the decoders that leave frames on the device, and why others cannot run here, by name."""
        if self.fake:
            return list(BACKENDS), {}
        found = [one for one in INSTALLED.values() if one.device == "cuda"]
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
