"""Tests an installation with one tiny video: shards, opens, plans and decodes it, and reports the step that fails.

Checking versions would not be enough: a library that can be imported may lack a function that sharding needs.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from fastvid.decode.backends import Backend
from fastvid.decode.parity import SampleClip
from fastvid.errors import DecodeError, FastvidError, FormatError, JobError
from fastvid.format.dataset import Dataset
from fastvid.format.schema import LEDGER, Codec
from fastvid.media.reasons import Reason
from fastvid.storage import open_storage

_PROFILE: Final = "compact"
_FRAMES: Final = 40  # more than one GOP
_WIDTH, _HEIGHT = 336, 256  # a size that the profile does not scale
# The video shows a wave with one period per picture width. It moves by this many pixels per frame, which changes a
# pixel by at most nine levels.
_SHIFT: Final = 8
# Largest allowed mean error of a frame in levels: encoding causes one level, a wrong range or matrix eight.
_MOST_OFF: Final = 4.0

_FFMPEG_HINT: Final = "name another ffmpeg in FASTVID_FFMPEG, or `pip install --upgrade imageio-ffmpeg`"
_PYAV_HINT: Final = "install another version of PyAV, for example by `pip install --upgrade av`"

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class SelfTestStep:
    """The result of one step."""

    name: str
    seconds: float
    found: str = ""
    problem: str | None = None
    hint: str | None = None


def self_test(decoders: Iterable[Backend]) -> Iterator[SelfTestStep]:
    """Shard a tiny video with the default profile and decode it; stop if a step fails that later steps need."""
    with tempfile.TemporaryDirectory(prefix="fastvid-self-test-") as name:
        folder = Path(name)
        step, dataset = _try("shard", lambda: _shard(folder))
        yield step
        if dataset is None:
            return
        step, clip = _try("plan", lambda: _plan(dataset))
        yield step
        if clip is None:
            return
        for one in decoders:
            if Codec.H264 in one.codecs:
                yield _try(f"decode {one.name}", partial(_decode, clip, one))[0]


def _try(name: str, work: Callable[[], tuple[str, _T]]) -> tuple[SelfTestStep, _T | None]:
    begun = time.perf_counter()
    try:
        found, result = work()
    except FastvidError as error:
        return SelfTestStep(name, time.perf_counter() - begun, problem=error.message, hint=error.hint), None
    except Exception as error:  # noqa: BLE001 - whatever a library raises is the problem to report
        return SelfTestStep(name, time.perf_counter() - begun, problem=f"{type(error).__name__}: {error}"), None
    return SelfTestStep(name, time.perf_counter() - begun, found), result


def _shard(folder: Path) -> tuple[str, Dataset]:
    """Run a job as ``fastvid shard`` does."""
    from fastvid.sharding.job.job import run_job  # imported here, because importing PyAV may be what fails

    source, out = folder / "wave.y4m", folder / "shards"
    source.write_bytes(_video())
    log = logging.getLogger("fastvid")
    level = log.level
    log.setLevel(logging.CRITICAL)  # the step of the self-test reports what is wrong
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            run_job(source, out, profile=_PROFILE, workers=1)
    except JobError as error:
        raise _why(str(out)) or error from error
    finally:
        log.setLevel(level)
    dataset = Dataset(str(out))
    size = dataset.generation.shards[0].bytes
    return f"{_FRAMES} frames probed, encoded by profile {_PROFILE}, verified and packed: {size} bytes", dataset


def _why(out: str) -> JobError | None:
    """Return the error that the ledger of a failed job has for its only source; None if it has none."""
    from fastvid.sharding.job.ledger import read_ledger

    storage = open_storage(out)
    if not storage.exists(LEDGER):
        return None
    (row,) = read_ledger(storage)[0].to_pylist()
    phase = re.search(r"in phase (\w+)", row["message"] or "")
    blamed = _PYAV_HINT if row["reason"] == Reason.CRASHED and phase and phase[1] != "encode" else _FFMPEG_HINT
    return JobError(f"{row['reason']}: {row['message']}", hint=blamed)


def _plan(dataset: Dataset) -> tuple[str, SampleClip]:
    shard = dataset.shard(0)
    start, size = shard.member(0)
    video = bytes(dataset.storage.map(shard.data)[start : start + size])
    clip = SampleClip("self-test", video, (shard.info(0), shard.table(0)))
    if clip.info.num_frames != _FRAMES:
        raise FormatError(f"the sample has {clip.info.num_frames} frames, {_FRAMES} were encoded")
    packets = len(clip.table.plan(clip.frames).packets)
    return f"{len(clip.frames)} frames need {packets} of {_FRAMES} packets", clip


def _decode(clip: SampleClip, one: Backend) -> tuple[str, None]:
    decoder = one.open()
    try:
        pictures = clip.decode(decoder, one.device, clip.frames)
    finally:
        decoder.close()
    # The wave is grey and the same in every row.
    rows = pictures.astype(np.float64).mean(axis=(0, 2))
    wanted = (_wave() - 16) * (255 / 219)  # limited range
    off = np.abs(rows[:, None] - wanted).mean(axis=2)
    given = off.argmin(axis=1)
    if (given != clip.frames).any():
        raise DecodeError(f"requested frames {clip.frames.tolist()}, decoded frames that look like {given.tolist()}")
    worst = float(off.min(axis=1).max())
    if worst > _MOST_OFF:
        raise DecodeError(f"colours differ by {worst:.1f} of 255 levels, at most {_MOST_OFF:.0f} are allowed")
    return f"the {len(given)} requested frames, with an error of {worst:.1f} of 255 levels", None


def _wave() -> npt.NDArray[np.float64]:
    """Return the luma of a row of each frame, float64 [N, W], limited range."""
    moved = np.arange(_WIDTH) - _SHIFT * np.arange(_FRAMES)[:, None]
    wave: npt.NDArray[np.float64] = np.rint(126 + 100 * np.sin(2 * np.pi * moved / _WIDTH))
    return wave


def _video() -> bytes:
    """Return the wave as a YUV4MPEG2 file, which needs no encoder."""
    grey = bytes([128]) * (_WIDTH * _HEIGHT // 2)
    rows = _wave().astype(np.uint8)
    frames = (b"FRAME\n" + row.tobytes() * _HEIGHT + grey for row in rows)
    return f"YUV4MPEG2 W{_WIDTH} H{_HEIGHT} F25:1 Ip A1:1 C420mpeg2\n".encode() + b"".join(frames)
