"""fastvid in a plain loop of DistributedDataParallel. Started again, it continues with the next clip, in any world.

torchrun --nproc-per-node 2 examples/ddp.py shards/mine runs/ddp
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

# Imported while the process group runs, it would keep the group's threads until the exit, and they can abort it.
import torch.distributed.nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastvid


def main(url, out, crop=112, epochs=2, steps=None):
    dist.init_process_group("gloo")  # "nccl", with the loader and the model on "cuda"
    frames, spatial = fastvid.Segments(8), fastvid.RandomResizedCrop(crop)
    clips = fastvid.ClipLoader(fastvid.open(url), frames=frames, spatial=spatial, global_batch_size=4)
    torch.manual_seed(0)
    net = nn.Sequential(nn.AdaptiveAvgPool3d((2, 8, 8)), nn.Flatten(), nn.Linear(384, len(clips.dataset.classes)))
    model, file, seen = DistributedDataParallel(net), Path(out), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if file.exists():
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        clips.load_state_dict(saved["clips"])
    while clips.epoch < epochs:
        for batch in clips:
            losses = nn.functional.cross_entropy(model(batch.video), batch.label, reduction="none")
            ((losses * batch.weight).sum() * dist.get_world_size()).backward()  # the mean over all ranks
            optimizer.step()
            optimizer.zero_grad()
            seen.append((batch.epoch, *batch.position.tolist()))
            if dist.get_rank() == 0:
                torch.save({"model": model.state_dict(), "clips": clips.state_dict()}, file)
            if len(seen) == steps:
                break
        if len(seen) == steps:
            break
    # A module freed after the group would hold the GIL while it waits for the group's threads, which may want it.
    del model
    dist.destroy_process_group()
    return seen


if __name__ == "__main__":
    main(*sys.argv[1:])
