"""Writes a dataset of episodes as a LeRobot dataset, version 3.0. Videos are not encoded again."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from fastvid.decode.clips import read_clip
from fastvid.decode.containers import minimal_mp4
from fastvid.decode.request import Box, ClipRequest
from fastvid.errors import FastvidError, FormatError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.format.packets import StreamInfo
from fastvid.format.schema import LEROBOT, to_parquet
from fastvid.runtime import faults
from fastvid.runtime.arrays import BoolArray, IntArray
from fastvid.sharding.lerobot.read import DATA_PATH, STATS, VIDEO_PATH
from fastvid.sharding.sources.sources import LEROBOT_INFO as INFO
from fastvid.storage import Storage

# LeRobot's defaults for the size of a file of videos, and of signals in memory, from which on the next episode begins a
# new file; in megabytes.
_LIMITS: Final = {"video_files_size_in_mb": 200, "data_files_size_in_mb": 100}

_PER_CHUNK: Final = 1000  # files in a folder, LeRobot's chunks_size
_VERSION: Final = "v3.0"
_EPISODES: Final = "meta/episodes/chunk-000/file-000.parquet"
_QUANTILES: Final = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
# Fields of `info` about the original encoding, which the videos may no longer have.
_ENCODER: Final = ("video.g", "video.crf", "video.preset", "video.fast_decode", "video.video_backend")


def write_lerobot(source: Dataset, target: Storage) -> dict[str, dict[str, Any]]:
    """Write the selected episodes, renumbered from 0; return bytes and number of episodes of each file, by its name.

    Videos keep their packets, so frames are those of the dataset, bit by bit. ``frame_index``, ``episode_index``,
    ``index`` and ``task_index`` are computed; other signals are copied. Statistics of signals are computed anew if
    episodes were left out; those of cameras are kept. The same dataset gives the same bytes.
    """
    known = lerobot_record(source)
    rows = source.annotations.take(source.rows).to_pylist()
    episodes = [
        _Episode(row["key"], {"episode_index": number, "tasks": list(row["tasks"]), "length": row["num_frames"]})
        for number, row in enumerate(rows)
    ]
    limits = {name: int(known["info"].get(name) or default) for name, default in _LIMITS.items()}
    video_bytes, data_bytes = (megabytes << 20 for megabytes in limits.values())
    files: dict[str, dict[str, Any]] = {}
    described = {}
    for camera in source.streams:
        made, described[camera] = _write_videos(source, target, camera, episodes, video_bytes)
        files |= made
        faults.reach("export")
    tasks = _Tasks(known["tasks"], episodes)
    features = _features(source, known["info"]["features"], described)
    made, everything = _write_data(source, target, features, episodes, tasks, data_bytes)
    files |= made
    target.write("meta/tasks.parquet", tasks.to_parquet())
    target.write(_EPISODES, to_parquet(pa.Table.from_pylist([episode.row for episode in episodes])))
    stats = _stats(source, known, everything, tasks)
    target.write(STATS, json.dumps(stats, indent=4).encode())
    frames = sum(episode.length for episode in episodes)
    info = {
        **known["info"],
        "codebase_version": _VERSION,
        "features": features,
        "total_episodes": len(episodes),
        "total_frames": frames,
        "total_tasks": len(tasks.names),
        "chunks_size": _PER_CHUNK,
        **limits,
        "data_path": DATA_PATH[_VERSION],
        "video_path": VIDEO_PATH[_VERSION],
        "splits": {"train": f"0:{len(episodes)}"},
    }
    for name in ("total_chunks", "total_videos"):  # version 2.1 had them
        info.pop(name, None)
    target.write(INFO, json.dumps(info, indent=4).encode())
    return files


def lerobot_record(source: Dataset) -> Mapping[str, Any]:
    """Return the generation's record of the LeRobot dataset that it was made from; raise UsageError if it was not."""
    known: Mapping[str, Any] | None = source.generation.extras.get(LEROBOT)
    if known is None:
        raise UsageError(
            "only a dataset that was made of a LeRobot dataset can be written as one",
            file=source.storage.url,
            hint="use `fastvid index lerobot:ROOT` or `fastvid shard lerobot:ROOT`",
        )
    return known


@dataclass(slots=True)
class _Episode:
    """An episode: the key of its sample, and its row of ``meta/episodes``, with its number among those written."""

    key: str
    row: dict[str, Any]

    @property
    def length(self) -> int:
        return int(self.row["length"])


class _Tasks:
    """The tasks of the episodes that are written, in the order of the original list of tasks."""

    def __init__(self, known: Sequence[str], episodes: Sequence[_Episode]) -> None:
        used = {task for episode in episodes for task in episode.row["tasks"]}
        self.names = [task for task in known if task in used]
        numbers = {task: number for number, task in enumerate(self.names)}
        # A frame may have a task that its episode does not list.
        self._new = np.array([numbers.get(task, -1) for task in known], np.int64)

    def renumber(self, old: IntArray, key: str) -> IntArray:
        """Return the new numbers of tasks. `old`: their original numbers, one for each frame of the episode `key`."""
        if len(old) and not (old.min() >= 0 and old.max() < len(self._new) and (self._new[old] >= 0).all()):
            raise FormatError("a frame has a task that its episode does not name", key=key)
        return self._new[old]

    def to_parquet(self) -> bytes:
        """Return the table as pandas writes it, with the tasks as index."""
        kinds = {"task_index": ("int64", "int64"), "task": ("unicode", "object")}
        columns = [
            {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy, "metadata": None}
            for name, (kind, numpy) in kinds.items()
        ]
        pandas = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "pandas_version": "2.0.0"}
        table = pa.table({"task_index": pa.array(range(len(self.names)), pa.int64()), "task": pa.array(self.names)})
        return to_parquet(table.replace_schema_metadata({"pandas": json.dumps(pandas)}))


class _Files:
    """Files that are written one after another; their names are made from a template and their numbers."""

    def __init__(self, target: Storage, template: str, **known: str) -> None:
        self._target, self._template, self._known = target, template, known
        self.made: dict[str, dict[str, Any]] = {}  # bytes and number of episodes of each file, by name

    @property
    def place(self) -> dict[str, int]:
        """Numbers of the next file."""
        return {"chunk_index": len(self.made) // _PER_CHUNK, "file_index": len(self.made) % _PER_CHUNK}

    def write(self, content: bytes, episodes: int) -> None:
        name = self._template.format(**self._known, **self.place)
        self._target.write(name, content)
        self.made[name] = {"bytes": len(content), "samples": episodes}


def _write_videos(
    source: Dataset, target: Storage, camera: str, episodes: Sequence[_Episode], most: int
) -> tuple[dict[str, dict[str, Any]], StreamInfo]:
    """Write the videos of a camera, and add to each episode's row where it is.

    Returns the files, see `_Files.made`, and the description of the camera's stream.
    """
    files = _Files(target, VIDEO_PATH[_VERSION], video_key=camera)
    shards, at = source.locate(np.arange(len(source)))
    open_file: _Video | None = None
    first: StreamInfo | None = None

    for episode, shard_number, row in zip(episodes, shards.tolist(), at.tolist(), strict=True):
        shard = source.shard(shard_number)
        info = shard.info(row, camera)
        first = first or info
        if (info.width, info.height, info.fps, info.codec) != (first.width, first.height, first.fps, first.codec):
            raise UsageError(
                f"videos of {camera} differ in size, rate or codec", key=episode.key, hint="encode all with one profile"
            )
        if open_file is not None and not open_file.takes(info, most):
            files.write(open_file.to_bytes(), open_file.episodes)
            open_file = None
        open_file = open_file or _Video(info)
        begins = open_file.frames
        try:
            box = Box(0, 0, info.height & ~1, info.width & ~1)
            request = ClipRequest(0, np.arange(episode.length), box, (box.height, box.width))
            open_file.add(read_clip(request, info, shard.table(row, camera), shard.reader(row, camera)))
        except FastvidError as error:
            raise error.at(key=episode.key, stream=camera) from error
        rate = info.fps
        episode.row |= {
            f"videos/{camera}/{name}": value
            for name, value in {
                **files.place,
                "from_timestamp": float(begins / rate),
                "to_timestamp": float((begins + episode.length) / rate),
            }.items()
        }
    assert first is not None
    assert open_file is not None
    files.write(open_file.to_bytes(), open_file.episodes)
    return files.made, first


class _Video:
    """A video file in memory: the packets of several episodes, one after another."""

    def __init__(self, info: StreamInfo) -> None:
        self._info, self.frames, self.episodes = info, 0, 0
        self._data = io.BytesIO()
        self._packets: list[tuple[IntArray, IntArray, IntArray, BoolArray]] = []  # places, sizes, frames, key flags

    def takes(self, info: StreamInfo, most: int) -> bool:
        """Return whether another episode fits: same decoder parameters, and fewer than `most` bytes so far."""
        mine = self._info
        same = (mine.extradata, mine.matrix, mine.range) == (info.extradata, info.matrix, info.range)
        return same and self._data.tell() < most

    def add(self, clip: Any) -> None:
        if (clip.shows < 0).any() or not clip.keys[0]:
            raise UsageError(
                "the episode does not begin with a key frame of its video, or has packets that show no frame",
                hint="encode it by `fastvid shard lerobot:ROOT --profile ...`, and export that",
            )
        place = clip.starts + self._data.tell()
        self._packets.append((place, clip.sizes, clip.shows + self.frames, clip.keys))
        self._data.write(clip.data)
        self.frames += len(clip.shows)
        self.episodes += 1

    def to_bytes(self) -> bytes:
        columns = [np.concatenate(parts) for parts in zip(*self._packets, strict=True)]
        return minimal_mp4(self._info, self._data.getbuffer(), *columns)


def _features(source: Dataset, features: Mapping[str, Any], described: Mapping[str, StreamInfo]) -> dict[str, Any]:
    """Return the features of the written dataset, without those that fastvid does not keep, such as images."""
    made = {}
    for name, feature in features.items():
        if name in source.signals:
            made[name] = feature
        elif name in described:
            info = described[name]
            size = (info.width, info.height)
            known = dict(feature.get("info") or {})
            same = (known.get("video.width"), known.get("video.height")) == size
            if not (same and known.get("video.codec") == info.codec.name.lower()):
                known = {key: value for key, value in known.items() if key not in (*_ENCODER, "video.extra_options")}
                known |= {"video.codec": info.codec.name.lower(), "video.pix_fmt": "yuv420p"}
            known |= {"video.width": info.width, "video.height": info.height, "video.fps": _whole(info.fps)}
            sides = {"height": info.height, "width": info.width}
            names = feature.get("names") or ["height", "width", "channels"]
            shape = [sides.get(one, side) for one, side in zip(names, feature["shape"], strict=True)]
            made[name] = {**feature, "shape": shape, "info": known}
    return made


def _whole(rate: Any) -> float:
    return int(rate) if rate.denominator == 1 else float(rate)


def _write_data(
    source: Dataset,
    target: Storage,
    features: Mapping[str, Any],
    episodes: Sequence[_Episode],
    tasks: _Tasks,
    most: int,
) -> tuple[dict[str, dict[str, Any]], dict[str, np.ndarray[Any, Any]]]:
    """Write the signals of all frames; return the files, and all values of each signal."""
    files = _Files(target, DATA_PATH[_VERSION])
    every: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in source.signals}
    waiting, size, index = list[pa.Table](), 0, 0
    for episode, row in zip(episodes, source.rows.tolist(), strict=True):
        if waiting and size >= most:
            files.write(to_parquet(pa.concat_tables(waiting)), len(waiting))
            waiting, size = [], 0
        frames = np.arange(episode.length)
        values = {name: source.signals.values(name, np.array([row]), frames[None])[0] for name in source.signals}
        computed = {
            "frame_index": frames,
            "episode_index": np.full(episode.length, episode.row["episode_index"]),
            "index": index + frames,
        }
        values |= {name: column for name, column in computed.items() if name in values}
        if "task_index" in values:
            values["task_index"] = tasks.renumber(values["task_index"].reshape(-1), episode.key)
        table = pa.table({name: _column(column, features[name]) for name, column in values.items()})
        episode.row |= {
            **{f"data/{name}": value for name, value in files.place.items()},
            "dataset_from_index": index,
            "dataset_to_index": index + episode.length,
            **{
                f"stats/{name}/{what}": number
                for name, column in values.items()
                for what, number in frame_stats(column).items()
            },
            "meta/episodes/chunk_index": 0,
            "meta/episodes/file_index": 0,
        }
        for name, column in values.items():
            every[name].append(column)
        waiting.append(table)
        size, index = size + table.nbytes, index + episode.length
    if waiting:
        files.write(to_parquet(pa.concat_tables(waiting)), len(waiting))
    return files.made, {name: np.concatenate(columns) for name, columns in every.items() if columns}


def _column(values: np.ndarray[Any, Any], feature: Mapping[str, Any]) -> pa.Array:
    """Return a signal as LeRobot stores it: numbers, or lists as deep as the feature's shape."""
    shape = [int(side) for side in feature["shape"]]
    column: pa.Array = pa.array(np.ascontiguousarray(values).reshape(-1))
    if shape == [1]:
        return column
    for side in reversed(shape):
        column = pa.FixedSizeListArray.from_arrays(column, side)
    return column


def frame_stats(values: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return the statistics of a signal [N] or [N, A] as LeRobot stores them; ``std`` divides by N, not N - 1."""
    flat = values.reshape(len(values), -1).astype(np.float64)
    found = {name: getattr(flat, name)(axis=0).tolist() for name in ("min", "max", "mean", "std")}
    found["count"] = [len(flat)]
    quantiles = np.quantile(flat, list(_QUANTILES.values()), axis=0)
    return found | {name: row.tolist() for name, row in zip(_QUANTILES, quantiles, strict=True)}


def _stats(source: Dataset, record: Mapping[str, Any], values: Mapping[str, Any], tasks: _Tasks) -> dict[str, Any]:
    stats: dict[str, Any] = {
        name: known for name in source.streams if (known := record["cameras"].get(name, {}).get("stats")) is not None
    }
    renumbered = ("index", "episode_index", *(["task_index"] if tasks.names != record["tasks"] else []))
    for name, column in values.items():
        known = source.signals[name].get("stats")
        # Keep the original statistics if no frame is missing, except for numbers that have changed.
        is_whole = known is not None and known.get("count") == [len(column)] and name not in renumbered
        stats[name] = known if is_whole else frame_stats(column)
    return stats
