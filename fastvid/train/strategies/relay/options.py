"""The options of a sweep, read from a configuration."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, get_args

from fastvid.errors import UsageError
from fastvid.train.config.config import Config
from fastvid.train.strategies.relay.scheduler import Order
from fastvid.train.strategies.shared.link import Address, address_of, shared_token


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """The ``sync_options`` of ``sync=relay``.

    Attributes:
        out: Local folder of the sweep: the models' ``run.out``.
        timeout_s: Seconds of silence after which a process is considered dead: the models' ``run.timeout_s``.
        order: "ring" or "hopper".
        partitions: S, number of partitions; None uses the number of processes, or that of the resumed sweep.
        adopt_s: See `fastvid.train.strategies.relay.hub.Hub`.
        hub: Host and port of a hub in another job; this job then has stages only.
        host: Name or address of rank 0's machine that the hub listens on, as stages reach it; None is torchrun's
            ``MASTER_ADDR``, and without torchrun 127.0.0.1.
        port: Port of this job's hub, for stages of other jobs; 0 for any free one.
    """

    out: str
    timeout_s: float
    order: Order = "hopper"
    partitions: int | None = None
    adopt_s: float = 30.0
    hub: Address | None = None
    host: str | None = None
    port: int = 0

    @classmethod
    def of(cls, config: Config) -> SweepOptions:
        """Return the options in a model's configuration.

        Raises:
            UsageError: If an option is unknown or out of range.
        """
        if config.data.mixture:
            raise UsageError(
                "sync 'relay' divides one dataset into partitions, but data.mixture names further datasets",
                hint="merge them with `fastvid merge`, or use another sync",
            )
        given: dict[str, Any] = dict(config.sync_options)
        known = {field.name for field in dataclasses.fields(cls)} - {"out", "timeout_s"}
        unknown = sorted(given.keys() - known)
        if unknown:
            raise UsageError(
                f"sync 'relay' has no option {', '.join(map(repr, unknown))}",
                hint=f"use one of {', '.join(sorted(known))}",
            )
        if given.get("order", "ring") not in get_args(Order):
            raise UsageError(
                f"sync option order is {given['order']!r}", hint=f"use one of {', '.join(get_args(Order))}"
            )
        partitions = given.get("partitions")
        if partitions is not None and (not isinstance(partitions, int) or partitions < 1):
            raise UsageError(f"sync option partitions is {partitions!r}, expected at least 1")
        if given.get("hub") is not None:
            given["hub"] = Address(*address_of("hub", str(given["hub"])), shared_token("sync option hub"))
        elif given.get("port"):
            shared_token("sync option port")
        return cls(out=config.run.out, timeout_s=config.run.timeout_s, **given)
