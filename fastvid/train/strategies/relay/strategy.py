"""The strategy ``sync=relay``: models move between partitions of the data, see the package."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fastvid.train.config.config import Config
from fastvid.train.loop.strategy import Strategy
from fastvid.train.strategies.relay.launch import prepare, sweep
from fastvid.train.strategies.relay.options import SweepOptions


class Relay(Strategy):
    """Trains all models of a recipe in one sweep, which replaces the training loop."""

    shares_batches = False
    steps_alike = True  # one rank at a time has a model

    @classmethod
    def check(cls, config: Config) -> None:
        SweepOptions.of(config)

    @classmethod
    def rehearse(cls, configs: Sequence[Config], world_size: int) -> None:
        options = SweepOptions.of(configs[0])
        # A stage of another job takes its plan from the hub.
        if options.hub is None:
            prepare(configs, options, world_size, torch.device("cpu"))

    @classmethod
    def start(cls, configs: Sequence[Config], train: Callable[[Config], int]) -> int:  # noqa: ARG003
        return sweep(configs)
