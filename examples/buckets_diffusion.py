"""Train a video denoiser on batches of several shapes: python examples/buckets_diffusion.py shards/mine last.pt

Started again after it was stopped, it continues with the next batch.
"""

import sys
from pathlib import Path

import torch

import fastvid

SHAPES = [(1, 64, 64), (8, 48, 80), (8, 80, 48), (16, 48, 80)]  # frames, height and width of each bucket


def train(data: str, saved: Path, epochs: int = 2) -> None:
    """Train for some epochs, and save after every tenth step."""
    loader = fastvid.ClipLoader(
        fastvid.open(data),
        frames=fastvid.AtFps(12),  # a video's frames at 12 a second and its aspect ratio decide its bucket
        spatial=fastvid.Native(),
        batches=fastvid.Buckets(SHAPES, tokens=4096, patch=(1, 8, 8)),  # as many clips as 4,096 patches contain
    )
    net = torch.nn.Conv3d(3, 3, 3, padding=1)
    parts = {"net": net, "optimizer": torch.optim.AdamW(net.parameters(), lr=1e-3), "loader": loader}
    for name, state in torch.load(saved).items() if saved.exists() else ():
        parts[name].load_state_dict(state)
    while loader.epoch < epochs:
        for step, batch in enumerate(loader):
            noise, t = torch.randn_like(batch.video), torch.rand(batch.num_rows, 1, 1, 1, 1)
            errors = (net(torch.lerp(batch.video, noise, t)) - (noise - batch.video)) ** 2
            loss = errors.mean(dim=(1, 2, 3, 4)) @ batch.weight
            net.zero_grad(), loss.backward(), parts["optimizer"].step()
            sys.stdout.write(f"epoch {batch.epoch}: clips {tuple(batch.video.shape)}, loss {loss:.3f}\n")
            if step % 10 == 9:
                torch.save({name: part.state_dict() for name, part in parts.items()}, saved)


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]))
