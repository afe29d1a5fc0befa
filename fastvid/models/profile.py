"""Exact size and cost of a model, without running it: shapes are pushed through on the meta device.

What is counted: one multiply-add ("MAC") for each use of a weight in convolutions and linear layers, and those of the
products of attention. Batch norm, ReLU, pooling and the temporal shift, which multiplies nothing, count zero. Published
numbers of the same net differ because other counters add some of these. For TSM-R50 at 8x224x224 and 400 classes:

====================  ==============  =================================================================================
counter               multiply-adds   difference to ours
====================  ==============  =================================================================================
this module           32,703,643,648
mmaction2 1.x         32,874,913,792  2 more for each batch-norm element; the last layer left out. Printed as 32.88 G
mmaction2 0.x         32,965,562,368  2 more for each batch-norm element, 1 for each ReLU output and each pool input
====================  ==============  =================================================================================

With these rules the counts reproduce all of mmaction2's printed numbers for TSN, TSM, I3D and SlowOnly that were tried,
the 0.x ones to the last digit. Traps in its tables: I3D, SlowOnly and TSM-MobileNetV2 were counted at 256x256 although
they say 224x224; the 23.87 M parameters in the 1.x rows of TSM-R50 belong to 174 classes (400 have 24.33 M); 0.x leaves
out the products inside non-local blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class Profile:
    """Size and cost of one model at one input.

    Attributes:
        input_shape: Of the whole batch, [B, C, T, H, W] for the models of the zoo.
        parameters: Numbers in all parameters, each shared parameter once.
        trainable: Those that require a gradient.
        macs: Multiply-adds of one forward of the whole batch.
    """

    input_shape: tuple[int, ...]
    parameters: int
    trainable: int
    macs: int

    @property
    def training_flops(self) -> int:
        """Floating-point operations of one training step: two a multiply-add, backward twice the forward."""
        return 6 * self.macs

    def __str__(self) -> str:
        size = "x".join(map(str, self.input_shape))
        return f"{self.parameters / 1e6:.2f} M parameters, {self.macs / 1e9:.2f} G multiply-adds at {size}"


def profile(model: nn.Module, input_shape: Sequence[int]) -> Profile:
    """Counts parameters and multiply-adds.

    Args:
        model: Any module of one tensor; on any device, the meta device included. It is neither run nor changed.
        input_shape: Shape of the input, batch first.

    Returns:
        The counts.
    """
    parameters = list(model.parameters())
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    on_meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    dtype = parameters[0].dtype if parameters else None
    video = torch.empty(tuple(input_shape), device="meta", dtype=dtype)
    modes = [(module, module.training) for module in model.modules()]
    try:
        # In training, batch norm refuses a single value a channel, which one small frame may leave at the end.
        model.eval()
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            functional_call(model, on_meta, (video,))
    finally:
        for module, training in modes:
            module.training = training
    return Profile(
        input_shape=tuple(input_shape),
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        macs=counter.get_total_flops() // 2,
    )
