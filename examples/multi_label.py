"""Clips with several labels: a model and a loss of one's own, resumed, evaluated and used by fastvid.

fastvid shard videos/ --annotations jsonl:labels.jsonl --out shards/mine
python examples/multi_label.py shards/mine runs/labels
PYTHONPATH=examples fastvid eval examples/multi_label.py run.out=runs/labels data.path=shards/mine --protocol 3x1

Each line of labels.jsonl has a video, its split and its labels. Started again, the run continues.
"""

import sys
from dataclasses import dataclass

from torch import nn

import fastvid
from fastvid.train import Config, DataConfig, ModelConfig, MultiLabel, OptimConfig, RunConfig, fit


class Net(nn.Module):
    """Pooled pixels and a linear layer; put your own here. It may return a dict or any object with ``logits``."""

    def __init__(self, num_classes, num_frames, side=6):
        super().__init__()
        self.pool = nn.AdaptiveAvgPool3d((num_frames, side, side))
        self.head = nn.Linear(3 * num_frames * side * side, num_classes)

    def forward(self, video):
        return {"logits": self.head(self.pool(video).flatten(1))}


@dataclass(frozen=True)
class Focal(MultiLabel):
    """Several labels, with the focal loss (Lin et al. 2017) instead of the binary cross-entropy."""

    gamma: float = 2.0

    def loss(self, outputs, batch):
        wrong = (batch.labels - outputs["logits"].sigmoid()).abs()
        entropy = nn.functional.binary_cross_entropy_with_logits(outputs["logits"], batch.labels, reduction="none")
        return (wrong**self.gamma * entropy).mean(1)


def recipe(url="shards/mine", out="runs/labels", epochs=30, crop=64):
    crops = {"spatial": (fastvid.CenterCrop(crop),), "eval_spatial": (fastvid.CenterCrop(crop),)}
    frames = {"frames": fastvid.Segments(4), "eval_frames": fastvid.Segments(4, jitter=False)}
    return Config(
        data=DataConfig(path=url, eval_split="val", global_batch_size=8, eval_batch_size=8, **frames, **crops),
        model=ModelConfig(name="multi_label:Net"),
        optim=OptimConfig(base_lr=0.1, base_batch_size=8, decay="cosine"),
        run=RunConfig(out=out, epochs=int(epochs), log_every_steps=5, eval_every_epochs=5),
        task=Focal(),
    )


if __name__ == "__main__":
    print(fit(recipe(*sys.argv[1:])).score)
