"""Which sampler and which crop make the clips of each sample: the same for all, or one of each for every dataset."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.load.clips.augment import Spatial, Transform
from fastvid.load.clips.crop_size import Size
from fastvid.load.clips.sampling import Sampler, clip_length
from fastvid.load.clips.timed_sampling import Deltas
from fastvid.load.order.every_frame import EveryFrame
from fastvid.load.order.mixture import Mixture

Frames = Sampler | Mapping[str, Sampler]
"""A sampler, or one for each dataset of a mixture by name."""

Crops = Sequence[Transform] | Transform | Mapping[str, Sequence[Transform] | Transform]
"""A crop with at most one flip, or those of each dataset of a mixture by name."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class ClipRules:
    """The sampler and the transforms of each dataset. Worker processes use it too, so it contains no dataset."""

    samplers: tuple[Sampler, ...]  # sampler of each dataset, or one for all samples
    spatials: tuple[Spatial, ...]  # transforms of each dataset, or one for all samples
    # one past the last sample of each dataset; empty if there is one sampler and one crop for all samples.
    ends: tuple[int, ...] = ()

    @classmethod
    def of(cls, dataset: Dataset | Mixture, frames: Frames, spatial: Crops) -> ClipRules:
        """Build from a loader's arguments."""
        if isinstance(dataset, EveryFrame) and (not isinstance(frames, Deltas) or frames.anchor is not None):
            raise UsageError(
                f"EveryFrame has items, whose frames {frames!r} does not choose",
                hint="use frames=Deltas([...]) without an anchor: the seconds are counted from each item",
            )
        if not isinstance(frames, Mapping) and not isinstance(spatial, Mapping):
            return cls((frames,), (Spatial.of(spatial),))
        if not isinstance(dataset, Mixture):
            argument = "frames" if isinstance(frames, Mapping) else "spatial"
            raise UsageError(
                f"{argument} is a mapping, but the dataset is not a mixture",
                hint=f"give one {argument} for all samples, or a Mixture of datasets with these names",
            )
        samplers = dataset.by_name("frames", frames) if isinstance(frames, Mapping) else (frames,) * len(dataset.names)
        crops = dataset.by_name("spatial", spatial) if isinstance(spatial, Mapping) else (spatial,) * len(dataset.names)
        return cls(samplers, tuple(Spatial.of(crop) for crop in crops), dataset.ends)

    def of_sample(self, sample: int) -> tuple[Sampler, Spatial]:
        """Return the sampler and the transforms of a sample."""
        number = bisect_right(self.ends, sample)
        return self.samplers[number], self.spatials[number]

    @property
    def pairs(self) -> tuple[tuple[Sampler, Spatial], ...]:
        """Sampler and transforms of each dataset, or one pair for all samples."""
        return tuple(zip(self.samplers, self.spatials, strict=True))

    @property
    def num_frames(self) -> int | None:
        """Frames of every clip; None if it depends on the video or its dataset."""
        return _common([clip_length(sampler) for sampler in self.samplers])

    @property
    def output(self) -> Size | None:
        """Height and width of every clip in pixels; None if it depends on the video, its dataset or its bucket."""
        return _common([spatial.output for spatial in self.spatials])

    @property
    def sampler_text(self) -> str:
        """The samplers, for a loader's fingerprint."""
        return _joined([repr(sampler) for sampler in self.samplers])

    @property
    def spatial_text(self) -> str:
        """The transforms, for a loader's fingerprint."""
        return _joined([str(spatial) for spatial in self.spatials])


def _common(values: Sequence[_T]) -> _T | None:
    return values[0] if all(value == values[0] for value in values) else None


def _joined(texts: Sequence[str]) -> str:
    return texts[0] if len(set(texts)) == 1 else " + ".join(texts)
