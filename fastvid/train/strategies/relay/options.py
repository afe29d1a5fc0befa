"""The options of a sweep, read from a configuration."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from fastvid.errors import UsageError
from fastvid.train.config.config import Config
from fastvid.train.strategies.relay.halving import Halving
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
        halving: From ``rungs``, epochs after which only the best models continue, for example "1,3", and ``keep``, the
            fraction that continues. None trains all models to the end.
        replay: results.json of a sweep whose order of visits to repeat.
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
    halving: Halving | None = None
    replay: Path | None = None
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
        rungs, keep = given.pop("rungs", None), given.pop("keep", None)
        known = {field.name for field in dataclasses.fields(cls)} - {"out", "timeout_s", "halving"}
        unknown = sorted(given.keys() - known)
        if unknown:
            raise UsageError(
                f"sync 'relay' has no option {', '.join(map(repr, unknown))}",
                hint=f"use one of {', '.join(sorted([*known, 'rungs', 'keep']))}",
            )
        if given.get("order", "ring") not in get_args(Order):
            raise UsageError(
                f"sync option order is {given['order']!r}", hint=f"use one of {', '.join(get_args(Order))}"
            )
        partitions = given.get("partitions")
        if partitions is not None and (not isinstance(partitions, int) or partitions < 1):
            raise UsageError(f"sync option partitions is {partitions!r}, expected at least 1")
        if keep is not None and rungs is None:
            raise UsageError("sync option keep needs rungs", hint="set sync_options.rungs, for example 1,3")
        if given.get("replay") is not None:
            given["replay"] = Path(given["replay"])
        if given.get("hub") is not None:
            given["hub"] = Address(*address_of("hub", str(given["hub"])), shared_token("sync option hub"))
        elif given.get("port"):
            shared_token("sync option port")
        halving = None if rungs is None else Halving(_epochs(rungs), 0.5 if keep is None else float(keep))
        return cls(out=config.run.out, timeout_s=config.run.timeout_s, halving=halving, **given)


def _epochs(text: Any) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in str(text).split(","))
    except ValueError as error:
        raise UsageError(f"sync option rungs is {text!r}, expected epochs such as 1,3") from error
