"""fastvid in Lightning, which saves the loader's state and restores it. Started again, it continues with the next clip.

python examples/lightning_trainer.py shards/mine runs/lightning
"""

import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

import fastvid


class Classifier(lightning.LightningModule):
    def __init__(self, url, crop):
        super().__init__()
        self.dataset, self.spatial = fastvid.open(url), fastvid.RandomResizedCrop(crop)
        classes = len(self.dataset.classes)
        self.net = nn.Sequential(nn.AdaptiveAvgPool3d((2, 8, 8)), nn.Flatten(), nn.Linear(384, classes))

    def train_dataloader(self):  # made here, the loader knows its rank, because Lightning has started the process group
        return fastvid.ClipLoader(
            self.dataset, frames=fastvid.Segments(8), spatial=self.spatial, global_batch_size=4, device=self.device
        )

    def training_step(self, batch, _):
        losses = nn.functional.cross_entropy(self.net(batch.video), batch.label, reduction="none")
        return (losses * batch.weight).sum() * self.trainer.world_size  # the mean over all ranks

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def main(url, out, crop=112, **options):
    torch.manual_seed(0)
    saver = ModelCheckpoint(out, save_last=True, every_n_train_steps=1)
    trainer = lightning.Trainer(callbacks=[saver], default_root_dir=out, **{"max_epochs": 2} | options)
    last, model = Path(out, "last.ckpt"), Classifier(url, crop)
    trainer.fit(model, ckpt_path=last if last.exists() else None)
    return model


if __name__ == "__main__":
    main(*sys.argv[1:])
