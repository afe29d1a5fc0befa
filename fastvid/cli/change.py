"""Commands that change a dataset, or make a new one from others, without encoding."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import pyarrow.compute as pc

from fastvid.cli.command import exclusive, forwards, read_lines
from fastvid.errors import UsageError, visible
from fastvid.format.generations import read_annotations as read_table
from fastvid.format.generations import read_generation
from fastvid.runtime.values import count, duration, json_text, size, things
from fastvid.sharding.change.edit import match_annotations, read_labels, relabel_samples, remove_samples
from fastvid.sharding.change.export import LAYOUTS as LAYOUTS
from fastvid.sharding.change.export import export_samples
from fastvid.sharding.change.history import Garbage, collect_garbage, find_garbage, list_generations
from fastvid.sharding.change.repack import Made, compact_shards
from fastvid.sharding.change.takedown import (
    HIDDEN,
    SourceSelection,
    TakenDown,
    receipt_file,
    select_keys,
    take_down,
)  # fmt: skip
from fastvid.sharding.job.ledger import source_hashes
from fastvid.sharding.sets import Selection, SplitReport, make_subset, merge_datasets, split_samples
from fastvid.sharding.sources.annotations import read_annotations
from fastvid.storage import Storage, open_storage

_LOG = logging.getLogger(__name__)
_SHOWN: Final = 3  # maximum number of listed annotation rows that match no sample
_KINDS: Final = {"hf": "video", "lerobot": "file"}  # what an export's files are, by layout; otherwise tars


def remove(
    dataset: str,
    *,
    keys: list[str] = (),  # type: ignore[assignment]
    keys_file: str | None = None,
    source: tuple[str, ...] = (),
    sources_file: str | None = None,
    where: str | None = None,
    sha256: tuple[str, ...] = (),
    reason: str | None = None,
) -> int:
    """Remove samples from a dataset at once, without rewriting shards; with --reason, take their sources down.

    This writes a new generation; readers that open the dataset afterwards do not see the samples. Their bytes stay in
    the tars, and in earlier generations, until `fastvid compact DIR` and `fastvid gc DIR --yes`. If a name or key is
    unknown, nothing is removed and the command fails.

    With --reason, everything made from the same files is removed: all segments and clips of the selected sources, and
    all copies with equal bytes. Their SHA-256 are blocked, so no job packs them again; the ledger forgets their names;
    a receipt, a file in DIR/removals, lists the hashes of what was removed. After compact and gc,
    `fastvid verify DIR --receipt FILE --name NAME` searches all files for what should be gone.

    Args:
        dataset (DIR): Folder of the dataset.
        keys (KEY): Keys of samples.
        keys_file (FILE): A file with one key per line; - is stdin.
        source (NAME): Name or path of a source; may be repeated.
        sources_file (FILE): A file with one source per line; - is stdin.
        where (SQL): Samples for which a condition holds, such as "class = 'x'".
        sha256 (HEX): SHA-256 of a source file; may be repeated.
        reason (TEXT): Take the sources down for this reason; it is recorded, so it must not contain their names.
    """
    storage = open_storage(dataset)
    selection = SourceSelection(
        sources=[*source, *read_lines(sources_file, "sources")],
        keys=[*keys, *read_lines(keys_file, "keys")],
        where=where,
        hashes=[text.lower() for text in sha256],
    )
    if sha256:
        _tell_unhashed(storage)
    if reason is not None:
        print(_taken_down(dataset, take_down(storage, selection, reason=reason)))
        return 0
    done = remove_samples(storage, select_keys(storage, selection))
    before = f", {count(done.already)} already removed" if done.already else ""
    print(f"generation {done.generation}: {things(done.removed, 'sample')} removed{before}")
    return 0


def _tell_unhashed(storage: Storage) -> None:
    generation = read_generation(storage)[1]
    hidden, known = read_table(storage, generation)["removed"], pc.is_valid(source_hashes(storage, generation))
    if number := pc.sum(pc.invert(pc.or_(hidden, known))).as_py():
        told = "%s of unknown SHA-256, mostly of videos in place, cannot be compared: name them by --keys or --source"
        _LOG.warning(told, things(number, "sample"))


def _taken_down(dataset: str, done: TakenDown) -> str:
    receipt = done.receipt
    file = f"{dataset.rstrip('/')}/{receipt_file(receipt.number)}"
    lines = [
        f"generation {done.generation}: {things(receipt.samples, 'sample')} removed, {size(receipt.stored_bytes)},"
        f" of {things(done.named, 'named source')} and {count(done.copies)} with equal bytes",
        f"{count(len(receipt.hashes))} SHA-256 blocked: no job packs these files again",
    ]
    if receipt.unknown:
        lines.append(f"{things(receipt.unknown, 'source')} of unknown SHA-256, not blocked: block files with --sha256")
    lines.append(f"receipt {file}: {HIDDEN}")
    lines.append(f"to finish: fastvid compact {dataset} && fastvid gc {dataset} --yes")
    lines.append(f"to check:  fastvid verify {dataset} --receipt {file} --name NAME")
    return "\n".join(lines)


@exclusive("from_", "annotations", required=True)
def relabel(
    dataset: str,
    *,
    from_: str | None = None,
    annotations: tuple[str, ...] = (),
    columns: str | None = None,
    new_classes: bool = False,
) -> int:
    """Change labels, splits or captions of samples, without rewriting a shard.

    --from reads a table, CSV, JSON Lines, JSON or Parquet, with a column key, and label (a class name or index), labels
    (a list of them) or any other columns; --annotations reads the same formats as `fastvid shard` and finds samples by
    the names of their sources. Other samples keep their values. If a key or class is unknown, nothing is changed and
    the command fails.

    Args:
        dataset (DIR): Folder of the dataset.
        from_ (TABLE): A table: key, and label or other columns.
        annotations (FORMAT:FILE): As for `fastvid shard`; may be repeated.
        columns (NAME=COLUMN,...): As for `fastvid shard`.
        new_classes: Add class names that are not in the dataset.
    """
    storage = open_storage(dataset)
    rows: Mapping[str, Mapping[str, Any]]
    if from_ is not None:
        rows, note = read_labels(from_, columns), "relabel from a table"
    else:
        rows, note = _matched(dataset, annotations, columns), f"relabel from {', '.join(annotations)}"
    done = relabel_samples(storage, rows, new_classes=new_classes, note=note)
    if not done.columns:
        print(f"generation {done.generation}: no change, {things(len(rows), 'sample')} already have these values")
        return 0
    changed = visible(", ".join(done.columns))
    print(f"generation {done.generation}: {things(done.samples, 'sample')} changed in {changed}")
    if done.new_classes:
        print(visible(f"new classes: {', '.join(done.new_classes)}"))
    return 0


def _matched(dataset: str, annotations: tuple[str, ...], columns: str | None) -> Mapping[str, Mapping[str, Any]]:
    storage = open_storage(dataset)
    table = read_table(storage, read_generation(storage)[1])
    rows, unmatched, ambiguous = match_annotations(table, read_annotations(annotations, columns=columns))
    for names, why in ((unmatched, "match no sample"), (ambiguous, "match samples of several sources")):
        if names:
            shown = ", ".join(map(repr, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")
            _LOG.warning("%s that %s: %s", things(len(names), "row"), why, shown)
    if not rows:
        hint = "name sources as in the column source_id of the dataset, or use --from with keys"
        raise UsageError("no row of the annotations matches a sample", file=storage.url, hint=hint)
    return rows


@forwards(split_samples)
def split(dataset: str, shares: str, *, names: str | None = None, **options: Any) -> int:
    """Divide the samples of a dataset into splits, as a new column; no shard is rewritten.

    All samples of a group are in one split: by default the segments of one file. With --stratify each class keeps its
    proportion in every split, as far as the sizes of groups allow. The result depends on the names of groups and the
    seed. Samples that have a split keep it, so run it again after `fastvid add` to assign the new ones. Open a split by
    `fastvid.open(DIR, split="train")`, or "split2:train" for another column.

    Args:
        dataset (DIR): Folder of the dataset.
        shares (SHARES): Share of each split, such as 0.9,0.1.
        names (NAMES): Names of the splits (default: train,val or train,val,test).
        by (COLUMN): Keep samples with the same value together; parent: the file that they were cut from; key: each
            sample by itself.
        stratify (COLUMN): Keep the proportions of its values, such as label.
        seed (N): Seed of the division.
        column (NAME): Column to write.
        replace: Assign all samples anew, also those that have a split.
    """
    try:
        numbers = [float(share) for share in shares.split(",")]
    except ValueError as error:
        raise UsageError(f"shares {shares!r} are no numbers", hint="give shares such as 0.9,0.1") from error
    listed = names.split(",") if names else ()
    print(_splits(split_samples(open_storage(dataset), numbers, names=listed, **options)))
    return 0


def _splits(report: SplitReport) -> str:
    lines = [
        f"{name}: {things(one.samples, 'sample')}, {duration(one.seconds)}, {things(one.groups, 'group')}"
        for name, one in report.splits.items()
    ]
    kept = f", {report.kept} had one" if report.kept else ""
    lines.append(f"generation {report.generation}: {things(report.placed, 'sample')} got a {report.column}{kept}")
    lines.append("`fastvid inspect` shows the classes of each split")
    return "\n".join(map(visible, lines))


@forwards(Selection)
def subset(
    dataset: str, *, out: str, keys_file: str | None = None, generation: int | None = None, **options: Any
) -> int:
    """Make a dataset of some of the samples of another one, without encoding.

    Options are combined: only samples that meet all of them are taken. Annotations, classes and ledger rows are copied,
    and the new dataset records which dataset, generation and selection it was made from. After a kill or an
    interruption, run the command again with the same arguments to resume it.

    Args:
        dataset (DIR): Folder of the dataset.
        out (OUT): Folder of the new dataset; also s3:// and gs://.
        share (SHARE): Share of the samples, such as 0.05.
        by (COLUMN): --share takes all samples with the same value or none; parent: the file that they were cut from;
            key: single samples.
        stratify (COLUMN): --share keeps the proportions of its values.
        per_class (N): At most N samples of each class.
        seed (N): Seed of --share and --per-class.
        where (SQL): Condition, as for `fastvid.open`.
        split (NAME): Split, such as train or split2:test.
        keys_file (FILE): A file with one key per line; - is stdin.
        generation (N): Take them from this generation (default: current).
    """
    selection = Selection(keys=None if keys_file is None else read_lines(keys_file, "keys"), **options)
    print(_made(make_subset(dataset, out, selection, generation=generation)))
    return 0


def merge(*datasets: str, out: str, prefix: str | None = None) -> int:
    """Make one dataset of several, without encoding.

    Classes are united by name, columns by name, and shards may have different profiles; streams must be the same.
    Shards are hard-linked on a local disk and copied otherwise; tars whose keys (--prefix) or label numbers change are
    packed again with the same videos. After a kill or an interruption, run the command again with the same arguments to
    resume it.

    Args:
        datasets (DIR): Folders of the datasets.
        out (OUT): Folder of the new dataset; also s3:// and gs://.
        prefix (NAMES): One name for each dataset, prepended to its keys and sources with a slash, such as a,b; empty
            for none.
    """
    prefixes = [] if prefix is None else prefix.split(",")
    made = merge_datasets(datasets, out, prefixes=prefixes)
    print(_made(made))
    if made.generation.classes:
        print(visible(f"classes: {', '.join(made.generation.classes)}"))
    return 0


def _made(made: Made) -> str:
    shards = made.generation.shards
    return (
        f"{made.dataset}: {things(made.generation.num_samples, 'sample')} in {things(len(shards), 'shard')},"
        f" {size(sum(shard.bytes for shard in shards))}; {made.linked} of the shards are linked or copied whole"
    )


def compact(dataset: str, *, annotations: bool = False) -> int:
    """Rewrite the shards that contain removed samples, without those samples.

    The other samples keep their streams and order; labels and other annotations in rewritten tars are the current ones.
    With --annotations, the tars that contain others, as after `fastvid relabel` or `split`, are rewritten too. The new
    shards have new names, and a new generation refers to them; the old ones stay, for jobs that use an older
    generation, until `fastvid gc` deletes them.

    Args:
        dataset (DIR): Folder of the dataset.
        annotations: Rewrite also tars whose labels, captions or other annotations changed.
    """
    done = compact_shards(open_storage(dataset), annotations=annotations)
    if not done.rewritten:
        other = " or outdated annotations" if annotations else ""
        print(f"generation {done.generation}: no shard contains removed samples{other}")
        return 0
    for old, new in done.rewritten.items():
        print(f"{old} -> {new or 'no shard: it has no samples left'}")
    print(
        f"generation {done.generation}: dropped {things(done.samples, 'removed sample')},"
        f" {size(abs(done.bytes))} {'less' if done.bytes >= 0 else 'more'};"
        " the old shards stay until `fastvid gc`"
    )
    return 0


@forwards(export_samples)
def export(dataset: str, *, to: str, out: str, **options: Any) -> int:
    """Write samples with their current labels, captions and splits, for tools without fastvid.

    Nothing is re-encoded. OUT has a folder for each split, or the folder data without splits; classes.txt has a class
    name per line. OUT must be empty; export.json is written last, so a folder without it is incomplete.

    Layouts: wds are WebDataset tars. energon are the same tars with the records of Megatron Energon, for
    `energon prepare OUT --tar-index-only`. hf are video files with a metadata.parquet in each folder, for
    `datasets.load_dataset("videofolder", data_dir=OUT)`. lerobot is a LeRobot dataset, version 3.0, of a dataset that
    was made of one.

    Args:
        dataset (DIR): Folder of the dataset.
        to ({LAYOUTS}): Layout of the files.
        out (OUT): Empty or new folder, or s3:// or gs:// URL.
        split (NAME): Only this split; COLUMN:NAME for another split column.
        where (SQL): Only samples that match.
    """
    done = export_samples(dataset, out, to=to, **options)
    for folder, samples in done.samples.items():
        print(f"{folder}: {things(samples, 'sample')}")
    print(f"{things(len(done.files), _KINDS.get(to, 'tar'))}, {size(done.bytes)}, in {out}")
    return 0


def log(dataset: str, *, json: bool = False) -> int:
    """List the generations of a dataset, newest first: when each was made, what was done and why.

    A change of a dataset never alters what readers opened: it makes a new generation. `fastvid gc` deletes old ones.

    Args:
        dataset (DIR): Folder of the dataset.
        json: Print a JSON list.
    """
    entries = list_generations(open_storage(dataset))
    print(json_text(entries, indent=1) if json else "\n".join(map(_entry, entries)))
    return 0


def _entry(entry: Mapping[str, Any]) -> str:
    lines = [f"generation {entry['number']}  {entry['time'] or 'time not recorded'}  {visible(entry['note'])}"]
    if entry["reason"]:
        lines.append(f"    {visible(entry['reason'])}")
    samples = "" if entry["samples"] is None else things(entry["samples"], "sample")
    hidden = f", {count(entry['removed'])} removed and hidden" if entry["removed"] else ""
    kept = f"{things(entry['shards'], 'shard')}, {size(entry['bytes'])}"
    lines.append(f"    {samples}{hidden}{' in ' if samples else ''}{kept}")
    return "\n".join(lines)


def gc(dataset: str, *, keep_generations: int = 1, keep: list[int] = (), yes: bool = False) -> int:  # type: ignore[assignment]
    """Delete old generations and the shards that only they refer to.

    Without --yes, only list what would be deleted. Jobs that use a deleted generation can no longer read it. Files
    whose names are not fastvid's are never deleted.

    Args:
        dataset (DIR): Folder of the dataset.
        keep_generations (N): Newest generations to keep.
        keep (N): Numbers of other generations to keep, as in `fastvid log`.
        yes: Delete; without it, only show what would be deleted.
    """
    act = collect_garbage if yes else find_garbage
    print(_garbage(act(open_storage(dataset), keep_generations=keep_generations, keep=keep), deleted=yes))
    return 0


def _garbage(garbage: Garbage, *, deleted: bool) -> str:
    kept = f"generations kept: {', '.join(map(str, garbage.kept))}"
    if not garbage.files:
        return f"{kept}\nnothing to delete"
    lines = [f"{size(file.size):>8}  {name}" for name, file in garbage.files.items()]
    lines.append(kept)
    if garbage.dropped:
        lines.append(f"generations {'deleted' if deleted else 'to delete'}: {', '.join(map(str, garbage.dropped))}")
    verb = "deleted" if deleted else "to delete; --yes deletes them"
    lines.append(f"{things(len(garbage.files), 'file')}, {size(garbage.bytes)} {verb}")
    return "\n".join(lines)
