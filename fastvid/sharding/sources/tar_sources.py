"""Gather all sources of a job: videos in folders, in tars of other tools, or in datasets, to be re-encoded."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence

import pyarrow as pa

from fastvid.errors import FormatError, UsageError
from fastvid.format.annotations.build_table import annotation_table
from fastvid.media.reasons import Reason
from fastvid.sharding.sources.annotations import read_annotations
from fastvid.sharding.sources.dataset_sources import dataset_sources, is_dataset
from fastvid.sharding.sources.sources import Source, SourceList, assign_keys, find_sources
from fastvid.sharding.sources.tars import TarSample, find_tars, missing_video, name_classes, read_tar, sample_keys
from fastvid.sharding.sources.video_names import VIDEO_SUFFIXES
from fastvid.storage import open_storage


def gather_sources(
    roots: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    annotations: Sequence[str] | str | None = None,
    *,
    columns: str | Mapping[str, str] | None = None,
    class_names: Sequence[str] = (),
    follow_links: bool = False,
) -> SourceList:
    """Return the sources of a job, from folders, tars or datasets."""
    specs = [annotations] if isinstance(annotations, str) else list(annotations or ())
    if columns and not specs:
        raise UsageError("columns are named, but there are no annotations", hint="give a table with --annotations")
    rows = read_annotations(specs, class_names, columns=columns) if specs else None
    paths = [os.fspath(root) for root in ([roots] if isinstance(roots, str | os.PathLike) else roots)]
    datasets = [path for path in paths if is_dataset(path)]
    if datasets:
        _check_alone("datasets", datasets, paths, annotated=rows is not None)
        return _storable(dataset_sources(datasets))
    tars = [path for path in paths if is_tar(path)]
    if not tars:
        return _storable(find_sources(paths, rows, follow_links=follow_links))
    _check_alone("tars", tars, paths, annotated=rows is not None)
    return _storable(_by_tars(find_tars(tars), class_names))


def _check_alone(kind: str, some: Sequence[str], paths: Sequence[str], *, annotated: bool) -> None:
    """Raise a UsageError if there are other sources, or annotations: tars and datasets contain their own."""
    if len(some) < len(paths):
        other = next(path for path in paths if path not in some)
        raise UsageError(
            f"{kind} and other sources cannot be in one job", file=other, hint="add the rest with `fastvid add`"
        )
    if annotated:
        raise UsageError(
            f"annotations cannot be used with {kind}", hint=f"omit them: labels and columns are read from the {kind}"
        )


def _storable(found: SourceList) -> SourceList:
    """Return the sources if their annotations make a table, which is written after all of them are encoded."""
    try:
        annotation_table([dict(source.columns) for source in found.sources])
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise UsageError(
            f"annotations cannot be stored: {error}", hint="check the columns of the annotations"
        ) from error
    return found


def is_tar(root: str) -> bool:
    """Return whether a path is a tar, or a folder of tars without videos."""
    if not os.path.isdir(root):
        return root.endswith(".tar")
    names = [name for name in os.listdir(root) if not name.startswith(".")]
    videos = any(os.path.splitext(name)[1].lower() in VIDEO_SUFFIXES for name in names)
    return not videos and any(name.endswith(".tar") for name in names)


def _by_tars(paths: Sequence[str], class_names: Sequence[str]) -> SourceList:
    found: dict[str, Sequence[TarSample]] = {}
    sources: list[Source] = []
    for path in paths:
        try:
            found[path] = read_tar(open_storage(os.path.dirname(path)).map(os.path.basename(path)))
        except FormatError as error:
            problem = Reason.BROKEN_CONTAINER, f"the tar is broken: {error.message}"
            sources.append(Source(os.path.basename(path), path, problem=problem))
    # Tars in different folders may have the same name.
    names = {path: os.path.basename(path).removesuffix(".tar") for path in found}
    if len(set(names.values())) < len(names):
        names = {path: path.removesuffix(".tar").strip("/") for path in found}
    ids = sample_keys({names[path]: samples for path, samples in found.items()})
    classes, named = name_classes(found, class_names)
    for path, samples in named.items():
        for sample in samples:
            video = sample.video
            sources.append(
                Source(
                    ids[names[path], sample.first][0],
                    path,
                    0 if video is None else video.size,
                    None if sample.label is None else str(sample.label),
                    sample.columns,
                    member=None if video is None else (video.offset, video.size),
                    problem=missing_video(sample),
                )
            )
    counts = Counter(
        note.partition(":")[0] for samples in found.values() for sample in samples for note in sample.notes
    )
    return SourceList(assign_keys(sorted(sources, key=lambda source: source.id)), classes, dict(counts))
