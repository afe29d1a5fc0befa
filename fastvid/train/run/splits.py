"""The datasets that a run trains and is evaluated on, each at one generation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastvid.format.dataset import Dataset
from fastvid.load.order.mixture import Mixture
from fastvid.train.config.config import Config
from fastvid.train.config.mixture import MAIN, DatasetConfig
from fastvid.train.ranks.elastic import Member, broadcast_bytes


def open_datasets(
    config: Config, state: Mapping[str, Any] | None, member: Member
) -> tuple[Config, Dataset | Mixture, Dataset | None]:
    """Return the configuration with generations and classes filled in, and what it trains and is evaluated on.

    A resumed run keeps the generations that it started with, which are stored in the checkpoint.
    """
    data = config.data
    main = DatasetConfig(
        path=data.path, split=data.split, where=data.where, generation=data.generation, weight=data.weight
    )
    sources = _at_generations({MAIN: main, **data.mixture}, state, member)
    main, *_ = sources.values()
    opened = {
        name: Dataset(source.path, split=source.split, where=source.where, generation=source.generation)
        for name, source in sources.items()
    }
    train = opened[MAIN] if len(opened) == 1 else _mixture(opened, sources, data.epoch_samples)
    evaluated = None
    if data.eval_split is not None:
        evaluated = Dataset(data.path, split=data.eval_split, where=data.where, generation=main.generation)
    mixture = {name: source for name, source in sources.items() if name != MAIN}
    config = replace(config, data=replace(data, generation=main.generation, mixture=mixture))
    if config.model.num_classes is None:
        classes = len(config.task.names(train, config.data)) or None
        config = replace(config, model=replace(config.model, num_classes=classes))
    for dataset in (train, evaluated):
        if dataset is not None:
            config.task.check_data(dataset, config)
    return config, train, evaluated


def _at_generations(
    sources: Mapping[str, DatasetConfig], state: Mapping[str, Any] | None, member: Member
) -> dict[str, DatasetConfig]:
    wanted = [source.generation for source in sources.values()]
    before = [] if state is None else str(state["loader"]["fingerprint"]["generation"]).split(" + ")
    if len(before) == len(wanted):  # otherwise the mixture is another one, which the loader refuses
        wanted = [one if isinstance(one, int) else int(number) for one, number in zip(wanted, before, strict=True)]
    if not all(isinstance(one, int) for one in wanted):
        # One rank looks: a tag may move, and a new generation appear, while the others look.
        asked = zip(sources.values(), wanted, strict=True)
        found = [Dataset(source.path, generation=one).generation.number for source, one in asked if member.leads]
        wanted = json.loads(broadcast_bytes(json.dumps(found).encode() if member.leads else None, member) or b"[]")
    return {
        name: replace(source, generation=number) for (name, source), number in zip(sources.items(), wanted, strict=True)
    }


def _mixture(opened: Mapping[str, Dataset], sources: Mapping[str, DatasetConfig], epoch_samples: int | None) -> Mixture:
    weights = {name: source.weight for name, source in sources.items() if source.weight is not None}
    return Mixture(opened, weights=weights or None, num_samples=epoch_samples)
