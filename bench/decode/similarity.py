"""The similarity of a dataset's videos to their sources, which is measured once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from fastvid.errors import UsageError
from fastvid.media.ffmpeg import Limits, find_ffmpeg
from fastvid.runtime.processes import available_cores
from fastvid.sharding.encode.profiles import Profile
from fastvid.tune.measure import Corpus
from fastvid.tune.study import compare

_ANY: Final = "tsn1"  # a corpus needs a sampling, but only its MP4s are used here


def videos(footage: Path, pattern: str = "*") -> dict[str, Path]:
    """Return the files of a folder by sample key."""
    files = sorted(path for path in footage.glob(pattern) if path.is_file())
    found = {path.stem: path for path in files}
    if len(found) < len(files):
        raise UsageError("two videos have the same name without its extension", file=footage)
    return found


def ssim(folder: Path, sources: Mapping[str, Path], *, most: int | None = None) -> dict[str, float]:
    """Return the SSIM of a dataset's samples by key, against their sources scaled as its profile scales them.

    `most`: number of samples to measure, spread over the dataset; None for all.
    """
    corpus = Corpus(str(folder), _ANY)
    facts = {"dataset_id": json.loads((folder / "dataset.json").read_text())["dataset_id"], "most": most}
    known = folder.with_name(f"{folder.name}.ssim.json")
    if known.exists():
        record = json.loads(known.read_text())
        if all(record[name] == value for name, value in facts.items()):
            return dict(record["ssim"])
    profile = Profile(**dict(corpus.dataset.generation.shards[0].profile))
    count = len(corpus.dataset)
    chosen = range(0, count, max(1, count // (most or count)))
    encoded = {corpus.dataset.key(sample): corpus.mp4(sample) for sample in chosen}

    def measured(key: str) -> float:
        return compare(find_ffmpeg(), profile, str(sources[key]), encoded[key], Limits())[0]

    with ThreadPoolExecutor(available_cores()) as pool:
        found = dict(zip(encoded, pool.map(measured, encoded), strict=True))
    known.write_text(json.dumps(facts | {"ssim": found}, indent=1, sort_keys=True) + "\n")
    return found
