"""Masked autoencoding: a small transformer restores the patches of a clip that it does not see (Tong et al. 2022).

PYTHONPATH=examples fastvid train RECIPE model.name=masked_autoencoding:Net task=masked_autoencoding:Restore

The masks depend on the seed, the epoch and the position of a clip alone, so any number of ranks draws the same.
"""

from dataclasses import dataclass

import torch
from torch import nn

from fastvid.train import Task

TUBE, SIDE = 2, 8  # frames and pixels of a patch


def patches(video):
    """Return clips [b, 3, T, H, W] as patches [b, n, 3 * TUBE * SIDE * SIDE]."""
    cut = video.unfold(2, TUBE, TUBE).unfold(3, SIDE, SIDE).unfold(4, SIDE, SIDE)
    return cut.permute(0, 2, 3, 4, 1, 5, 6, 7).flatten(4).flatten(1, 3)


class Net(nn.Module):
    """Predicts all patches of clips, of which it sees those that are not hidden."""

    def __init__(self, num_frames, side=32, width=32, depth=2):
        super().__init__()
        size, count = 3 * TUBE * SIDE * SIDE, num_frames // TUBE * (side // SIDE) ** 2
        self.embed, self.restore = nn.Linear(size, width), nn.Linear(width, size)
        self.mask_token = nn.Parameter(torch.zeros(width))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(count, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def forward(self, video, hidden):
        tokens = torch.where(hidden[..., None], self.mask_token, self.embed(patches(video)))
        return {"patches": self.restore(self.blocks(tokens + self.pos_embed))}


@dataclass(frozen=True)
class Restore(Task):
    """Learns to restore hidden patches; the loss of a clip is their mean squared error.

    Attributes:
        ratio: Fraction of the patches that are hidden.
    """

    ratio: float = 0.75

    def prepare(self, batch, phase):
        """Draw the hidden patches of each clip."""
        frames, height, width = batch.video.shape[2:]
        count = frames // TUBE * (height // SIDE) * (width // SIDE)
        hidden = torch.zeros(batch.num_rows, count, dtype=torch.bool)
        for row, seed in zip(hidden, phase.seeds(batch), strict=True):
            order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
            row[order[: round(self.ratio * count)]] = True
        return type(batch)(batch, hidden=hidden.to(batch.video.device))

    def inputs(self, batch):
        return batch.video, batch.hidden

    def loss(self, outputs, batch):
        errors = (outputs["patches"].float() - patches(batch.video)).square().mean(2)
        return (errors * batch.hidden).sum(1) / batch.hidden.sum(1)
