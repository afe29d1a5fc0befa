"""fastvid inside torchdata's StatefulDataLoader, for code that expects one.

The loader makes whole batches with threads of its own, so the StatefulDataLoader passes them on as they are:
``batch_size=None`` and no workers. Its state holds the loader's, which counts what was delivered.

    pip install torchdata
    python examples/stateful_dataloader.py shards/mine
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import fastvid


class Clips(IterableDataset[fastvid.Batch]):
    """A `ClipLoader` as a dataset of batches that knows its state."""

    def __init__(self, loader: fastvid.ClipLoader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[fastvid.Batch]:
        return iter(self.loader)

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)


def make(url: str, **options: Any) -> StatefulDataLoader:
    """Batches of eight-frame clips."""
    standard: dict[str, Any] = {
        "frames": fastvid.Segments(8),
        "spatial": [fastvid.RandomResizedCrop(224), fastvid.HorizontalFlip(0.5)],
        "global_batch_size": 8,
    }
    loader = fastvid.ClipLoader(fastvid.open(url), **standard | options)
    return StatefulDataLoader(Clips(loader), batch_size=None, num_workers=0)


def main(url: str) -> None:
    """Reads three batches, then goes on from their state in another loader."""
    loader = make(url)
    for number, batch in enumerate(loader):
        sys.stdout.write(f"{batch}\n")
        if number == 2:
            break
    state = loader.state_dict()
    resumed = make(url)
    resumed.load_state_dict(state)
    sys.stdout.write(f"resumed: {next(iter(resumed))}\n")


if __name__ == "__main__":
    main(sys.argv[1])
