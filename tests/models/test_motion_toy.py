"""A square that moves left or right around a ring: both directions show the same frames, in opposite order."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fastvid.models.zoo import build

FRAMES, SIZE, EPOCHS = 8, 32, 14


def ring_clips(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """[2 * count, 3, FRAMES, SIZE, SIZE] and labels; clip ``count + i`` is clip ``i`` played backwards."""
    generator = torch.Generator().manual_seed(seed)
    clips = torch.zeros(count, 3, FRAMES, SIZE, SIZE)
    for clip in clips:
        start, row = (int(torch.randint(SIZE, (), generator=generator)) for _ in range(2))
        side = int(torch.randint(6, 11, (), generator=generator))
        colour = torch.rand(3, 1, 1, generator=generator) + 0.5
        for t in range(FRAMES):
            square = torch.zeros(3, SIZE, SIZE)
            square[:, :side, :side] = colour
            clip[:, t] = square.roll((row, start + t * SIZE // FRAMES), (1, 2))
    return torch.cat([clips, clips.flip(2)]), torch.arange(2).repeat_interleave(count)


def top1_after_training(name: str, **options: object) -> float:
    model = build(name, 2, FRAMES, dropout=0.0, **options)
    train, labels = ring_clips(64, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=EPOCHS)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(train)).split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(train[batch]), labels[batch]).backward()
            optimizer.step()
        schedule.step()
    held_out, truth = ring_clips(32, seed=2)
    model.eval()
    with torch.no_grad():
        return (model(held_out).argmax(1) == truth).double().mean().item()


@pytest.mark.parametrize("inplace", [False, True])
def test_tsm_learns_the_direction(inplace):
    assert top1_after_training("tsm-r18", width=8, shift_inplace=inplace) >= 0.95


def test_tsn_does_not_learn_the_direction():
    # In evaluation the logits of a clip and of its reverse differ only by rounding, so training cannot help.
    model = build("tsn-r18", 2, FRAMES, width=8).double().eval()
    clips, _ = ring_clips(8, seed=3)
    with torch.no_grad():
        forwards, backwards = model(clips.double()).chunk(2)
    torch.testing.assert_close(forwards, backwards, rtol=1e-9, atol=1e-12)
    assert abs(top1_after_training("tsn-r18", width=8) - 0.5) <= 0.1


def test_i3d_learns_the_direction():
    assert top1_after_training("i3d-r18", width=8) >= 0.95
