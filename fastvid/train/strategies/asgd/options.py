"""Checks the options of ``sync=asgd`` before data are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastvid.errors import UsageError
from fastvid.train.config.config import Config

_ELEMENTWISE: Final = ("sgd", "adam", "adamw", "adagrad")
"""Names of element-wise optimizers, which can step the flat vector of all weights, or a part of it."""

_REMOVED: Final = (
    "n_push", "n_fetch", "elasticity", "period", "outer", "outer_momentum", "outer_lr", "quorum", "grace_s",
)  # fmt: skip
"""Options of former versions, whose clients took steps of their own between two pushes."""


def refuse_removed(options: Mapping[str, Any]) -> None:
    """Raise a UsageError for options of former versions."""
    gone = [f"{name}" for name in sorted(options.keys() & _REMOVED)]
    if options.get("push", "gradients") != "gradients":
        gone.append(f"push={options['push']}")
    if gone:
        raise UsageError(
            f"sync=asgd no longer has the option {', '.join(gone)}",
            hint="every client pushes each gradient; for steps of one's own between two averages use sync=kavg",
        )


def refuse_unfit(config: Config) -> None:
    """Raise a UsageError for settings that gradients pushed to a server cannot be trained with."""
    optim = config.optim
    for wrong, what in (
        (optim.name not in _ELEMENTWISE, f"optim.name={optim.name}, which is not element-wise"),
        # The scaler skips steps, and the server would never receive the batch.
        (config.run.amp == "fp16", "run.amp=fp16"),
        # The server's optimizer would move frozen weights by their momentum and weight decay.
        (optim.freeze, "optim.freeze"),
    ):
        if wrong:
            raise UsageError(f"sync=asgd does not support {what}", hint="change it, or use sync=kavg or sync=ddp")
