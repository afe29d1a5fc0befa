"""Remove samples from a dataset at once, without rewriting shards; with --reason, take their sources down.

This writes a new generation; readers that open the dataset afterwards do not see the samples. Their bytes stay in the
tars, and in earlier generations, until `fastvid compact DIR` and `fastvid gc DIR --yes`. If a name or key is unknown,
nothing is removed and the command fails.

With --reason, everything goes that was made of the same files: all segments and clips of the selected sources, and all
copies with equal bytes. Their SHA-256 are blocked, so no job packs them again; the ledger forgets their names; a
receipt in DIR/removals says what was removed, by hash. After compact and gc,
`fastvid verify DIR --receipt FILE --name NAME` searches all files for what should be gone.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fastvid.errors import UsageError
from fastvid.runtime.values import count, size, things
from fastvid.sharding.change.edit import remove_samples
from fastvid.sharding.change.receipts import HIDDEN, receipt_file
from fastvid.sharding.change.takedown import SourceSelection, TakenDown, select_keys, take_down
from fastvid.storage import open_storage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid remove``."""
    parser.add_argument("dataset", metavar="DIR", help="folder of the dataset")
    parser.add_argument("--keys", nargs="+", default=[], metavar="KEY", help="keys of samples")
    parser.add_argument("--keys-file", metavar="FILE", help="a file with one key per line; - is stdin")
    parser.add_argument(
        "--source", action="append", default=[], metavar="NAME", help="name or path of a source; may be repeated"
    )
    parser.add_argument("--sources-file", metavar="FILE", help="a file with one source per line; - is stdin")
    parser.add_argument("--where", metavar="SQL", help="samples for which a condition holds, such as \"class = 'x'\"")
    parser.add_argument(
        "--sha256", action="append", default=[], metavar="HEX", help="SHA-256 of a source file; may be repeated"
    )
    parser.add_argument(
        "--reason", metavar="TEXT", help="take the sources down for this reason; recorded, so without their names"
    )


def run(args: argparse.Namespace) -> int:
    """Remove the samples and print the changes."""
    storage = open_storage(args.dataset)
    selection = SourceSelection(
        sources=[*args.source, *read_lines(args.sources_file, "sources")],
        keys=[*args.keys, *read_lines(args.keys_file, "keys")],
        where=args.where,
        hashes=[text.lower() for text in args.sha256],
    )
    if args.reason is not None:
        print(_taken_down(args.dataset, take_down(storage, selection, reason=args.reason)))
        return 0
    done = remove_samples(storage, select_keys(storage, selection))
    before = f", {count(done.already)} already removed" if done.already else ""
    print(f"generation {done.generation}: {things(done.removed, 'sample')} removed{before}")
    return 0


def _taken_down(dataset: str, done: TakenDown) -> str:
    receipt = done.receipt
    file = f"{dataset.rstrip('/')}/{receipt_file(receipt.number)}"
    lines = [
        f"generation {done.generation}: {things(receipt.samples, 'sample')} removed, {size(receipt.stored_bytes)},"
        f" of {things(done.named, 'named source')} and {count(done.copies)} with equal bytes",
        f"{count(len(receipt.hashes))} SHA-256 blocked: no job packs these files again",
    ]
    if receipt.unknown:
        lines.append(
            f"{things(receipt.unknown, 'source')} of unknown SHA-256, not blocked: block the files with --sha256"
        )
    lines.append(f"receipt {file}: {HIDDEN}")
    lines.append(f"to finish: fastvid compact {dataset} && fastvid gc {dataset} --yes")
    lines.append(f"to check:  fastvid verify {dataset} --receipt {file} --name NAME")
    return "\n".join(lines)


def read_lines(name: str | None, what: str) -> list[str]:
    """Return the lines of a file of keys or sources, or of stdin for ``-``; an empty list without one."""
    if name is None:
        return []
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{what} cannot be read: {error}", file=name) from error
    return [line.strip() for line in text.splitlines() if line.strip()]
