"""Checks the options of ``sync=asgd`` before data are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

from fastvid.errors import UsageError
from fastvid.train.config.config import Config

Push = Literal["deltas", "gradients"]

_ELEMENTWISE: Final = ("sgd", "adam", "adamw", "adagrad")
"""Names of element-wise optimizers, which can step the flat vector of all weights, or a part of it."""

# Options that one of the two ways to push does not have, with their defaults.
_ONLY: Final[dict[str, dict[str, Any]]] = {
    "deltas": {
        "period": 8, "outer": "nesterov", "outer_momentum": None, "outer_lr": None, "quorum": "all", "grace_s": 0.0,
    },
    "gradients": {"overlap": False, "staleness_aware": False, "shards": 1},
}  # fmt: skip

_REMOVED: Final = {
    "n_push": "set sync_options.push=deltas and sync_options.period to the steps between two pushes",
    "n_fetch": "set sync_options.push=deltas and sync_options.period to the steps between two pushes",
    "elasticity": "set sync_options.push=deltas, whose clients step on their own too",
}


def refuse_removed(options: Mapping[str, Any]) -> None:
    """Raise a UsageError for options of former versions."""
    for name in sorted(options.keys() & _REMOVED):
        raise UsageError(f"sync=asgd no longer has the option {name}", hint=_REMOVED[name])


def refuse_mixed(push: str, given: Mapping[str, Any]) -> None:
    """Raise a UsageError for options of the other way to push, and for an unknown way."""
    if push not in get_args(Push):
        raise UsageError(f"sync option push is {push!r}", hint=f"use one of {', '.join(get_args(Push))}")
    other = "gradients" if push == "deltas" else "deltas"
    if wrong := [name for name, default in _ONLY[other].items() if given[name] != default]:
        raise UsageError(
            f"sync options {', '.join(wrong)} have no effect with push={push}", hint=f"set sync_options.push={other}"
        )


def refuse_unfit(config: Config) -> None:
    """Raise a UsageError for settings that gradients pushed to a server cannot be trained with.

    Deltas support any optimizer, fp16 and frozen parts, because each client has an optimizer and a loss scaler.
    """
    if config.sync_options.get("push", "deltas") != "gradients":
        return
    optim = config.optim
    for wrong, what in (
        (optim.name not in _ELEMENTWISE, f"optim.name={optim.name}, which is not element-wise"),
        # The scaler skips steps, and the server would never receive the batch.
        (config.run.amp == "fp16", "run.amp=fp16"),
        # The server's optimizer would move frozen weights by their momentum and weight decay.
        (optim.freeze, "optim.freeze"),
    ):
        if wrong:
            raise UsageError(
                f"sync=asgd with push=gradients does not support {what}",
                hint="remove it, or set sync_options.push=deltas",
            )
