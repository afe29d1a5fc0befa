"""Synchronization strategies, each referenced by an import string."""

from __future__ import annotations

from typing import Final

BUILT_IN: Final = {
    "asgd": "fastvid.train.strategies.asgd.strategy:Asgd",
    "ddp": "fastvid.train.strategies.ddp:Ddp",
    "kavg": "fastvid.train.strategies.kavg:Kavg",
    "relay": "fastvid.train.strategies.relay.sweep:Relay",
}
"""Import strings (``module:class``) of the strategies that come with fastvid, by their name in ``sync=``."""

DEFAULT: Final = "ddp"
"""The strategy of recipes that do not set ``sync``."""

BATCH_POLICY: Final = "fastvid.train.strategies.adaptive_batch:AdaptiveBatch"
"""Extends a strategy whose ranks share batches if options ``batch...`` are given."""
