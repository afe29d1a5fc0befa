"""The results of a sweep, as a JSON object and as a text table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastvid.train.config.config import Config, flatten, to_json
from fastvid.train.records.records import clock
from fastvid.train.strategies.relay.hub import SweepRecord
from fastvid.train.strategies.relay.scheduler import ModelProgress, Scheduler


def results(configs: Sequence[Config], scheduler: Scheduler, record: SweepRecord, seconds: float) -> dict[str, Any]:
    """Return the results of a sweep as JSON values.

    Returns ``models``: best first, each with the settings in which it differs, scores by epoch, and its visits;
    ``seconds``; ``bound_seconds``, a lower bound for any order of the same
    visits: the longest model, or the work spread evenly over the partitions; ``dataset_bytes``, read while loading
    partitions and during visits; ``token_bytes``; ``lost``; ``timeline``.
    """
    settings = differing([flatten(to_json(config)) for config in configs])
    spent = [sum(visit["seconds"] for visit in record.visits if visit["model"] == m) for m in range(len(configs))]
    ranked = sorted(scheduler.models, key=rank)
    return {
        "order": scheduler.order,
        "partitions": scheduler.num_partitions,
        "models": [
            {
                **{name: value for name, value in dataclasses.asdict(model).items() if name != "arrived"},
                "seconds": spent[model.model],
                "score": finite(model.scores[-1]) if model.scores else None,
                "scores": [finite(score) for score in model.scores],
                "settings": settings[model.model],
            }
            for model in ranked
        ],
        "seconds": seconds,
        "bound_seconds": max(max(spent), sum(spent) / scheduler.num_partitions),
        "dataset_bytes": {
            "loaded": sum(entry.get("bytes_moved", 0) for entry in record.stages),
            "in_visits": sum(visit.get("bytes_moved", 0) for visit in record.visits),
        },
        "token_bytes": record.token_bytes,
        "lost": record.lost,
        "timeline": record.visits,
    }


def rank(model: ModelProgress) -> tuple[bool, int, float, int]:
    """Return the sort key of a model: failed models last, then by most epochs, then by highest last score."""
    score = model.scores[-1] if model.scores else -math.inf
    return model.status == "failed", -len(model.scores), math.inf if math.isnan(score) else -score, model.model


def differing(settings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of each mapping that are not the same in all mappings."""
    keys = dict.fromkeys(key for setting in settings for key in setting)
    varied = [key for key in keys if any(setting.get(key) != settings[0].get(key) for setting in settings)]
    return [{key: setting.get(key) for key in varied} for setting in settings]


def finite(value: float) -> float | None:
    """Return the value, or None if JSON cannot represent it."""
    return value if math.isfinite(value) else None


def table(summary: Mapping[str, Any]) -> str:
    """Return the models of `results` as lines of text, best first."""
    models = summary["models"]
    names = list(models[0]["settings"]) if models else []
    head = ["model", *names, "score", "epochs", "status", "time"]
    rows = [
        [
            str(model["model"]),
            *(str(model["settings"][name]) for name in names),
            "-" if model["score"] is None else f"{model['score']:.2f}",
            str(len(model["scores"])),
            model["status"],
            clock(model["seconds"]),
        ]
        for model in models
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in [head, *rows])
