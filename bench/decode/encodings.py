"""Make datasets of equal quality: one with x264's defaults, today's usual encoding, and one per profile.

Each profile's CRF is chosen so that its mean SSIM against the scaled source equals the default's within 0.005.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ffmpeg

from bench.common.footage import shard
from fastvid.errors import UsageError
from fastvid.media.ffmpeg import Limits, find_ffmpeg
from fastvid.media.probe import open_source, probe
from fastvid.runtime.processes import available_cores
from fastvid.sharding.encode.profiles import PROFILES, Profile, input_options, picture_filters
from fastvid.tune.measure import Corpus
from fastvid.tune.study import compare, mean

TOLERANCE: Final = 0.005
"""Largest SSIM difference between encodings of equal quality."""
DEFAULT: Final = "default"
"""Today's usual encoding: x264's defaults, with at most 250 frames between key frames."""

_CRF: Final = (10, 36)
_DEFAULT_CRF: Final = 23  # x264's own
_ANY: Final = "tsn1"  # a corpus needs a sampling, but only its MP4s are used here
# Number of videos for the CRF search; the final SSIM is measured on all videos.
_JUDGED: Final = 12


@dataclass(frozen=True, slots=True)
class Encoding:
    """A dataset of one encoding."""

    name: str
    folder: Path
    crf: int
    ssim: Mapping[str, float]

    @property
    def mean_ssim(self) -> float:
        """Mean SSIM over all videos."""
        return mean(list(self.ssim.values()))

    def as_row(self) -> dict[str, Any]:
        """Return the encoding as a JSON record."""
        return {"name": self.name, "crf": self.crf, "ssim": round(self.mean_ssim, 4), "ssim_videos": len(self.ssim)}


def equal_quality(footage: Path, profiles: Sequence[str], cache: Path) -> list[Encoding]:
    """Return the default encoding of `footage`, followed by the profiles at the same SSIM."""
    sources = videos(footage)
    default = default_dataset(footage, cache)
    found = [Encoding(DEFAULT, default, _DEFAULT_CRF, ssim(default, sources))]
    target = found[0].mean_ssim
    # The CRF is searched on a few videos only.
    few = sorted(found[0].ssim)[:: max(1, len(found[0].ssim) // _JUDGED)][:_JUDGED]
    judged = cache / "judged"
    judged.mkdir(parents=True, exist_ok=True)
    for key in few:
        if not (judged / sources[key].name).exists():
            shutil.copyfile(sources[key], judged / sources[key].name)
    few_target = mean([found[0].ssim[key] for key in few])
    for profile in profiles:

        def of(crf: int, profile: str = profile) -> float:
            return mean(list(ssim(_dataset(judged, profile, crf, cache / "judged-shards"), sources).values()))

        crf = search(of, few_target)
        folder = _dataset(footage, profile, crf, cache)
        found.append(Encoding(profile, folder, crf, ssim(folder, sources)))
        if abs(found[-1].mean_ssim - target) > TOLERANCE:
            raise UsageError(
                f"profile {profile} has SSIM {found[-1].mean_ssim:.4f} at its best CRF {crf}, expected {target:.4f}"
            )
    return found


def search(ssim_of: Callable[[int], float], target: float) -> int:
    """Return the CRF whose SSIM is nearest to the target, by bisection; SSIM falls as CRF rises."""
    low, high = _CRF
    tried: dict[int, float] = {}
    while low <= high:
        crf = (low + high) // 2
        tried[crf] = ssim_of(crf)
        if tried[crf] >= target:
            low = crf + 1
        else:
            high = crf - 1
    return min(tried, key=lambda crf: abs(tried[crf] - target))


def videos(footage: Path, pattern: str = "*") -> dict[str, Path]:
    """Return the files of a folder by sample key."""
    files = sorted(path for path in footage.glob(pattern) if path.is_file())
    found = {path.stem: path for path in files}
    if len(found) < len(files):
        raise UsageError("two videos have the same name without its extension", file=footage)
    return found


def default_dataset(footage: Path, cache: Path) -> Path:
    """Return a dataset of the videos encoded with x264's defaults, scaled and cropped as the profiles do."""
    files = cache / "default-files"
    files.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(available_cores()) as pool:
        list(pool.map(lambda item: _encode(item[1], files / f"{item[0]}.mp4"), videos(footage).items()))
    return shard(files, "copy", cache, name=DEFAULT)


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
    if profile.copies:  # its files were made with the profiles' filters, see `default_dataset`
        profile = PROFILES["compact"]
    count = len(corpus.dataset)
    chosen = range(0, count, max(1, count // (most or count)))
    encoded = {corpus.dataset.key(sample): corpus.mp4(sample) for sample in chosen}

    def measured(key: str) -> float:
        return compare(find_ffmpeg(), profile, str(sources[key]), encoded[key], Limits())[0]

    with ThreadPoolExecutor(available_cores()) as pool:
        found = dict(zip(encoded, pool.map(measured, encoded), strict=True))
    known.write_text(json.dumps(facts | {"ssim": found}, indent=1, sort_keys=True) + "\n")
    return found


def _encode(source: Path, target: Path) -> None:
    if target.exists():
        return
    build, limits = find_ffmpeg(), Limits()
    with open_source(str(source)) as opened:
        info = probe(opened, limits)
        stream = ffmpeg.input(opened.url, **input_options(build, info, limits))
        picture = picture_filters(build, PROFILES["compact"], info, stream["V:0"])
        options: dict[str, Any] = {"c:v": "libx264", "crf": _DEFAULT_CRF, "threads": 1, "pix_fmt": "yuv420p"}
        part = target.with_suffix(".part")
        arguments = ffmpeg.output(picture, f"file:{part}", f="mp4", **options).get_args()
        command = [build.path, "-nostdin", "-v", "error", "-y", *arguments]
        subprocess.run(command, pass_fds=(opened.descriptor,), check=True)
        part.rename(target)


def _dataset(footage: Path, profile: str, crf: int, cache: Path) -> Path:
    return shard(footage, profile, cache, options=("--crf", str(crf)), name=f"{profile}-crf{crf}")
