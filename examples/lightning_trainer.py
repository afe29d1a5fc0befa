"""fastvid inside Lightning: a run that was stopped in the middle of an epoch goes on with the very next clip.

Lightning asks a loader for its state when it saves a checkpoint and gives it back when it goes on; besides, it wants
to know how long whole epochs are. Made in ``train_dataloader``, the loader knows its rank: Lightning has joined the
process group by then.

    pip install lightning
    python examples/lightning_trainer.py shards/mine runs/lightning
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional

import fastvid
from fastvid.models import zoo


class Clips:
    """A `ClipLoader` as Lightning takes loaders."""

    def __init__(self, loader: fastvid.ClipLoader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        """Batches of a whole epoch, also when the one under way was begun before."""
        return self.loader.batches.count(0)

    def __iter__(self) -> Iterator[fastvid.Batch]:
        return iter(self.loader)

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)


class ClipData(lightning.LightningDataModule):
    """Training clips of eight frames."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__()
        self.url, self.options = url, options

    def train_dataloader(self) -> Clips:
        standard: dict[str, Any] = {
            "frames": fastvid.Segments(8),
            "spatial": [fastvid.RandomResizedCrop(224), fastvid.HorizontalFlip(0.5)],
            "global_batch_size": 8,
        }
        device = self.trainer.strategy.root_device if self.trainer else "cpu"
        return Clips(fastvid.ClipLoader(fastvid.open(self.url), device=device, **standard | self.options))


class Classifier(lightning.LightningModule):
    """Any model of clips [B, 3, T, H, W]."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def transfer_batch_to_device(self, batch: fastvid.Batch, device: torch.device, dataloader_idx: int) -> Any:  # noqa: ARG002
        return batch  # the loader has put it there

    def training_step(self, batch: fastvid.Batch, batch_idx: int) -> Tensor:  # noqa: ARG002
        losses = functional.cross_entropy(self.net(batch.video), batch.label, reduction="none")
        # The mean over the global batch: weights of all ranks add up to one, and Lightning divides by their number.
        return (losses * batch.weight).sum() * self.trainer.world_size

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def main(url: str, out: str) -> None:
    """Trains two epochs, with a checkpoint every ten steps; started again, goes on from the newest."""
    torch.manual_seed(0)
    net = zoo.build("tsm-r18", num_classes=len(fastvid.open(url).classes), num_frames=8)
    saver = ModelCheckpoint(dirpath=out, save_last=True, every_n_train_steps=10)
    trainer = lightning.Trainer(max_epochs=2, callbacks=[saver], default_root_dir=out)
    last = Path(out) / "last.ckpt"
    trainer.fit(Classifier(net), datamodule=ClipData(url), ckpt_path=str(last) if last.exists() else None)


if __name__ == "__main__":
    main(*sys.argv[1:])
