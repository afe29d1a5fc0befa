"""The strategy ``sync=relay``: the models of a recipe travel between parts of the data, see the folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastvid.train.config.config import Config
from fastvid.train.loop.strategy import Strategy
from fastvid.train.strategies.relay.launch import sweep
from fastvid.train.strategies.relay.options import SweepOptions


class Relay(Strategy):
    """Train all models of a recipe in one sweep, which is a run of its own and no part of the training loop."""

    shares_batches = False

    @classmethod
    def check(cls, config: Config) -> None:
        SweepOptions.of(config)

    @classmethod
    def start(cls, configs: Sequence[Config], train: Callable[[Config], int]) -> int:  # noqa: ARG003
        return sweep(configs)
