"""Pipeline parallelism: the blocks of one model on several devices, through which micro-batches pass one after another.

This is GPipe (Huang et al. 2019) in one process. All micro-batches run forward before any runs backward. Kernel
launches are asynchronous, so a device computes one micro-batch while the next device computes the previous one; in
backward, the autograd engine has a thread per device. With S devices and M micro-batches, the fraction
(S - 1) / (M + S - 1) of the time is lost to filling and draining the pipeline.

Norm layers see one micro-batch at a time. Tensor parallelism is not offered: in torch 2.13 DTensor's convolution
silently returns wrong results when its weight or its input is sharded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastvid.errors import UsageError
from fastvid.models.resnet import ResidualBlock


def place_on_devices(model: nn.Module, devices: Sequence[torch.device], micro_batches: int) -> None:
    """Distribute a model's blocks over devices in place, without changing its state dict.

    `model`: maps clips [b, ...], one tensor per stream, to logits [b, classes]; its blocks run in module order.
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
        # Copy logits to the first device only after all micro-batches are launched: a copy may block.
        logits = [_logits(whole(*part)) for part in parts]
        return torch.cat([part.to(home) for part in logits])

    model.forward = forward


def local_devices(home: torch.device, count: int) -> list[torch.device]:
    """Return the devices of one replica on this machine, the rank's own device first.

    With L local ranks, local rank r gets devices r, r + L, r + 2 L and so on.
    """
    if home.type != "cuda":
        return [home] * count
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    found = [torch.device("cuda", (home.index or 0) + ranks * step) for step in range(count)]
    if ranks * count > torch.cuda.device_count():
        raise UsageError(
            f"{ranks} ranks of {count} devices each need more than this machine's {torch.cuda.device_count()}",
            hint=f"start at most {torch.cuda.device_count() // count} ranks per machine",
        )
    return found


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    # A residual block uses its input more than once, so it is never split across devices.
    if isinstance(module, ResidualBlock) or next(module.children(), None) is None:
        yield module
        return
    for child in module.children():
        yield from _blocks(child)


def _mover(device: torch.device) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    def move(_block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(item.to(device, non_blocking=True) if isinstance(item, Tensor) else item for item in inputs)

    return move


def _logits(output: Any) -> Tensor:
    assert isinstance(output, Tensor)
    return output
