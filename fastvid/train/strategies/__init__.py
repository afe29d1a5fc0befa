"""How replicas agree: one folder a strategy, each named by an import string."""

from __future__ import annotations

from typing import Final

BUILT_IN: Final = {
    "asgd": "fastvid.train.strategies.asgd.strategy:Asgd",
    "ddp": "fastvid.train.strategies.ddp.strategy:Ddp",
    "kavg": "fastvid.train.strategies.kavg.strategy:Kavg",
    "relay": "fastvid.train.strategies.relay.strategy:Relay",
}
"""Strategies that come with fastvid, by the name that ``sync=`` gives them: ``module:class``."""

DEFAULT: Final = "ddp"
"""What a recipe that does not say uses."""

BATCH_POLICY: Final = "fastvid.train.strategies.adaptive_batch.strategy:AdaptiveBatch"
"""What surrounds a strategy whose ranks share batches where options ``batch...`` are given."""
