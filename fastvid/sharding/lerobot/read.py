"""Reads the metadata of a LeRobot dataset: its features, and in which files and where each episode is.

Version 3.0 concatenates episodes in files, here called films; version 2.1 has a file for each episode. The metadata
gives the start of an episode in a film in seconds; films may have frames of no episode. An episode is rejected if its
start is between two frames, or if it overlaps another episode. Each camera of an episode is a source of a job; a
sample is made from the sources of its cameras when its shard is written.

The metadata is not trusted: types are checked, and every file that it names must be a regular one below the root.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Annotated, Any, Final, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from fastvid.errors import FormatError, StorageError, UsageError
from fastvid.format.annotations import join_stats
from fastvid.format.planes import DepthScale
from fastvid.format.schema import DEPTH, LEROBOT, SIGNALS, STREAM_PATTERN, from_parquet
from fastvid.media.reasons import Reason
from fastvid.runtime.values import as_type
from fastvid.sharding.sources.sources import LEROBOT_INFO as INFO
from fastvid.sharding.sources.sources import Source, SourceList, check_inside
from fastvid.storage import LocalStorage, Storage, open_storage
from fastvid.storage.protocol import check_name
from fastvid.storage.urls import is_remote

SCHEME: Final = "lerobot:"
"""Prefix of sources that are LeRobot datasets: ``lerobot:FOLDER``, ``lerobot:hf://datasets/OWNER/NAME``."""

STATS: Final = "meta/stats.json"
_VERSIONS: Final = ("v3.0", "v2.1")
DATA_PATH: Final = {
    "v3.0": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "v2.1": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
}
VIDEO_PATH: Final = {
    "v3.0": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    "v2.1": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
}
# A field in the template of a path: its name, and for a number its width, of one digit.
_FIELD: Final = re.compile(r"\{(\w+)(?::0([1-9])d)?\}")
# Types of features that are numbers.
_NUMBERS: Final = frozenset(
    {"float16", "float32", "float64", "bool"} | {f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)}
)
# Fraction of a frame: a start that is at most this far from a frame means that frame. Otherwise it is rounded only if
# the episode before ends at that frame.
_NEAR: Final = 0.25
# Fraction of an episode's number of frames by which its length in the film, computed from seconds, may differ from it.
_LONGER: Final = 0.1

UNNAMED: Final = "frame of a film that no episode names"
"""The kind under which frames before and between episodes are counted as ignored."""

_Kind = TypeVar("_Kind")
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Length = Annotated[int, msgspec.Meta(ge=1, le=2**53)]


class Feature(msgspec.Struct, frozen=True):
    """The record of a feature in ``info.json``."""

    dtype: str
    shape: tuple[_Length, ...] = (1,)
    names: Any = None
    info: dict[str, Any] | None = None
    video_info: dict[str, Any] | None = None

    @property
    def depth(self) -> DepthScale | None:
        """How the levels of a depth camera become distances; None for other cameras."""
        known = {**(self.info or {}), **(self.video_info or {})}
        if not (known.get("is_depth_map") or known.get("video.is_depth_map")):
            return None
        names = {"min": "depth_min", "max": "depth_max", "shift": "shift", "log": "use_log"}
        given = {name: known.get(f"video.{key}") for name, key in names.items()}
        return as_type({name: value for name, value in given.items() if value is not None}, DepthScale)


class _Info(msgspec.Struct, frozen=True):
    fps: Annotated[float, msgspec.Meta(gt=0, le=100_000)]
    features: dict[str, Feature]
    total_episodes: _Count
    total_frames: _Count
    chunks_size: _Length = 1000
    data_path: str | None = None
    video_path: str | None = None


class _Task(msgspec.Struct, frozen=True):
    task_index: _Count
    task: str


class _Film(msgspec.Struct, frozen=True):
    chunk_index: _Count
    file_index: _Count
    from_timestamp: float
    to_timestamp: float


class _Row(msgspec.Struct, frozen=True):
    """A row of the list of episodes, of version 3.0 or 2.1."""

    episode_index: _Count
    length: _Length
    tasks: tuple[str, ...] = ()
    chunk_index: _Count = 0
    file_index: _Count = 0
    films: dict[str, _Film] = {}


@dataclass(frozen=True, slots=True)
class Place:
    """Where an episode is in a video file."""

    file: str
    first: int  # number of its first frame in the file
    problem: str = ""  # why the episode is rejected; empty if it is not


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode."""

    index: int
    length: int  # number of frames
    tasks: tuple[str, ...]
    videos: Mapping[str, Place]
    data: str

    @property
    def key(self) -> str:
        """The key of its sample."""
        return f"episode_{self.index:06d}"


@dataclass(frozen=True, eq=False)
class LeRobotDataset:
    """A LeRobot dataset."""

    storage: Storage
    info: Mapping[str, Any]
    features: Mapping[str, Feature]
    cameras: tuple[str, ...]
    signals: tuple[str, ...]
    episodes: tuple[Episode, ...]
    tasks: tuple[str, ...]
    stats: Mapping[str, Any]
    ignored: Mapping[str, int]  # number of ignored items, by kind
    depth: Mapping[str, DepthScale]  # the cameras that show depth


def is_lerobot(source: str) -> bool:
    """Return whether a source names a LeRobot dataset."""
    return source.startswith(SCHEME)


def read_lerobot(source: str) -> LeRobotDataset:
    """Read the metadata of a LeRobot dataset."""
    url = source.removeprefix(SCHEME)
    storage = open_storage(url)
    try:
        known = _json(storage, INFO)
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise UsageError("folder contains no LeRobot dataset", file=url, hint=f"it has no {INFO}") from error
        raise
    version = str(known.get("codebase_version"))
    if version not in _VERSIONS:
        raise UsageError(
            f"LeRobot dataset has version {version!r}",
            file=url,
            hint=f"versions {' and '.join(_VERSIONS)} are read; lerobot converts others",
        )
    info = _typed(storage, INFO, known, _Info)
    kinds = {name: feature.dtype for name, feature in info.features.items()}
    cameras = tuple(name for name, kind in kinds.items() if kind == "video")
    if not cameras:
        pictures = [name for name, kind in kinds.items() if kind == "image"]
        raise UsageError(
            "LeRobot dataset has no videos",
            file=url,
            hint=f"its images ({', '.join(pictures)}) can be converted to videos by lerobot" if pictures else None,
        )
    if bad := next((camera for camera in cameras if not STREAM_PATTERN.fullmatch(camera)), None):
        raise UsageError(
            f"camera {bad!r} has a name that a stream cannot have",
            file=url,
            hint="use letters, digits, dots, _ and -",
        )
    try:
        depth = {camera: scale for camera in cameras if (scale := info.features[camera].depth)}
    except msgspec.ValidationError as error:
        raise FormatError(f"a scale of depth does not parse: {error}", file=f"{url}/{INFO}") from error
    tasks = _tasks(storage, version)
    rows = _rows(storage, version, cameras)
    _check_rows(rows, info, frozenset(tasks), url)
    stats = _json(storage, STATS) if version == "v3.0" or storage.exists(STATS) else _joined_stats(storage)
    episodes, unnamed = _episodes(storage, version, info, cameras, rows)
    ignored = Counter({UNNAMED: unnamed})
    for name, kind in kinds.items():
        if kind != "video" and kind not in _NUMBERS:
            ignored[f"frame of the feature {name} ({kind}), which is not kept"] = info.total_frames
    signals = tuple(name for name, kind in kinds.items() if kind in _NUMBERS)
    return LeRobotDataset(storage, known, info.features, cameras, signals, episodes, tasks, stats, +ignored, depth)


def _check_rows(rows: Sequence[_Row], info: _Info, tasks: frozenset[str], url: str) -> None:
    """Raise FormatError if the list of episodes contradicts the other metadata."""
    frames = sum(row.length for row in rows)
    if (len(rows), frames) != (info.total_episodes, info.total_frames):
        raise FormatError(
            f"metadata lists {len(rows)} episodes of {frames} frames, {INFO} says {info.total_episodes} of"
            f" {info.total_frames}",
            file=url,
        )
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        if after is not None and after.episode_index == row.episode_index:
            raise FormatError(f"metadata lists episode {row.episode_index} twice", file=url)
        if unknown := set(row.tasks) - tasks:
            raise FormatError(
                f"episode {row.episode_index} has the task {min(unknown)!r}, which the list of tasks lacks", file=url
            )


def _typed(storage: Storage, name: str, value: Any, kind: type[_Kind]) -> _Kind:
    """Return the parsed content of a file as a record, after checking its types."""
    try:
        return as_type(value, kind)
    except ValueError as error:  # halves of surrogate pairs are no text
        raise FormatError(f"metadata does not parse: {error}", file=f"{storage.url}/{name}") from error


def _read(storage: Storage, name: str) -> bytes:
    """Read a file of the metadata, after checking that it is inside the dataset."""
    if problem := _problem(storage, name):
        raise FormatError(f"a file of the dataset is {problem[1]}", file=f"{storage.url}/{name}")
    return storage.read(name)


def _problem(storage: Storage, name: str) -> tuple[Reason, str] | None:
    """Return why a file must not be opened: it is a link to outside the dataset, or no regular file.

    None if it may be opened, or does not exist.
    """
    if not isinstance(storage, LocalStorage):
        return None
    path, root = storage.path(name), storage.root
    # The Hub's cache has links from snapshots/REVISION to blobs.
    inside = root.parents[1] if root.parent.name == "snapshots" and (root.parents[1] / "blobs").is_dir() else root
    try:
        found = check_inside(str(path), str(inside))
        if found is None and not stat.S_ISREG(os.stat(path).st_mode):
            return Reason.NOT_VIDEO, "no regular file"
    except OSError:
        return None  # opening it will raise the error
    return found


def _json(storage: Storage, name: str) -> dict[str, Any]:
    return _parsed(_read(storage, name), storage, name)


def _parsed(text: bytes, storage: Storage, name: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"cannot parse JSON: {error}", file=f"{storage.url}/{name}") from error
    return _typed(storage, name, found, dict[str, Any])


def _json_lines(storage: Storage, name: str) -> list[dict[str, Any]]:
    return [_parsed(line, storage, name) for line in _read(storage, name).splitlines() if line.strip()]


def _joined_stats(storage: Storage, name: str = "meta/episodes_stats.jsonl") -> dict[str, Any]:
    """Return the statistics of each feature, of those that version 2.1 has for each episode; none without the file."""
    parts = [row.get("stats") for row in _json_lines(storage, name)] if storage.exists(name) else []
    rows = _typed(storage, name, parts, list[dict[str, dict[str, Any]]])
    try:
        return {feature: join_stats([row.get(feature) for row in rows]) for feature in (rows or [{}])[0]}
    except (TypeError, ValueError) as error:
        raise FormatError(f"statistics do not parse: {error}", file=f"{storage.url}/{name}") from error


def _tasks(storage: Storage, version: str) -> tuple[str, ...]:
    name = "meta/tasks.jsonl" if version == "v2.1" else "meta/tasks.parquet"
    if version == "v2.1":
        rows = _json_lines(storage, name)
    else:
        table = from_parquet(_read(storage, name), file=name)
        # pandas stores the index, which is the text, as a column.
        text = next((column for column in table.column_names if column != "task_index"), "task")
        rows = [{"task_index": row.get("task_index"), "task": row.get(text)} for row in table.to_pylist()]
    found = {row.task_index: row.task for row in _typed(storage, name, rows, list[_Task])}
    return tuple(found[number] for number in sorted(found))


def _rows(storage: Storage, version: str, cameras: Sequence[str]) -> list[_Row]:
    """Return the rows of the episodes, sorted by their numbers."""
    folder = "meta/episodes"
    if version == "v2.1":
        rows = _json_lines(storage, f"{folder}.jsonl")
    else:
        columns = {"episode_index": "episode_index", "length": "length", "tasks": "tasks"}
        columns |= {f"data/{part}": part for part in ("chunk_index", "file_index")}
        films = {camera: {f"videos/{camera}/{part}": part for part in _Film.__struct_fields__} for camera in cameras}
        known = [*columns, *(column for names in films.values() for column in names)]
        rows = []
        for name in storage.list(f"{folder}/"):
            if name.endswith(".parquet"):
                for row in from_parquet(_read(storage, name), file=f"{storage.url}/{name}", columns=known).to_pylist():
                    made = {short: row[column] for column, short in columns.items()}
                    made["films"] = {camera: {s: row[c] for c, s in names.items()} for camera, names in films.items()}
                    rows.append(made)
        if not rows:
            raise FormatError("LeRobot dataset lists no episodes", file=f"{storage.url}/{folder}")
    return sorted(_typed(storage, folder, rows, list[_Row]), key=lambda row: row.episode_index)


def _episodes(
    storage: Storage, version: str, info: _Info, cameras: Sequence[str], rows: Sequence[_Row]
) -> tuple[tuple[Episode, ...], int]:
    """Return the episodes, and the number of frames in films, before and between episodes, that are in none."""
    data, video = info.data_path or DATA_PATH[version], info.video_path or VIDEO_PATH[version]

    def place(template: str, row: _Row, camera: str = "") -> str:
        chunk, film = row.episode_index // info.chunks_size, row.films.get(camera, row)
        known = {"episode_chunk": chunk, "episode_index": row.episode_index}
        if version == "v3.0":
            known = {"chunk_index": film.chunk_index, "file_index": film.file_index}
        return _path(storage, template, {**known, **({"video_key": camera} if camera else {})})

    unnamed, videos, owners = 0, dict[str, list[Place]](), dict[str, str]()
    for camera in cameras:
        files = [place(video, row, camera) for row in rows]
        if {owners.setdefault(file, camera) for file in files} - {camera} or (
            version == "v2.1" and len(set(files)) < len(files)
        ):
            raise FormatError(f"path {video!r} names one file for several videos", file=f"{storage.url}/{INFO}")
        videos[camera] = [Place(file, 0) for file in files]
        episodes_of = dict[str, list[int]]()
        for number, file in enumerate(files):
            episodes_of.setdefault(file, []).append(number)
        for file, numbers in episodes_of.items() if version == "v3.0" else ():
            films = [rows[number].films[camera] for number in numbers]
            stated = [(film.from_timestamp * info.fps, film.to_timestamp * info.fps) for film in films]
            places, left = _firsts(file, stated, [rows[number].length for number in numbers])
            unnamed += left
            for number, found in zip(numbers, places, strict=True):
                videos[camera][number] = found
    return tuple(
        Episode(row.episode_index, row.length, row.tasks, {c: videos[c][number] for c in cameras}, place(data, row))
        for number, row in enumerate(rows)
    ), unnamed


def _firsts(file: str, stated: Sequence[tuple[float, float]], lengths: Sequence[int]) -> tuple[list[Place], int]:
    """Return where each episode is in a film, and the number of frames before and between them.

    `stated`: start and end of each episode in the film, converted from seconds to frames. `lengths`: number of frames
    of each episode.
    """
    places = [Place(file, 0, f"by its seconds it begins at frame {at} of its video") for at, _ in stated]
    end, unnamed, last = 0, 0, -1
    for number in sorted((n for n, (at, _) in enumerate(stated) if 0 <= at < 2**53), key=lambda n: stated[n][0]):
        (at, to), length = stated[number], lengths[number]
        first, problem = round(at), ""
        if abs(at - first) > _NEAR and first != end:
            problem = f"by its seconds it begins at frame {at:.2f} of its video, which is between two frames"
        elif not abs(to - at - length) < max(_NEAR + 0.5, _LONGER * length):
            problem = f"it has {length} frames, but by its seconds {to - at:.2f} frames of its video"
        elif first < end and last >= 0:
            problem = "its frames are also those of another episode"
            places[last] = Place(file, places[last].first, problem)
        places[number] = Place(file, first, problem)
        unnamed += 0 if problem else max(0, first - end)
        if first + length > end:
            # If this episode is rejected, its end is uncertain: then an overlap does not reject the next one.
            end, last = first + length, -1 if problem and first >= end else number
    return places, unnamed


def _path(storage: Storage, template: str, known: Mapping[str, int | str]) -> str:
    """Return the name of a file by a template of the metadata; raise FormatError if it is not below the root."""

    def field(found: re.Match[str]) -> str:
        value = known.get(found[1])
        if value is None or (found[2] and isinstance(value, str)):
            raise FormatError(
                f"path {template!r} has the field {found[0]}",
                file=f"{storage.url}/{INFO}",
                hint=f"fields are {', '.join(known)}, numbers with at most nine digits, such as {{episode_index:06d}}",
            )
        return str(value).zfill(int(found[2] or 0))

    if "{" in (rest := _FIELD.sub("", template)) or "}" in rest:
        raise FormatError(f"path {template!r} has a field that is not known", file=f"{storage.url}/{INFO}")
    return check_name(_FIELD.sub(field, template), storage.url)


def read_signals_of(dataset: LeRobotDataset, episodes: Sequence[Episode]) -> pa.Table:
    """Read the signals of episodes: one row per frame, in their order; vectors as lists of a fixed length."""
    parts, files = [], dict[str, pa.Table]()
    known = list(dict.fromkeys(("episode_index", "frame_index", *dataset.signals)))
    for episode in episodes:
        name = f"{dataset.storage.url}/{episode.data}"
        if name not in files:
            # Keep only the last file: episodes of one file follow each other.
            files = {name: from_parquet(_read(dataset.storage, episode.data), file=name, columns=known)}
        numbers = files[name]["episode_index"]
        if not pa.types.is_integer(numbers.type):
            raise FormatError(f"column 'episode_index' is {numbers.type}, expected whole numbers", file=name)
        part = files[name].filter(pc.equal(numbers, episode.index))
        if part["frame_index"].to_pylist() != list(range(episode.length)):
            raise FormatError(
                f"{part.num_rows} rows are of episode {episode.index}, which has {episode.length} frames, or they are"
                " not in order",
                file=name,
            )
        # Files may store the same numbers as other types.
        parts.append(pa.table({name: _numbers(dataset, name, part[name]) for name in dataset.signals}))
    try:
        return pa.concat_tables(parts)
    except pa.ArrowException as error:
        message = "signals are numbers in one file and lists in another"
        raise FormatError(message, file=f"{dataset.storage.url}/{INFO}") from error


def _numbers(dataset: LeRobotDataset, name: str, column: pa.ChunkedArray) -> pa.Array:
    """Return a column as numbers, or lists of a fixed length; matrices are flattened, row by row."""
    feature, whole, size = dataset.features[name], column.combine_chunks(), 1
    rows, is_list = len(whole), False
    while pa.types.is_list(whole.type) or pa.types.is_fixed_size_list(whole.type):
        lengths = pc.unique(pc.list_value_length(whole)).to_pylist()
        size *= lengths[0] if len(lengths) == 1 and lengths[0] is not None else 0
        whole, is_list = whole.flatten(), True
    count = math.prod(feature.shape)
    if rows and size != count:
        told = f"{size} values in a row" if size else "lists of several lengths"
        raise FormatError(f"signal {name!r} has {told}, its shape is {feature.shape}", file=dataset.storage.url)
    try:
        whole = whole.cast(pa.type_for_alias({"float16": "halffloat"}.get(feature.dtype, feature.dtype)))
    except pa.ArrowException as error:
        raise FormatError(f"signal {name!r} is not {feature.dtype}: {error}", file=dataset.storage.url) from error
    return pa.FixedSizeListArray.from_arrays(whole, count) if is_list or count > 1 else whole


EPISODES_PER_SHARD: Final = 500
"""Default maximum of episodes in a shard: with 1,000 frames and four cameras each, its packet tables take 40 MB."""


def episode_sources(dataset: LeRobotDataset) -> SourceList:
    """Return a source for each camera of each episode, in order; if an episode is rejected, its sources say why.

    If every episode has exactly one task, the tasks are the classes. Columns: ``episode_index``, ``tasks``.
    """
    sources = []
    single = all(len(episode.tasks) == 1 for episode in dataset.episodes)
    look = cache(lambda file: _problem(dataset.storage, file))
    for episode in dataset.episodes:
        columns = {"episode_index": episode.index, "tasks": list(episode.tasks)}
        places = episode.videos.values()
        problem = next((found for place in places if (found := look(place.file))), None)
        if told := next((place.problem for place in places if place.problem), None):
            problem = Reason.OUT_OF_RANGE, told
        label = episode.tasks[0] if single else None
        one = Source("", "", label=label, columns=columns, problem=problem, key=episode.key)
        for camera, place in episode.videos.items():
            path, name = f"{dataset.storage.url}/{place.file}", f"{place.file}#{episode.key}"
            path, frames = path if is_remote(path) else os.path.abspath(path), (place.first, episode.length)
            sources.append(replace(one, id=name, path=path, parent=place.file, frames=frames, stream=camera))
    return SourceList(tuple(sources), tuple(dict.fromkeys(dataset.tasks)) if single else (), dataset.ignored)


def episode_shards(dataset: LeRobotDataset, found: SourceList, per_shard: int) -> list[list[Source]]:
    """Return the sources of each shard: whole episodes, in order, at most `per_shard`."""
    step, sources = per_shard * len(dataset.cameras), [one for one in found.sources if one.problem is None]
    return [sources[first : first + step] for first in range(0, len(sources), step)]


def extras_of(dataset: LeRobotDataset) -> dict[str, Any]:
    """Return the generation's extras for a LeRobot dataset: its metadata, and a description of each signal."""
    features: Mapping[str, Any] = dataset.info["features"]
    signals = {
        name: {
            "names": features[name].get("names"),
            "shape": list(dataset.features[name].shape),
            "stats": dataset.stats.get(name),
        }
        for name in dataset.signals
    }
    cameras = {name: {"stats": dataset.stats.get(name)} for name in dataset.cameras}
    depth = {DEPTH: {camera: asdict(scale) for camera, scale in dataset.depth.items()}} if dataset.depth else {}
    known = {"info": dict(dataset.info), "tasks": list(dataset.tasks), "cameras": cameras}
    return {SIGNALS: signals, LEROBOT: known, **depth}
