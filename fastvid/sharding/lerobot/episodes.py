"""The episodes of a LeRobot dataset as sources of a job: one for each camera, joined when a shard is written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from fastvid.errors import UsageError
from fastvid.format.schema import DEPTH, LEROBOT, SIGNALS, STREAM_PATTERN
from fastvid.media.reasons import Reason
from fastvid.sharding.lerobot.metadata import Episode, LeRobotDataset
from fastvid.sharding.sources.sources import Source, SourceList
from fastvid.sharding.work.messages import Outcome
from fastvid.storage.urls import is_remote

EPISODES_PER_SHARD: Final = 500
"""Most episodes of a shard: with 1,000 frames and four cameras each its packet tables are 40 MB."""


def episode_sources(dataset: LeRobotDataset) -> SourceList:
    """Return a source for each camera of each episode, in order.

    If every episode has one task, tasks are the classes. Columns: ``episode_index``, ``tasks``.
    """
    for camera in dataset.cameras:
        if not STREAM_PATTERN.fullmatch(camera):
            raise UsageError(
                f"camera {camera!r} has a name that a stream cannot have",
                file=dataset.storage.url,
                hint="use letters, digits, dots, _ and -",
            )
    sources = []
    single = all(len(episode.tasks) == 1 for episode in dataset.episodes)
    for episode in dataset.episodes:
        columns = {"episode_index": episode.index, "tasks": list(episode.tasks)}
        for camera in dataset.cameras:
            place = episode.videos[camera]
            path = f"{dataset.storage.url}/{place.file}"
            sources.append(
                Source(
                    f"{place.file}#{episode.key}",
                    path if is_remote(path) else os.path.abspath(path),
                    label=episode.tasks[0] if single else None,
                    columns=columns,
                    key=episode.key,
                    parent=place.file,
                    frames=(place.first, episode.length),
                    stream=camera,
                )
            )
    return SourceList(tuple(sources), tuple(dict.fromkeys(dataset.tasks)) if single else (), {})


def episode_shards(dataset: LeRobotDataset, found: SourceList, per_shard: int) -> list[list[Source]]:
    """Return the sources of each shard: whole episodes, in order, at most `per_shard`."""
    step = per_shard * len(dataset.cameras)
    return [list(found.sources[first : first + step]) for first in range(0, len(found.sources), step)]


def in_file_order(sources: Sequence[Source]) -> list[int]:
    """Return the positions of sources so that the episodes of a file follow each other: it is opened once."""
    return sorted(range(len(sources)), key=lambda slot: (sources[slot].path, sources[slot].frames or (0, 0)))


def joined(
    sources: Sequence[Source], outcomes: Iterator[Outcome], cameras: int
) -> Iterator[list[tuple[Source, Outcome]]]:
    """Yield the cameras of each episode with their outcomes; if one is rejected, so are the others."""
    pairs = zip(sources, outcomes, strict=True)
    while views := [pair for _, pair in zip(range(cameras), pairs, strict=False)]:
        bad = next((outcome for _, outcome in views if outcome.reason is not None), None)
        if bad is not None:
            views = [(source, _rejected(outcome, bad)) for source, outcome in views]
        yield views


def _rejected(outcome: Outcome, bad: Outcome) -> Outcome:
    if outcome.reason is not None:
        return outcome
    # Which bytes are blocked is nobody else's business.
    reason = Reason.DAMAGED if bad.reason is Reason.BLOCKED else bad.reason
    return replace(outcome, samples=(), reason=reason, message=f"another camera of its episode: {bad.message}")


def kept_episodes(dataset: LeRobotDataset, keys: Sequence[str]) -> list[Episode]:
    """Return the episodes with the given keys, in their order."""
    by_key = {episode.key: episode for episode in dataset.episodes}
    return [by_key[key] for key in keys]


def extras_of(dataset: LeRobotDataset) -> dict[str, Any]:
    """Return what a generation says of a LeRobot dataset: its record, and what is known of each signal."""
    features: Mapping[str, Any] = dataset.info["features"]
    signals = {
        name: {"names": features[name].get("names"), "shape": features[name]["shape"], "stats": dataset.stats.get(name)}
        for name in dataset.signals
    }
    cameras = {name: {"stats": dataset.stats.get(name)} for name in dataset.cameras}
    depth = {DEPTH: {camera: scale.to_json() for camera, scale in dataset.depth.items()}} if dataset.depth else {}
    known = {"info": dict(dataset.info), "tasks": list(dataset.tasks), "cameras": cameras}
    return {SIGNALS: signals, LEROBOT: known, **depth}
