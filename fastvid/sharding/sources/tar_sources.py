"""Gather all sources of a job: videos in folders, or in tars of other tools, to be re-encoded."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

import pyarrow as pa

from fastvid.errors import FormatError, UsageError
from fastvid.format.dataset import annotation_table
from fastvid.media.reasons import Reason
from fastvid.sharding.sources.annotations import VIDEO_SUFFIXES, read_annotations
from fastvid.sharding.sources.dataset_sources import read_source_dataset
from fastvid.sharding.sources.sources import Source, SourceList, assign_keys, find_sources
from fastvid.sharding.sources.tars import TarSample, find_tars, missing_video, read_tar, sample_keys
from fastvid.storage import open_storage


def gather_sources(
    roots: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    annotations: Sequence[str] | str | None = None,
    *,
    class_names: Sequence[str] = (),
    follow_links: bool = False,
) -> SourceList:
    """Return the sources of a job, from folders or from tars.

    Args:
        roots: Folders, single video files, tars, or folders that contain tars and no video; one or several.
        annotations: ``format:path``, one or several; not for tars, which contain their own labels and columns.
        class_names: Names for integer labels.
        follow_links: See `find_sources`.

    Raises:
        UsageError: See `read_annotations` and `find_sources`; also if annotations are given for tars, or tars are mixed
            with other sources.
    """
    specs = [annotations] if isinstance(annotations, str) else list(annotations or ())
    rows = read_annotations(specs, class_names) if specs else None
    paths = [os.fspath(root) for root in ([roots] if isinstance(roots, str | os.PathLike) else roots)]
    tars = [path for path in paths if _is_tar(path)]
    if not tars:
        return _storable(find_sources(paths, rows, follow_links=follow_links))
    if len(tars) < len(paths):
        other = next(path for path in paths if path not in tars)
        raise UsageError(
            "tars and other sources cannot be in one job", file=other, hint="add the rest with `fastvid add`"
        )
    if rows is not None:
        raise UsageError(
            "annotations cannot be used with tars", hint="omit them: labels and columns are read from the tars' members"
        )
    return _storable(_by_tars(find_tars(tars), class_names))


def _storable(found: SourceList) -> SourceList:
    """Return the sources if their annotations make a table, which is written after all of them are encoded.

    Raises:
        UsageError: If they do not.
    """
    try:
        annotation_table([dict(source.columns) for source in found.sources])
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise UsageError(
            f"annotations cannot be stored: {error}", hint="check the columns of the annotations"
        ) from error
    return found


def _is_tar(root: str) -> bool:
    if not os.path.isdir(root):
        return root.endswith(".tar")
    names = [name for name in os.listdir(root) if not name.startswith(".")]
    videos = any(os.path.splitext(name)[1].lower() in VIDEO_SUFFIXES for name in names)
    return not videos and any(name.endswith(".tar") for name in names)


def _by_tars(paths: Sequence[str], class_names: Sequence[str]) -> SourceList:
    found: dict[str, Sequence[TarSample]] = {}
    sources: list[Source] = []
    datasets = {folder: read_source_dataset(folder) for folder in dict.fromkeys(map(os.path.dirname, paths))}
    for path in paths:
        storage, dataset = open_storage(os.path.dirname(path)), datasets[os.path.dirname(path)]
        if dataset is not None and os.path.basename(path) not in dataset.tars:
            continue  # left by an earlier generation
        try:
            samples: Sequence[TarSample] = read_tar(storage.map(os.path.basename(path)))
            found[path] = samples if dataset is None else dataset.annotate(samples)
        except FormatError as error:
            problem = Reason.BROKEN_CONTAINER, f"the tar is broken: {error.message}"
            sources.append(Source(os.path.basename(path), path, problem=problem))
    # Tars in different folders may have the same name.
    names = {path: os.path.basename(path).removesuffix(".tar") for path in found}
    if len(set(names.values())) < len(names):
        names = {path: path.removesuffix(".tar").strip("/") for path in found}
    ids = sample_keys({names[path]: samples for path, samples in found.items()})
    labels = [sample.label for samples in found.values() for sample in samples if sample.label is not None]
    numbers = all(isinstance(label, int) for label in labels)
    carried = dict.fromkeys(name for dataset in datasets.values() if dataset is not None for name in dataset.classes)
    classes = _classes(labels, class_names)
    if not class_names:
        classes = tuple(carried | dict.fromkeys(classes))
    for path, samples in found.items():
        for sample in samples:
            label = sample.label if not (numbers and class_names) else _named(sample.label, class_names)
            video = sample.video
            sources.append(
                Source(
                    ids[names[path], sample.first][0],
                    path,
                    0 if video is None else video.size,
                    None if label is None else str(label),
                    sample.columns,
                    member=None if video is None else (video.offset, video.size),
                    problem=missing_video(sample),
                )
            )
    counts = Counter(
        note.partition(":")[0] for samples in found.values() for sample in samples for note in sample.notes
    )
    return SourceList(assign_keys(sorted(sources, key=lambda source: source.id)), classes, dict(counts))


def _classes(labels: Sequence[str | int], class_names: Sequence[str]) -> tuple[str, ...]:
    numbers = [label for label in labels if isinstance(label, int)]
    if len(numbers) == len(labels) and not class_names:
        return tuple(str(number) for number in range(max(numbers, default=-1) + 1))
    if not class_names:
        return tuple(sorted({str(label) for label in labels}))
    unknown = {str(label) for label in labels if not isinstance(label, int)} - set(class_names)
    if unknown:
        raise UsageError(f"label {min(unknown)!r} is not one of the {len(class_names)} class names")
    return tuple(class_names)


def _named(label: str | int | None, class_names: Sequence[str]) -> str | None:
    if not isinstance(label, int):
        return label
    if label >= len(class_names):
        raise UsageError(f"label {label} has no name: there are only {len(class_names)} class names")
    return class_names[label]
