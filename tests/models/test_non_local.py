"""Non-local blocks: the arithmetic is tested against the upstream block in test_model_weights.py."""

from __future__ import annotations

import pytest
import torch

from fastvid.errors import UsageError
from fastvid.models.non_local import NonLocal
from fastvid.models.zoo import build


def places(model: torch.nn.Module) -> list[str]:
    return [name for name, module in model.backbone.named_modules() if isinstance(module, NonLocal)]


def test_non_local_blocks_are_where_each_code_base_has_them():
    tsm = build("tsm-r50", 2, 4, width=8, non_local="embedded_gaussian")
    i3d = build("i3d-r50", 2, 8, width=8, non_local="dot_product")
    assert places(tsm) == [f"layer{place}.non_local" for place in ("2.0", "2.2", "3.0", "3.2", "3.4")]
    assert places(i3d) == [f"layer{place}.non_local" for place in ("2.1", "2.3", "3.1", "3.3", "3.5")]


@pytest.mark.parametrize("name", ["tsm-r50", "i3d-r50"])
def test_new_non_local_block_is_an_identity(name):
    plain = build(name, 2, 8, width=8).eval()
    model = build(name, 2, 8, width=8, non_local="embedded_gaussian").eval()
    assert all("non_local" in key for key in model.load_state_dict(plain.state_dict(), strict=False).missing_keys)
    video = torch.randn(1, 3, 8, 64, 64)
    with torch.no_grad():
        assert torch.equal(model(video), plain(video))


def test_dot_product_is_the_average_weighted_by_products():
    block = NonLocal(8, mode="dot_product").double().eval()
    torch.nn.init.ones_(block.out_bn.weight)
    x = torch.randn(2, 8, 3, 4, 4, dtype=torch.float64)
    with torch.no_grad():
        query, key, value = block.theta(x), block.pool(block.phi(x)), block.pool(block.g(x))
        pairs = torch.einsum("bcn,bcm->bnm", query.flatten(2), key.flatten(2)) / (3 * 2 * 2)
        mixed = torch.einsum("bnm,bcm->bcn", pairs, value.flatten(2)).reshape(2, 4, 3, 4, 4)
        torch.testing.assert_close(block(x), x + block.out_bn(block.out(mixed)))


@pytest.mark.parametrize("mode", ["embedded_gaussian", "dot_product"])
def test_non_local_attends_over_whole_clips_of_folded_frames(mode):
    clip_block = NonLocal(8, mode=mode).double()
    torch.nn.init.ones_(clip_block.out_bn.weight)
    frame_block = NonLocal(8, mode=mode, num_segments=3).double()
    frame_block.load_state_dict(clip_block.state_dict())
    x = torch.randn(2, 8, 3, 4, 4, dtype=torch.float64)
    folded = frame_block(x.transpose(1, 2).reshape(6, 8, 4, 4))
    torch.testing.assert_close(folded.reshape(2, 3, 8, 4, 4).transpose(1, 2), clip_block(x))


def test_unknown_non_local_mode_raises():
    with pytest.raises(UsageError, match=r"unknown non-local mode 'gaussian'[\s\S]*'embedded_gaussian', 'dot_product'"):
        build("tsm-r50", 2, 4, width=8, non_local="gaussian")
