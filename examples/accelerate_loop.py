"""fastvid with Accelerate. Started again, it continues from its checkpoint with the next clip.

accelerate launch --num-processes 2 examples/accelerate_loop.py shards/mine runs/accelerate
"""

import sys
from pathlib import Path

import torch

# Imported while the process group runs, it would keep the group's threads until the exit, and they can abort it.
import torch.distributed.nn
from accelerate import Accelerator
from torch import nn

import fastvid


def main(url, out, crop=112, epochs=2, steps=None):
    accelerator, seen = Accelerator(), []  # starts the process group, from which the loader learns its rank
    frames, spatial = fastvid.Segments(8), fastvid.RandomResizedCrop(crop)
    clips = fastvid.ClipLoader(
        fastvid.open(url), frames=frames, spatial=spatial, global_batch_size=4, device=accelerator.device
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.AdaptiveAvgPool3d((2, 8, 8)), nn.Flatten(), nn.Linear(384, len(clips.dataset.classes)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    # The loader itself, not a DataLoader of it: Accelerate would share its batches among the ranks again.
    model, optimizer, clips = accelerator.prepare(model, optimizer, clips)
    accelerator.register_for_checkpointing(clips)
    if Path(out).exists():
        accelerator.load_state(out)
    while clips.epoch < epochs:
        for batch in clips:
            losses = nn.functional.cross_entropy(model(batch.video), batch.label, reduction="none")
            accelerator.backward((losses * batch.weight).sum() * accelerator.num_processes)  # the mean over all ranks
            optimizer.step()
            optimizer.zero_grad()
            seen.append((batch.epoch, *batch.position.tolist()))
            accelerator.save_state(out)
            if len(seen) == steps:
                break
        if len(seen) == steps:
            break
    # A module freed after the process group would hold the GIL while it waits for its threads, which may want it.
    del model
    accelerator.free_memory()
    accelerator.end_training()
    return seen


if __name__ == "__main__":
    main(*sys.argv[1:])
