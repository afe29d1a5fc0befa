"""A replica on several devices: its blocks lie in a row on them, and micro-batches follow each other through the row.

This is GPipe (Huang et al. 2019) in one process. All micro-batches go forward before any goes backward; because work on
devices is only issued, a device computes one micro-batch while the next device computes the one before it, and the
autograd engine has a thread for each device. With S devices and M micro-batches (S - 1) / (M + S - 1) of the time is
lost to filling and draining the row.

Norm layers see one micro-batch at a time. Tensor parallelism is not offered: DTensor's convolution gives wrong numbers
without an error in torch 2.13 when its weight or its image is sharded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from fastvid.errors import UsageError
from fastvid.models.mobilenet import InvertedResidual
from fastvid.models.resnet import ResidualBlock

# Their inputs are used more than once, so all of one lies on one device.
_WHOLE: Final = (ResidualBlock, InvertedResidual)


def spread(model: nn.Module, devices: Sequence[torch.device], micro_batches: int) -> None:
    """Lays a model's blocks on devices, in place. Names of parameters and the state dict stay as they are.

    Args:
        model: Clips [b, ...], one of each stream, to logits [b, classes]; its blocks run in the order of its modules.
        devices: The first takes the clips, and logits come back to it.
        micro_batches: Parts of a batch in training.

    Raises:
        UsageError: There are more devices than blocks.
    """
    blocks = [block for block in _blocks(model) if next(block.parameters(), None) is not None]
    if len(blocks) < len(devices):
        raise UsageError(f"the model has {len(blocks)} blocks for {len(devices)} devices", hint="lower model.pipeline")
    for index, block in enumerate(blocks):
        device = devices[index * len(devices) // len(blocks)]
        block.to(device)
        block.register_forward_pre_hook(_mover(device))
    home, whole = devices[0], model.forward

    def forward(*clips: Tensor) -> Tensor:
        if not model.training:
            return _logits(whole(*clips)).to(home)
        parts = zip(*(clip.chunk(micro_batches) for clip in clips), strict=True)
        # To the first device only when all are issued: a copy may wait for what it copies.
        logits = [_logits(whole(*part)) for part in parts]
        return torch.cat([part.to(home) for part in logits])

    model.forward = forward


def local_devices(home: torch.device, count: int) -> list[torch.device]:
    """The devices of one replica among those of a machine, the rank's own first.

    Ranks of a machine have devices 0 to L - 1 as their own; rank r's further ones are r + L, r + 2 L and so on.

    Raises:
        UsageError: The machine has too few.
    """
    if home.type != "cuda":
        return [home] * count
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    found = [torch.device("cuda", (home.index or 0) + ranks * step) for step in range(count)]
    if ranks * count > torch.cuda.device_count():
        raise UsageError(
            f"{ranks} ranks of {count} devices each do not fit on {torch.cuda.device_count()}",
            hint=f"start at most {torch.cuda.device_count() // count} ranks on a machine",
        )
    return found


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, _WHOLE) or next(module.children(), None) is None:
        yield module
        return
    for child in module.children():
        yield from _blocks(child)


def _mover(device: torch.device) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    def move(_block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(item.to(device, non_blocking=True) if isinstance(item, Tensor) else item for item in inputs)

    return move


def _logits(found: Any) -> Tensor:
    assert isinstance(found, Tensor)
    return found
