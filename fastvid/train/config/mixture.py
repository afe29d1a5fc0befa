"""The configuration of further datasets that a run trains on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fastvid.errors import UsageError
from fastvid.runtime.checks import check_least

MAIN: Final = "main"
"""Name of the dataset of `DataConfig.path` in a mixture."""


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """A dataset that a run trains on besides `DataConfig.path`.

    Attributes:
        path: Folder or URL of the dataset.
        split: Split to train on; None for all samples.
        where: Filter over the annotations' columns.
        generation: Number or tag of its generation, as `DataConfig.generation`.
        weight: Its share of an epoch, positive; shares need not add up to one. None without weights.
    """

    path: str
    split: str | None = "train"
    where: str | None = None
    generation: int | str | None = None
    weight: float | None = None


def check_mixture(mixture: Mapping[str, DatasetConfig], weight: float | None, epoch_samples: int | None) -> None:
    """Check the settings of a mixture.

    `epoch_samples`: samples in an epoch.
    """
    check_least(1, **{"data.epoch_samples": epoch_samples})
    shares = {"data.weight": weight} | {f"data.mixture.{name}.weight": part.weight for name, part in mixture.items()}
    given = {key: share for key, share in shares.items() if share is not None}
    if not mixture and (given or epoch_samples is not None):
        raise UsageError(
            f"{next(iter(given), 'data.epoch_samples')} is set, but data.mixture names no further dataset",
            hint="set data.mixture.NAME.path, or remove it",
        )
    if MAIN in mixture:
        raise UsageError(
            f"data.mixture names a dataset {MAIN!r}, which is the name of data.path", hint="choose another name"
        )
    if epoch_samples is not None and not given:
        raise UsageError(
            f"data.epoch_samples is {epoch_samples}, but a mixture without weights visits every sample once",
            hint="set data.weight and the weight of each dataset, or remove data.epoch_samples",
        )
    for key, share in shares.items():
        if given and share is None:
            raise UsageError(f"{next(iter(given))} is set, but {key} is not", hint=f"set {key}, or no weight at all")
        if share is not None and not 0 < share < math.inf:
            raise UsageError(f"{key} is {share}, expected a positive number", hint="leave out what is not to be used")
