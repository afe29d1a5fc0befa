"""Datasets of equal quality: x264's defaults, as people have their videos today, and profiles whose CRF is chosen so
that their mean SSIM against the scaled source is the same within 0.005.
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

from bench.common.corpus import shard
from fastvid.errors import UsageError
from fastvid.measure.clips import Corpus
from fastvid.media.ffmpeg import find_ffmpeg
from fastvid.media.limits import Limits
from fastvid.media.probe import open_source, probe
from fastvid.runtime.cores import available_cores
from fastvid.sharding.encode.profile import Profile
from fastvid.sharding.encode.profiles import PROFILES, input_options, picture_filters
from fastvid.tune.quality import compare, mean

TOLERANCE: Final = 0.005
"""SSIM within which encodings count as equally good."""
DEFAULT: Final = "default"
"""The encoding that people have: x264's defaults, 250 frames from key frame to key frame at most."""

_CRF: Final = (10, 36)
_DEFAULT_CRF: Final = 23  # x264's own
_ANY: Final = "tsn1"  # a corpus has a sampling; here only its MP4s are read
# Videos that the CRF is searched on; all are measured in the end.
_JUDGED: Final = 12


@dataclass(frozen=True, slots=True)
class Encoding:
    """A dataset of one encoding.

    Attributes:
        name: "default", or the profile.
        folder: The dataset.
        crf: Its quality setting.
        ssim: Of each video, by its key.
    """

    name: str
    folder: Path
    crf: int
    ssim: Mapping[str, float]

    @property
    def mean_ssim(self) -> float:
        """Over all videos."""
        return mean(list(self.ssim.values()))

    def as_row(self) -> dict[str, Any]:
        """For a JSON record."""
        return {"name": self.name, "crf": self.crf, "ssim": round(self.mean_ssim, 4), "ssim_videos": len(self.ssim)}


def equal_quality(footage: Path, profiles: Sequence[str], cache: Path) -> list[Encoding]:
    """The default encoding of `footage`, and profiles as good as it.

    Raises:
        UsageError: A profile does not come near the default's SSIM with any CRF; two videos have one name.
    """
    sources = videos(footage)
    default = default_dataset(footage, cache)
    found = [Encoding(DEFAULT, default, _DEFAULT_CRF, ssim(default, sources))]
    target = found[0].mean_ssim
    # A few videos of the footage stand for all, by what the default encoding makes of them.
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
                f"profile {profile} has SSIM {found[-1].mean_ssim:.4f} at its best CRF {crf}, wanted is {target:.4f}"
            )
    return found


def search(ssim_of: Callable[[int], float], target: float) -> int:
    """The CRF whose SSIM is nearest to the target; SSIM falls as CRF rises."""
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
    """The files of a folder by the keys that samples of them have.

    Args:
        footage: The folder.
        pattern: Of their names.

    Raises:
        UsageError: Two have the same key.
    """
    files = sorted(path for path in footage.glob(pattern) if path.is_file())
    found = {path.stem: path for path in files}
    if len(found) < len(files):
        raise UsageError("two videos have the same name but for its end", file=footage)
    return found


def default_dataset(footage: Path, cache: Path) -> Path:
    """The videos as x264's defaults encode them, scaled and cropped as the profiles do it, not encoded again."""
    files = cache / "default-files"
    files.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(available_cores()) as pool:
        list(pool.map(lambda item: _encode(item[1], files / f"{item[0]}.mp4"), videos(footage).items()))
    return shard(files, "copy", cache, name=DEFAULT)


def ssim(folder: Path, sources: Mapping[str, Path], *, most: int | None = None) -> dict[str, float]:
    """SSIM of samples of a dataset against their sources, scaled as its profile scales them, by key.

    Args:
        folder: The dataset. What was measured lies beside it, and is not measured again.
        sources: The videos by key, see `videos`.
        most: How many samples, spread over the dataset; None for all.
    """
    corpus = Corpus(str(folder), _ANY)
    facts = {"dataset_id": json.loads((folder / "dataset.json").read_text())["dataset_id"], "most": most}
    known = folder.with_name(f"{folder.name}.ssim.json")
    if known.exists():
        record = json.loads(known.read_text())
        if all(record[name] == value for name, value in facts.items()):
            return dict(record["ssim"])
    profile = Profile(**dict(corpus.dataset.generation.shards[0].profile))
    if profile.copies:  # of what the profiles' filters made, see `default_dataset`
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
        stream = ffmpeg.input(opened.url, **input_options(info, limits))
        picture = picture_filters(build, PROFILES["compact"], info, stream["V:0"])
        options: dict[str, Any] = {"c:v": "libx264", "crf": _DEFAULT_CRF, "threads": 1, "pix_fmt": "yuv420p"}
        part = target.with_suffix(".part")
        arguments = ffmpeg.output(picture, f"file:{part}", f="mp4", **options).get_args()
        command = [build.path, "-nostdin", "-v", "error", "-y", *arguments]
        subprocess.run(command, pass_fds=(opened.descriptor,), check=True)
        part.rename(target)


def _dataset(footage: Path, profile: str, crf: int, cache: Path) -> Path:
    return shard(footage, profile, cache, options=("--crf", str(crf)), name=f"{profile}-crf{crf}")
