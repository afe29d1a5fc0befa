"""Reads what a LeRobot dataset says of itself: its features, and where each episode is in which files.

Version 3.0 concatenates episodes in files; version 2.1 has a file for each. Where an episode begins in a video is
counted in frames, from the lengths of the episodes before it in the file: the seconds of the metadata are rounded, and
only compared with that.

The episodes of a LeRobot dataset as sources of a job: one for each camera, joined when a shard is written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from fastvid.errors import FormatError, StorageError, UsageError
from fastvid.format.planes import DepthScale
from fastvid.format.schema import DEPTH, LEROBOT, SIGNALS, STREAM_PATTERN, from_parquet
from fastvid.sharding.sources.sources import Source, SourceList
from fastvid.storage import Storage, open_storage
from fastvid.storage.urls import is_remote

SCHEME: Final = "lerobot:"
"""Begins the source that names a LeRobot dataset: ``lerobot:FOLDER``, ``lerobot:hf://datasets/OWNER/NAME``."""

INFO: Final = "meta/info.json"
STATS: Final = "meta/stats.json"
_VERSIONS: Final = ("v3.0", "v2.1")
_DATA_PATH: Final = {
    "v3.0": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "v2.1": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
}
_VIDEO_PATH: Final = {
    "v3.0": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    "v2.1": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
}
# Types of features that are numbers.
_NUMBERS: Final = frozenset(
    {"float16", "float32", "float64", "bool"} | {f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)}
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an episode is in a file."""

    file: str
    first: int  # its first frame, or row, in the file


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode."""

    index: int
    length: int  # number of frames
    tasks: tuple[str, ...]
    videos: Mapping[str, Place]
    data: Place

    @property
    def key(self) -> str:
        """The key of its sample."""
        return f"episode_{self.index:06d}"


@dataclass(frozen=True, eq=False)
class LeRobotDataset:
    """A LeRobot dataset."""

    storage: Storage
    info: Mapping[str, Any]
    cameras: tuple[str, ...]
    signals: tuple[str, ...]
    left_out: tuple[str, ...]
    episodes: tuple[Episode, ...]
    tasks: tuple[str, ...]
    stats: Mapping[str, Any]

    @property
    def fps(self) -> int:
        """Frames per second."""
        return int(self.info["fps"])

    @property
    def depth(self) -> dict[str, DepthScale]:
        """The cameras that show depth, and how their levels become distances."""
        found = {}
        for camera in self.cameras:
            feature = self.info["features"][camera]
            known = {**feature, **(feature.get("info") or {}), **(feature.get("video_info") or {})}
            if known.get("is_depth_map") or known.get("video.is_depth_map"):
                names = {"min": "depth_min", "max": "depth_max", "shift": "shift", "log": "use_log"}
                given = {name: known.get(f"video.{key}") for name, key in names.items()}
                scale = DepthScale().to_json() | {name: value for name, value in given.items() if value is not None}
                found[camera] = DepthScale.from_json(scale)
        return found


def is_lerobot(source: str) -> bool:
    """Return whether a source names a LeRobot dataset."""
    return source.startswith(SCHEME)


def read_lerobot(source: str) -> LeRobotDataset:
    """Read the metadata of a LeRobot dataset."""
    url = source.removeprefix(SCHEME)
    storage = open_storage(url)
    try:
        info = _json(storage, INFO)
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise UsageError("folder contains no LeRobot dataset", file=url, hint=f"it has no {INFO}") from error
        raise
    version = str(info.get("codebase_version"))
    if version not in _VERSIONS:
        raise UsageError(
            f"LeRobot dataset has version {version!r}",
            file=url,
            hint=f"versions {' and '.join(_VERSIONS)} are read; lerobot converts others",
        )
    features: Mapping[str, Any] = info["features"]
    cameras = tuple(name for name, feature in features.items() if feature["dtype"] == "video")
    if not cameras:
        pictures = [name for name, feature in features.items() if feature["dtype"] == "image"]
        raise UsageError(
            "LeRobot dataset has no videos",
            file=url,
            hint=f"its images ({', '.join(pictures)}) can be converted to videos by lerobot" if pictures else None,
        )
    signals = tuple(name for name, feature in features.items() if feature["dtype"] in _NUMBERS)
    left_out = tuple(name for name in features if name not in {*cameras, *signals})
    old = version == "v2.1"
    tasks = _old_tasks(storage) if old else _tasks(storage)
    stats = {} if old and not storage.exists(STATS) else _json(storage, STATS)
    episodes = tuple(_old_episodes(storage, info, cameras) if old else _episodes(storage, info, cameras))
    if len(episodes) != info["total_episodes"] or sum(one.length for one in episodes) != info["total_frames"]:
        raise FormatError(
            f"metadata lists {len(episodes)} episodes of {sum(one.length for one in episodes)} frames, {INFO} says"
            f" {info['total_episodes']} of {info['total_frames']}",
            file=url,
        )
    return LeRobotDataset(storage, info, cameras, signals, left_out, episodes, tasks, stats)


def _json(storage: Storage, name: str) -> Any:
    return _parsed(storage.read(name), storage, name)


def _parsed(text: bytes, storage: Storage, name: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise FormatError(f"cannot parse JSON: {error}", file=f"{storage.url}/{name}") from error


def _json_lines(storage: Storage, name: str) -> list[Any]:
    return [_parsed(line, storage, name) for line in storage.read(name).splitlines() if line.strip()]


def _old_tasks(storage: Storage) -> tuple[str, ...]:
    found = {int(row["task_index"]): str(row["task"]) for row in _json_lines(storage, "meta/tasks.jsonl")}
    return tuple(found[number] for number in sorted(found))


def _tasks(storage: Storage) -> tuple[str, ...]:
    table = from_parquet(storage.read("meta/tasks.parquet"), file="meta/tasks.parquet")
    # pandas stores the index, which is the text, as a column.
    name = next(name for name in table.column_names if name != "task_index")
    rows = sorted(zip(table["task_index"].to_pylist(), table[name].to_pylist(), strict=True))
    return tuple(str(task) for _, task in rows)


def _old_episodes(storage: Storage, info: Mapping[str, Any], cameras: Sequence[str]) -> Iterator[Episode]:
    data, video = info.get("data_path") or _DATA_PATH["v2.1"], info.get("video_path") or _VIDEO_PATH["v2.1"]
    for row in sorted(_json_lines(storage, "meta/episodes.jsonl"), key=lambda row: int(row["episode_index"])):
        index = int(row["episode_index"])
        names = {"episode_chunk": index // int(info.get("chunks_size", 1000)), "episode_index": index}
        videos = {camera: Place(video.format(video_key=camera, **names), 0) for camera in cameras}
        tasks = tuple(map(str, row.get("tasks", ())))
        yield Episode(index, int(row["length"]), tasks, videos, Place(data.format(**names), 0))


def _episodes(storage: Storage, info: Mapping[str, Any], cameras: Sequence[str]) -> Iterator[Episode]:
    names = [name for name in storage.list("meta/episodes/") if name.endswith(".parquet")]
    tables = [from_parquet(storage.read(name), file=name) for name in names]
    if not tables:
        raise FormatError("LeRobot dataset lists no episodes", file=f"{storage.url}/meta/episodes")
    known = ["episode_index", "length", "tasks", "data/chunk_index", "data/file_index", "dataset_from_index"]
    known += [
        f"videos/{camera}/{part}" for camera in cameras for part in ("chunk_index", "file_index", "from_timestamp")
    ]
    table = pa.concat_tables([part.select(known) for part in tables])
    rows = table.take(pc.sort_indices(table["episode_index"])).to_pylist()
    data, video = info.get("data_path") or _DATA_PATH["v3.0"], info.get("video_path") or _VIDEO_PATH["v3.0"]
    fps, rows_before = float(info["fps"]), dict[str, int]()
    firsts = {camera: _firsts(rows, camera, video, fps, storage) for camera in cameras}
    for number, row in enumerate(rows):
        file = data.format(chunk_index=row["data/chunk_index"], file_index=row["data/file_index"])
        place = Place(file, rows_before.get(file, 0))
        rows_before[file] = place.first + int(row["length"])
        videos = {camera: firsts[camera][number] for camera in cameras}
        yield Episode(int(row["episode_index"]), int(row["length"]), tuple(map(str, row["tasks"])), videos, place)


def _firsts(
    rows: Sequence[Mapping[str, Any]], camera: str, template: str, fps: float, storage: Storage
) -> dict[int, Place]:
    """Return the place of each episode in a camera's videos, by the number of its row."""
    by_file: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        chunk, file = row[f"videos/{camera}/chunk_index"], row[f"videos/{camera}/file_index"]
        by_file.setdefault(template.format(video_key=camera, chunk_index=chunk, file_index=file), []).append(number)
    places = {}
    for file, numbers in by_file.items():
        first = 0
        for number in sorted(numbers, key=lambda number: float(rows[number][f"videos/{camera}/from_timestamp"])):
            row = rows[number]
            stated = float(row[f"videos/{camera}/from_timestamp"]) * fps
            if abs(stated - first) >= 0.5:
                raise FormatError(
                    f"episode {row['episode_index']} begins at frame {stated:.2f} of its video by its seconds, at"
                    f" {first} by the lengths of the episodes before it",
                    file=f"{storage.url}/{file}",
                    hint="the dataset's metadata and its videos do not belong together",
                )
            places[number] = Place(file, first)
            first += int(row["length"])
    return places


def read_signals_of(dataset: LeRobotDataset, episodes: Sequence[Episode]) -> pa.Table:
    """Read the signals of episodes: one row per frame, in their order; vectors as lists of a fixed length."""
    parts, files = [], dict[str, pa.Table]()
    for episode in episodes:
        name = episode.data.file
        if name not in files:
            files = {name: from_parquet(dataset.storage.read(name), file=name)}  # episodes of a file follow each other
        part = files[name].slice(episode.data.first, episode.length)
        numbers = pc.unique(part["episode_index"]).to_pylist()
        if part.num_rows != episode.length or numbers not in ([episode.index], []):
            raise FormatError(
                f"rows {episode.data.first} to {episode.data.first + episode.length} are not those of episode"
                f" {episode.index}",
                file=f"{dataset.storage.url}/{name}",
            )
        parts.append(part.select(dataset.signals))
    table = pa.concat_tables(parts)
    return pa.table({name: _numbers(dataset, name, table[name]) for name in dataset.signals})


def _numbers(dataset: LeRobotDataset, name: str, column: pa.ChunkedArray) -> pa.Array:
    """Return a column as numbers, or lists of a fixed length; matrices are flattened, row by row."""
    feature = dataset.info["features"][name]
    count = 1
    for side in feature["shape"]:
        count *= int(side)
    whole = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    is_list = pa.types.is_list(whole.type) or pa.types.is_fixed_size_list(whole.type)
    while pa.types.is_list(whole.type) or pa.types.is_fixed_size_list(whole.type):
        whole = whole.flatten()
    kind = pa.type_for_alias({"float16": "halffloat"}.get(feature["dtype"], feature["dtype"]))
    whole = whole.cast(kind)
    if not is_list and count == 1:
        return whole
    return pa.FixedSizeListArray.from_arrays(whole, count)


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
