"""Activation checkpointing of one residual block, without the usual damage to batch-norm statistics.

`torch.utils.checkpoint` runs the block's forward twice for each training step: once as usual, once inside backward.
Batch norm would then move its running mean and variance twice with the same batch, so a network trained with
checkpointing would be evaluated with other statistics than one trained without. Here the second run works on copies of
the buffers: weights, gradients and running statistics are bit-equal with and without checkpointing.

Under `torch.compile` the compiler does the recomputing and applies the update of statistics once by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def recomputed(block: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Runs ``forward(x)``, keeps only ``x`` for backward and runs ``forward`` again there.

    Args:
        block: The module whose buffers ``forward`` may update; its buffers are not touched by the second run.
        forward: The block's own forward. It must not use random numbers, which the second run would draw anew.
        x: The block's input.

    Returns:
        What ``forward(x)`` returns.
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _buffers_set_aside(block)

    out: Tensor
    if torch.compiler.is_compiling():
        out = checkpoint(forward, x, use_reentrant=False, preserve_rng_state=False)
    else:
        out = checkpoint(forward, x, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    return out


@contextmanager
def _buffers_set_aside(block: nn.Module) -> Iterator[None]:
    own = [(module, name, buffer) for module in block.modules() for name, buffer in module.named_buffers(recurse=False)]
    for module, name, buffer in own:
        setattr(module, name, buffer.clone())
    try:
        yield
    finally:
        # The second run stops early, by an exception of checkpoint's own, once backward has what it needs.
        for module, name, buffer in own:
            setattr(module, name, buffer)
