"""fastvid in the Hugging Face Trainer. Started again, it continues from its newest checkpoint with the next clip.

torchrun --nproc-per-node 2 examples/hf_trainer.py shards/mine runs/hf
"""

import json
import sys
from pathlib import Path

from torch import cuda, nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import fastvid


class ClipTrainer(Trainer):
    def get_train_dataloader(self):  # the loader has shared its batches among the ranks; do not let the Trainer do so
        return self.train_dataset

    def compute_loss(self, model, batch, return_outputs=False, **_):
        losses = nn.functional.cross_entropy(model(batch["video"]), batch["label"], reduction="none")
        return (losses * batch["weight"]).sum() * self.args.world_size  # the mean over all ranks


class SaveState(TrainerCallback):
    def on_save(self, args, state, control, train_dataloader, **_):
        Path(args.output_dir, f"checkpoint-{state.global_step}", "clips.json").write_text(
            json.dumps(train_dataloader.state_dict())
        )


def main(url, out, crop=112, **arguments):
    # The arguments start the process group, from which the loader learns its rank. The loader resumes by itself.
    # Without use_cpu, the Trainer of a machine without GPUs ignores the group, and each rank trains a model of its own.
    arguments = {"save_steps": 10, "report_to": "none", "use_cpu": not cuda.is_available()} | arguments
    args = TrainingArguments(out, ignore_data_skip=True, **arguments)
    rules = {"frames": fastvid.Segments(8), "spatial": fastvid.RandomResizedCrop(crop)}
    clips = fastvid.ClipLoader(fastvid.open(url), **rules, global_batch_size=4, device=args.device)
    assert clips.world.size == args.world_size, "the loader and the Trainer differ in the number of ranks"
    model = nn.Sequential(nn.AdaptiveAvgPool3d((2, 8, 8)), nn.Flatten(), nn.Linear(384, len(clips.dataset.classes)))
    last = get_last_checkpoint(out) if Path(out).exists() else None
    if last is not None:
        clips.load_state_dict(json.loads(Path(last, "clips.json").read_text()))
    trainer = ClipTrainer(model, args, train_dataset=clips, callbacks=[SaveState()])
    trainer.train(resume_from_checkpoint=last)
    return trainer


if __name__ == "__main__":
    main(*sys.argv[1:])
