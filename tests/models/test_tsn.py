"""TSN and TSM average the logits of frames."""

import pytest
import torch
from torch import nn

from fastvid.errors import UsageError
from fastvid.models.tsn import FrameAverage, fold_frames
from fastvid.models.zoo import build


def test_fold_frames_keeps_frames_of_a_clip_together():
    video = torch.arange(2 * 3 * 4).reshape(2, 3, 4, 1, 1)
    frames = fold_frames(video)
    for b in range(2):
        for t in range(4):
            assert torch.equal(frames[b * 4 + t], video[b, :, t])


def test_channels_last_3d_clips_fold_without_a_copy():
    video = torch.randn(2, 3, 4, 8, 8).contiguous(memory_format=torch.channels_last_3d)
    frames = fold_frames(video)
    assert frames.data_ptr() == video.data_ptr()
    assert frames.is_contiguous(memory_format=torch.channels_last)


def test_tsn_averages_logits_over_frames():
    class Red(nn.Module):
        def forward(self, frames: torch.Tensor) -> torch.Tensor:
            return frames[:, 0].mean((1, 2)).unsqueeze(1)

    video = torch.rand(2, 3, 5, 4, 4)
    out = FrameAverage(Red(), num_frames=5, any_length=False)(video)
    torch.testing.assert_close(out, video[:, 0].mean((1, 2, 3)).unsqueeze(1))


def test_tsn_accepts_any_number_of_frames_and_tsm_only_its_own():
    assert build("tsn-r18", 3, 8, width=8)(torch.randn(1, 3, 25, 32, 32)).shape == (1, 3)
    with pytest.raises(UsageError, match=r"built for clips of 8 frames, not 16[\s\S]*num_frames=16"):
        build("tsm-r18", 3, 8, width=8)(torch.randn(1, 3, 16, 32, 32))
    with pytest.raises(UsageError, match=r"a clip is \[B, C, T, H, W\], not \[8, 3, 32, 32\]"):
        build("tsm-r18", 3, 8, width=8)(torch.randn(8, 3, 32, 32))


@pytest.mark.parametrize("name", ["tsm-r18", "tsn-r50"])
def test_the_last_layer_starts_small_and_dropout_is_half(name):
    model = build(name, 1000, 8)
    head = model.backbone.get_submodule(model.backbone.head_name)
    assert head.weight.std().item() == pytest.approx(0.001, rel=0.05)
    assert not head.bias.any()
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == [0.5]
