"""SimCLR on pairs of clips: two clips of the same video attract each other, clips of other videos repel.

The clips of a pair are neighbours in the batch and stay on one rank, with frames, crop and flip of their own.

    python examples/contrastive_pairs.py shards/mine
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fastvid


def make(url: str, **options: Any) -> fastvid.ClipLoader:
    """Two clips of each of eight videos."""
    standard: dict[str, Any] = {
        "frames": fastvid.Dense(4, 2),
        "spatial": [fastvid.RandomResizedCrop(64), fastvid.HorizontalFlip(0.5)],
        "clips_per_video": 2,
        "global_batch_size": 16,
    }
    return fastvid.ClipLoader(fastvid.open(url), **standard | options)


def simclr(features: Tensor, valid: Tensor, temperature: float = 0.1) -> Tensor:
    """Return the mean NT-Xent loss of neighbouring rows [2n, D] (Chen et al., ICML 2020, equation 1)."""
    pairs = valid.view(-1, 2).all(1).repeat_interleave(2)  # both clips of a pair must be valid
    unit = functional.normalize(features[pairs].float(), dim=1)
    alike = (unit @ unit.T / temperature).fill_diagonal_(-torch.inf)
    return functional.cross_entropy(alike, torch.arange(len(unit), device=unit.device) ^ 1)


def main(url: str, epochs: int = 5) -> list[float]:
    """Train a small encoder; print and return the mean loss of each epoch."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv3d(3, 16, (4, 5, 5), 3), nn.ReLU(), nn.AdaptiveAvgPool3d((1, 4, 4)), nn.Flatten())
    net.append(nn.Linear(256, 32))
    optimizer, means, loader = torch.optim.Adam(net.parameters(), lr=3e-3), [], make(url)
    for epoch in range(epochs):
        losses = []
        for batch in loader:
            losses.append(simclr(net(batch.video), batch.valid))
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        means.append(torch.stack(losses).mean().item())
        sys.stdout.write(f"epoch {epoch}: loss {means[-1]:.3f}\n")
    return means


if __name__ == "__main__":
    main(sys.argv[1])
