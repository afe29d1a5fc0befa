"""Exports samples of a dataset, with their current annotations, as files for training with other tools."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset, whole_file
from fastvid.format.schema import EXPORT_RECORD, FLOW, FOREIGN, PICTURES, to_parquet
from fastvid.format.tar import TarMember, read_members, sample_groups, write_tar
from fastvid.runtime import faults
from fastvid.runtime.names import VIDEO_SUFFIXES, is_video
from fastvid.runtime.values import check_choice
from fastvid.sharding.change.repack import Members, map_checked, pieces_of
from fastvid.sharding.job.members import annotate_members
from fastvid.sharding.lerobot.export import lerobot_record, write_lerobot
from fastvid.storage import Storage, open_storage

_LOG = logging.getLogger(__name__)

_UNFINISHED: Final = "export-unfinished.json"  # what the export is made from, until it is complete

_LEROBOT: Final = "lerobot"

LAYOUTS: Final = ("wds", "energon", "hf", _LEROBOT)
"""What `export_samples` can write."""

_ENERGON: Final = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"  # plain dicts, for Energon's "cookers"
_FILE_NAME: Final = "file_name"  # column in which HF datasets expects the video's name
_VIDEO: Final = "video"  # column that HF datasets adds
_SPLIT: Final = "split"
_ALL: Final = "data"  # folder of samples without a split


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of `export_samples`."""

    samples: Mapping[str, int]  # number of samples by folder
    files: tuple[str, ...]
    bytes: int


def export_samples(
    dataset: str, out: str, *, to: str = "wds", split: str | None = None, where: str | None = None
) -> Exported:
    """Write the selected samples, one folder per split, without re-encoding.

    As "wds", each shard gives a tar per split. A sample has its streams, ``cls``, ``txt`` and JSON as
    `fastvid.sharding.job.members.annotate_members` describes, from the dataset's current annotations. "energon"
    adds ``.nv-meta``, with the folders as split parts, for ``energon prepare OUT --tar-index-only``. As "hf", each
    sample is a video file, with its annotations and ``class`` in the ``metadata.parquet`` of its folder.
    "lerobot" writes a LeRobot dataset, see `fastvid.sharding.lerobot.export.write_lerobot`.
    ``classes.txt`` has a class name per line; ``export.json`` is written last, so a folder without it is incomplete,
    and the same call completes it. The same dataset gives the same bytes.
    """
    check_choice("unknown layout {}", to, LAYOUTS)
    source, target = Dataset(dataset, split=split, where=where), open_storage(out)
    _check_cameras(source, to)
    record = {"dataset_id": source.dataset_id, "generation": source.generation.number, "split": split, "where": where}
    record |= {"to": to}
    _begin(target, json.dumps(record, indent=1).encode())
    if to == _LEROBOT:
        episodes = write_lerobot(source, target)
        return _end(target, record, episodes, {"train": len(source)})
    files: dict[str, dict[str, Any]] = {}
    by_split: defaultdict[str, tuple[list[str], list[int]]] = defaultdict(lambda: ([], []))  # files and rows
    keep = np.zeros(source.generation.num_samples, dtype=bool)
    keep[source.rows] = True
    for piece in pieces_of(source.storage, source.generation, keep):
        if not piece.samples:
            continue
        read = _reader(source, piece.number)
        by_folder: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        rows = np.flatnonzero(piece.keep).tolist()
        for row, annotation in zip(rows, piece.rows(source.annotations).to_pylist(), strict=True):
            by_folder.setdefault(_folder(annotation), []).append((row, annotation))
        for folder, chosen in sorted(by_folder.items()):
            samples = (
                (annotation["key"], annotate_members(read(row), annotation, source.classes))
                for row, annotation in chosen
            )
            names, numbers = by_split[folder]
            made = (_write_videos if to == "hf" else _write_tar)(target, folder, len(names), samples)
            files |= made
            names += made
            numbers += [piece.start + row for row, _ in chosen]
            faults.reach("export")
    if to == "hf":
        for folder, (names, numbers) in by_split.items():
            _write_metadata(source, target, folder, [name.partition("/")[2] for name in names], numbers)
    if to == "energon":
        _write_energon(target, {folder: names for folder, (names, _) in by_split.items()}, files)
    target.write("classes.txt", "".join(f"{name}\n" for name in source.classes).encode())
    return _end(target, record, files, {folder: len(rows) for folder, (_, rows) in by_split.items()})


def _end(
    target: Storage, record: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]], counts: Mapping[str, int]
) -> Exported:
    target.write(EXPORT_RECORD, json.dumps({**record, "files": files}, indent=1).encode())
    target.delete(_UNFINISHED)
    return Exported(counts, tuple(files), sum(file["bytes"] for file in files.values()))


def _check_cameras(source: Dataset, to: str) -> None:
    """Raise UsageError for a layout that cannot contain the dataset or would lose cameras; warn if signals are lost."""
    if to == _LEROBOT:
        lerobot_record(source)
        return
    if not source.signals and {PICTURES, FLOW}.issuperset(source.streams):
        return
    if to == "hf" or any(shard.is_in_place for shard in source.generation.shards):
        raise UsageError(
            f"a dataset with cameras or signals cannot be written as {to}, if it is in place or as single videos",
            file=source.storage.url,
            hint="use --to lerobot, or --to wds of a dataset that `fastvid shard lerobot:ROOT` made",
        )
    if source.signals:
        _LOG.warning("signals are not exported to %s; --to lerobot contains them", to)


def _begin(target: Storage, record: bytes) -> None:
    """Record in the folder which export it is for; an interrupted one is written again, with the same bytes."""
    names = target.list()
    if names and not (_UNFINISHED in names and target.read(_UNFINISHED) == record):
        raise UsageError(f"the export's folder contains {names[0]!r}", file=target.url, hint="choose an empty folder")
    target.write(_UNFINISHED, record)


def _write_tar(target: Storage, folder: str, number: int, samples: Iterator[Members]) -> dict[str, dict[str, Any]]:
    """Write samples of one shard as tar `number` of a folder; return its record by file name, empty without samples."""
    name = f"{folder}/{number:06d}.tar"
    with target.create(name) as file:
        digest = write_tar(file, samples)
    return {name: {"bytes": digest.bytes, "sha256": digest.sha256, "samples": digest.samples}}


def _write_videos(target: Storage, folder: str, number: int, samples: Iterator[Members]) -> dict[str, dict[str, Any]]:
    """Write samples as video files from `number` on; return their records by file name.

    Names are numbers, not keys, because HF datasets takes a word such as "test" in a path for a split.
    """
    files = {}
    for place, (_, members) in enumerate(samples, number):
        # In another tool's tar the video's suffix may be any; further streams of a sample have longer suffixes.
        videos = [suffix for suffix in members if f".{suffix.lower().rpartition('.')[2]}" in VIDEO_SUFFIXES]
        suffix = min(videos, key=lambda suffix: suffix.count("."))
        name = f"{folder}/{place:06d}.{suffix}"
        target.write(name, members[suffix])
        files[name] = {"bytes": len(members[suffix]), "samples": 1}
    return files


def _write_metadata(source: Dataset, target: Storage, folder: str, names: Sequence[str], rows: Sequence[int]) -> None:
    """Write the annotations of the videos of a folder, given by their rows in the dataset."""
    table = source.annotations.take(rows).drop_columns("removed")
    known = [f"source_{name}" if name in (_FILE_NAME, _VIDEO) else name for name in table.column_names]
    table = table.rename_columns(known).add_column(0, _FILE_NAME, pa.array(names))
    if source.classes:
        classes = pa.array(source.classes)
        table = table.append_column("class", classes.take(table["label"].combine_chunks()))
    target.write(f"{folder}/metadata.parquet", to_parquet(table))


def _write_energon(target: Storage, parts: Mapping[str, list[str]], tars: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the records of `energon prepare`, except for the index that it computes from them."""
    # YAML contains JSON.
    target.write(".nv-meta/split.yaml", json.dumps({"exclude": [], "split_parts": parts}, indent=1).encode())
    target.write(".nv-meta/dataset.yaml", _ENERGON.encode())
    counts = {name: tar["samples"] for name, tar in tars.items()}
    target.write(".nv-meta/.info.json", json.dumps({"shard_counts": counts}, indent=1).encode())


def _folder(annotation: Mapping[str, Any]) -> str:
    """Return the folder of a sample: its split."""
    value = annotation.get(_SPLIT)
    if value is None:
        return _ALL
    name = str(value)
    if not name.replace("-", "_").isidentifier() or not name.isascii():
        raise UsageError(
            f"split {name!r} cannot name a folder",
            key=annotation["key"],
            hint="rename it with `fastvid relabel`: letters, digits, - and _",
        )
    return name


def _reader(source: Dataset, shard: int) -> Callable[[int], Mapping[str, bytes]]:
    """Return a function that reads the members of a sample, given by its row in a shard."""
    opened = source.shard(shard)
    if opened.root is not None:
        return lambda row: dict([whole_file(opened, row)])
    view = map_checked(source.storage, source.generation.shards[shard])
    groups = {member.offset: members for _, members in sample_groups(read_members(view)) for member in members}
    is_foreign = source.generation.shards[shard].profile.get("name") == FOREIGN

    def read(row: int) -> Mapping[str, bytes]:
        place = opened.member(row, source.streams[0])[0]
        members = groups[place]
        chosen = _of_video(members, place) if is_foreign else {member.suffix: member for member in members}
        return {suffix: bytes(view[one.offset : one.offset + one.size]) for suffix, one in chosen.items()}

    return read


def _of_video(members: Sequence[TarMember], place: int) -> dict[str, TarMember]:
    """Return what belongs to the video at a place of another tool's tar, by suffix, without other videos of its key.

    Of `s0.left.mp4` these are `s0.left.json` instead of `s0.json`, and `s0.txt`, but not `s0.right.json`.
    """
    names = {member.offset: member.suffix.rpartition(".")[0] for member in members}
    videos = {member.offset for member in members if is_video(member.name)} - {place}
    others = {names[video] for video in videos} - {"", names[place]}
    found = {}
    for member in sorted(members, key=lambda member: names[member.offset] == names[place]):  # its own replace others
        if (name := names[member.offset]) not in others and member.offset not in videos:
            found[member.suffix.removeprefix(f"{name}.") if name == names[place] else member.suffix] = member
    return found
