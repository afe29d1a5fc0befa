"""Activation checkpointing of one residual block that updates batch-norm statistics only once.

`torch.utils.checkpoint` runs the block's forward twice per training step: once as usual, once inside backward. Batch
norm would then update its running mean and variance twice with the same batch, so checkpointing would change the
statistics used in evaluation. Here the second run uses copies of the buffers: weights, gradients and running statistics
are bit-equal with and without checkpointing.

Under `torch.compile` the compiler recomputes and updates the statistics only once by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def recomputed(block: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor, *, random: bool = False) -> Tensor:
    """Run ``forward(x)``, save only ``x`` for backward, and run ``forward`` again in backward.

    `block`: the module whose buffers ``forward`` may update; the second run leaves them alone. `random`: whether
    ``forward`` draws random numbers, so that the second run must draw the same. Returns the result of
    ``forward(x)``.
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _copied_buffers(block)

    out: Tensor
    if torch.compiler.is_compiling():
        out = checkpoint(forward, x, use_reentrant=False, preserve_rng_state=random)
    else:
        out = checkpoint(forward, x, use_reentrant=False, preserve_rng_state=random, context_fn=contexts)
    return out


@contextmanager
def _copied_buffers(block: nn.Module) -> Iterator[None]:
    originals = [
        (module, name, buffer) for module in block.modules() for name, buffer in module.named_buffers(recurse=False)
    ]
    for module, name, buffer in originals:
        setattr(module, name, buffer.clone())
    try:
        yield
    finally:
        # checkpoint aborts the second run with its own exception once backward has what it needs.
        for module, name, buffer in originals:
            setattr(module, name, buffer)
