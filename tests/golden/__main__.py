"""Record the golden digests again, and print which changed.

python -m tests.golden [FILE ...] [--dry-run]

Digests that depend on a build of ffmpeg are stored beside those of other builds.
"""

import argparse
import logging
import sys
import tempfile
from pathlib import Path

from tests.golden import golden, orders, pictures, runs, seams, shards, states

AREAS = {area.NAME: area for area in (orders, pictures, states, runs, shards)}
FILES = (*AREAS, "encoded")


def measure(cases):
    """Measure every case, in order."""
    return {name: case() for name, case in cases.items()}


def measured(file, folder, before):
    """Return the current contents of a file of digests."""
    if file in AREAS:
        return measure(AREAS[file].cases(folder)) | ({"kernels": runs.kernels()} if file == runs.NAME else {})
    after = dict(before)
    for profile, digests in measure(shards.encoded(folder)).items():
        build, name = seams.encoder(profile)
        after[build] = {**after.get(build, {}), "build": name, profile: digests}
    return after


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help=", ".join(FILES))
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    args = parser.parse_args()
    unknown = set(args.files) - set(FILES)
    if unknown:
        parser.error(f"unknown files: {', '.join(sorted(unknown))}")
    logging.disable(logging.INFO)
    total = 0
    for file in args.files or FILES:
        before = golden.read(file) if (golden.FOLDER / f"{file}.json").exists() else {}
        with tempfile.TemporaryDirectory(prefix="golden-") as folder:
            after = measured(file, Path(folder), before)
        changed = sorted(name for name in before | after if before.get(name) != after.get(name))
        total += len(changed)
        print(f"{file}: {len(changed)} changed", *changed, sep="\n  ", flush=True)
        if changed and not args.dry_run:
            golden.write(file, after)
    return 1 if args.dry_run and total else 0


if __name__ == "__main__":
    sys.exit(main())
