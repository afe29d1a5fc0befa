"""Compares what the ranks of a job read, before their first step.

A node may have an old copy of the dataset, or a rank may be started with other settings. Training would then run, on
other clips than every record of it says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from fastvid.errors import StateError
from fastvid.format.dataset import Dataset
from fastvid.load.order.mixture import Mixture, parts_of
from fastvid.runtime.hashing import sha256
from fastvid.runtime.json_text import json_text
from fastvid.train.config.config import Config, flatten, to_json
from fastvid.train.ranks.elastic import Member, gather_bytes

OF_A_NODE: Final = frozenset(
    {
        "data.path", "data.num_threads", "data.prefetch", "data.workers", "model.weights", "run.checkpoints",
        "run.loggers", "run.out",
    }
)  # fmt: skip
"""Settings that may differ between nodes. Weights are read by rank 0 alone."""

_LONGEST: Final = 200  # characters of a value in a message
_NONE: Final = "nothing"


def facts(
    config: Config, fingerprint: Mapping[str, Any], train: Dataset | Mixture, evaluated: Dataset | None
) -> dict[str, str]:
    """Return everything that all ranks must have in common, as text by name."""
    generations = [part.generation for part in parts_of(train)]
    files = [[list(map(asdict, one.shards)), one.annotations_sha256] for one in generations]
    settings = flatten(to_json(config))
    return {
        **{name: str(value) for name, value in fingerprint.items()},
        "generation's files": sha256(json_text(files).encode()),
        "classes": json_text(train.classes),
        "training samples": str(len(train)),
        "evaluation samples": _NONE if evaluated is None else str(len(evaluated)),
        **{name: json_text(value) for name, value in settings.items() if not _of_a_node(name)},
    }


def _of_a_node(setting: str) -> bool:
    return setting in OF_A_NODE or (setting.startswith("data.mixture.") and setting.endswith(".path"))


def check_agreement(own: Mapping[str, str], member: Member) -> None:
    """Check that all ranks have the same facts; call it on every rank."""
    first, *others = (json.loads(data) for data in gather_bytes(json.dumps(own).encode(), member))
    differs = {
        rank: [name for name in [*first, *(theirs.keys() - first.keys())] if theirs.get(name) != first.get(name)]
        for rank, theirs in enumerate(others, 1)
    }
    ranks = [rank for rank, names in differs.items() if names]
    if not ranks:
        return
    rank, name = ranks[0], differs[ranks[0]][0]
    values = [facts.get(name, _NONE)[:_LONGEST] for facts in (others[rank - 1], first)]
    more = f" (and in {', '.join(differs[rank][1:4])})" if len(differs[rank]) > 1 else ""
    also = f"; so do ranks {', '.join(map(str, ranks[1:]))}" if len(ranks) > 1 else ""
    raise StateError(
        f"rank {rank} differs from rank 0 in {name}{more}: it has {values[0]}, rank 0 has {values[1]}{also}",
        hint="give every node the same dataset, and start every rank with the same settings",
        rank=rank,
    )
