"""Count a model's parameters and multiply-adds exactly, by running it on the meta device.

Convolutions and linear layers count one multiply-add ("MAC") per use of a weight; attention counts those of its matrix
products. Batch norm, ReLU, pooling and the temporal shift count zero. Published numbers of the same net differ because
other counters include some of these. For TSM-R50 at 8x224x224 and 400 classes:

====================  ==============  =================================================================================
counter               multiply-adds   difference from ours
====================  ==============  =================================================================================
this module           32,703,643,648
mmaction2 1.x         32,874,913,792  adds 2 per batch-norm element, omits the last layer; printed as 32.88 G
mmaction2 0.x         32,965,562,368  adds 2 per batch-norm element, 1 per ReLU output and per pool input
====================  ==============  =================================================================================

With these differences applied, the counts reproduce all of mmaction2's printed numbers for TSN, TSM, I3D and SlowOnly
that were tried, the 0.x ones to the last digit. Errors in its tables: I3D, SlowOnly and TSM-MobileNetV2 were counted at
256x256, not at 224x224 as stated; the 23.87 M parameters in the 1.x rows of TSM-R50 are for 174 classes (24.33 M for
400); 0.x omits the matrix products inside non-local blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class ModelCost:
    """Size and cost of one model at one input shape."""

    input_shape: tuple[int, ...]  # shape of the whole batch, [B, C, T, H, W] for the models of the zoo
    parameters: int
    trainable: int
    macs: int

    @property
    def training_flops(self) -> int:
        """Floating-point operations per training step: 2 per multiply-add; backward costs 2 forwards."""
        return 6 * self.macs

    def __str__(self) -> str:
        size = "x".join(map(str, self.input_shape))
        return f"{self.parameters / 1e6:.2f} M parameters, {self.macs / 1e9:.2f} G multiply-adds at {size}"


def model_cost(model: nn.Module, input_shape: Sequence[int]) -> ModelCost:
    """Count parameters and multiply-adds.

    Returns the counts.
    """
    parameters = list(model.parameters())
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    on_meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    dtype = parameters[0].dtype if parameters else None
    video = torch.empty(tuple(input_shape), device="meta", dtype=dtype)
    modes = [(module, module.training) for module in model.modules()]
    try:
        # In training mode batch norm rejects a single value per channel, which a small frame may leave at the end.
        model.eval()
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            functional_call(model, on_meta, (video,))
    finally:
        for module, training in modes:
            module.training = training
    return ModelCost(
        input_shape=tuple(input_shape),
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        macs=counter.get_total_flops() // 2,
    )
