"""Write samples with their current labels, captions and splits, for tools without fastvid.

Nothing is re-encoded. OUT has a folder for each split, or the folder data without splits; classes.txt has a class name
per line. OUT must be empty; export.json is written last, so a folder without it is incomplete.

Layouts: wds are WebDataset tars. energon are the same tars with the records of Megatron Energon, for
`energon prepare OUT --tar-index-only`. hf are video files with a metadata.parquet in each folder, for
`datasets.load_dataset("videofolder", data_dir=OUT)`. lerobot is a LeRobot dataset, version 3.0, of a dataset that was
made of one.
"""

from __future__ import annotations

import argparse
from typing import Final

from fastvid.runtime.values import size, things
from fastvid.sharding.change.export import LAYOUTS, export_samples

_KINDS: Final = {"hf": "video", "lerobot": "file"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid export``."""
    parser.add_argument("dataset", metavar="DIR", help="folder of the dataset")
    parser.add_argument("--to", choices=LAYOUTS, required=True, help="layout of the files")
    parser.add_argument("--out", metavar="OUT", required=True, help="empty or new folder, or s3:// or gs:// URL")
    parser.add_argument("--split", metavar="NAME", help="only this split; COLUMN:NAME for another split column")
    parser.add_argument("--where", metavar="SQL", help="only samples that match")


def run(args: argparse.Namespace) -> int:
    """Export the samples and print what was written."""
    done = export_samples(args.dataset, args.out, to=args.to, split=args.split, where=args.where)
    for folder, samples in done.samples.items():
        print(f"{folder}: {things(samples, 'sample')}")
    print(f"{things(len(done.files), _KINDS.get(args.to, 'tar'))}, {size(done.bytes)}, in {args.out}")
    return 0
