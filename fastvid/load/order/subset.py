"""Accept `torch.utils.data.Subset`, as `random_split` makes them, wherever a dataset is expected."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

import numpy as np
import numpy.typing as npt

from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.runtime.arrays import IntArray

if TYPE_CHECKING:
    from torch.utils.data import Subset


class _Located(Protocol):
    def locate(self, samples: npt.ArrayLike) -> tuple[IntArray, IntArray]: ...


_Other = TypeVar("_Other", bound=_Located)


@overload
def resolve_subset(dataset: Subset[Any]) -> Dataset: ...


@overload
def resolve_subset(dataset: _Other) -> _Other: ...


def resolve_subset(dataset: Any) -> Any:
    """Return the samples that a `Subset` of a dataset selects, in its order; any other dataset as it is."""
    # Worker processes use mixtures without torch; where nobody has imported torch, nothing is its Subset.
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and isinstance(dataset, torch_data.Subset):
        inner: Any = dataset.dataset
        whole = resolve_subset(inner)
        if not isinstance(whole, Dataset):
            raise UsageError(
                f"dataset is a Subset of a {type(whole).__name__}",
                hint="make subsets of each dataset, then the mixture",
            )
        return whole.select(np.asarray(dataset.indices))
    if not hasattr(dataset, "locate"):
        raise UsageError(
            f"dataset is a {type(dataset).__name__}, expected a dataset of fastvid",
            hint="open one with `fastvid.open`, or combine several in a `fastvid.Mixture`",
        )
    return dataset
