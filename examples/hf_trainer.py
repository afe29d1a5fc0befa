"""fastvid inside the Hugging Face Trainer: a run that was stopped in the middle of an epoch goes on with the next clip.

The Trainer would go on by reading and throwing away what was trained on before. ``ignore_data_skip`` switches that off,
and the loader's state, kept in each checkpoint's folder, says where to go on.

    pip install transformers accelerate
    python examples/hf_trainer.py shards/mine runs/hf
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn
from torch.nn import functional
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import fastvid
from fastvid.models import zoo

STATE: Final = "clips.json"


class Clips:
    """A `ClipLoader` as the Trainer takes loaders: batches are the model's keywords."""

    def __init__(self, loader: fastvid.ClipLoader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        """Batches of a whole epoch, also when the one under way was begun before."""
        return self.loader.batches.count(0)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch in self.loader:
            yield {"video": batch.video, "labels": batch.label, "weight": batch.weight * self.loader.world.size}

    def set_epoch(self, epoch: int) -> None:
        """The Trainer says so before each epoch; the one under way goes on where it is."""
        self.loader.set_epoch(epoch)


class Classifier(nn.Module):
    """Any model of clips [B, 3, T, H, W]. The loss is this rank's part of the mean over the global batch, times the
    number of ranks, by which DistributedDataParallel divides."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, video: Tensor, labels: Tensor, weight: Tensor) -> dict[str, Tensor]:
        logits = self.net(video)
        losses = functional.cross_entropy(logits, labels, reduction="none")
        return {"loss": (losses * weight).sum(), "logits": logits}


class SaveState(TrainerCallback):
    """Puts the loader's state beside each checkpoint."""

    def __init__(self, clips: Clips) -> None:
        self.clips = clips

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:  # noqa: ARG002
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            (folder / STATE).write_text(json.dumps(self.clips.loader.state_dict()))


class ClipTrainer(Trainer):
    """A Trainer whose batches come from fastvid."""

    def __init__(self, clips: Clips, **options: Any) -> None:
        super().__init__(**options)
        self.clips = clips
        self.add_callback(SaveState(clips))

    def get_train_dataloader(self) -> Any:
        return self.clips

    def go_on(self) -> None:
        """Trains from the newest checkpoint, or from the beginning."""
        last = get_last_checkpoint(self.args.output_dir)
        if last is not None:
            self.clips.loader.load_state_dict(json.loads((Path(last) / STATE).read_text()))
        self.train(resume_from_checkpoint=last)


def make(url: str, out: str, net: nn.Module, arguments: dict[str, Any], **options: Any) -> ClipTrainer:
    """A Trainer over clips of eight frames.

    Args:
        url: The dataset.
        out: Where checkpoints go.
        net: The model.
        arguments: Of `TrainingArguments`.
        options: Of `ClipLoader`.
    """
    # This joins the process group, so that the loader knows its rank.
    args = TrainingArguments(out, ignore_data_skip=True, report_to="none", **arguments)
    standard: dict[str, Any] = {
        "frames": fastvid.Segments(8),
        "spatial": [fastvid.RandomResizedCrop(224), fastvid.HorizontalFlip(0.5)],
        "global_batch_size": 8,
    }
    loader = fastvid.ClipLoader(fastvid.open(url), device=args.device, **standard | options)
    return ClipTrainer(Clips(loader), model=Classifier(net), args=args)


def main(url: str, out: str) -> None:
    """Trains two epochs, with a checkpoint every ten steps; started again, goes on from the newest."""
    net = zoo.build("tsm-r18", num_classes=len(fastvid.open(url).classes), num_frames=8)
    Path(out).mkdir(parents=True, exist_ok=True)
    make(url, out, net, {"num_train_epochs": 2, "save_steps": 10}).go_on()


if __name__ == "__main__":
    main(*sys.argv[1:])
