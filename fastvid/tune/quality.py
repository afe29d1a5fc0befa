"""SSIM and PSNR of an encoded sample against its equally scaled source, by ffmpeg."""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from dataclasses import replace
from typing import Final

import ffmpeg

from fastvid.errors import SourceError
from fastvid.media.ffmpeg import FfmpegBuild, environment
from fastvid.media.limits import Limits
from fastvid.media.probe import SourceInfo, probe
from fastvid.media.reasons import Reason
from fastvid.media.source_file import open_source
from fastvid.sharding.encode.profile import Profile
from fastvid.sharding.encode.profiles import SWS_FLAGS, input_options, picture_filters

_SSIM: Final = re.compile(r"SSIM .*All:(\d\.\d+)")
_PSNR: Final = re.compile(r"PSNR .*average:(\d+\.\d+|inf)")
# Equal pictures have infinite PSNR; this finite value replaces it in means.
_MAX_PSNR: Final = 100.0


def compare(build: FfmpegBuild, profile: Profile, path: str, encoded: bytes, limits: Limits) -> tuple[float, float]:
    """Return SSIM (1 is equal) and PSNR in dB over all planes and frames.

    The sample must cover the whole source.
    """
    with open_source(path) as source, tempfile.TemporaryFile(prefix="fastvid-") as file:
        info = probe(source, limits)
        file.write(encoded)
        file.flush()
        url = f"file:/dev/fd/{file.fileno()}"
        seconds = 2 * limits.transcode_seconds(frames=info.timing.shown, pixels=info.width * info.height)
        try:
            done = subprocess.run(
                build_comparison(build, profile, info, source.url, url, limits),
                pass_fds=(source.descriptor, file.fileno()),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=seconds,
                env=environment(),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise SourceError(f"ffmpeg's comparison took longer than {seconds:.0f} s", reason=Reason.TIMEOUT) from error
    log = done.stderr.decode("utf-8", "replace")
    ssim, psnr = _SSIM.search(log), _PSNR.search(log)
    if done.returncode or ssim is None or psnr is None:
        raise SourceError(f"ffmpeg's comparison failed: {log.strip()[-200:]}", reason=Reason.ENCODE_FAILED, file=path)
    return float(ssim[1]), min(_MAX_PSNR, float(psnr[1])) if psnr[1] != "inf" else _MAX_PSNR


def build_comparison(
    build: FfmpegBuild, profile: Profile, info: SourceInfo, source_url: str, encoded_url: str, limits: Limits
) -> list[str]:
    """Return the ffmpeg command that prints SSIM and PSNR of an encoded source against its input."""
    source = ffmpeg.input(source_url, **input_options(info, limits))
    # Compare in limited range: all profiles but those of full-range codecs write it, and those are converted below.
    reference = picture_filters(build, replace(profile, codec="h264", crf=0), info, source["V:0"])
    encoded = ffmpeg.input(encoded_url, f="mov", protocol_whitelist="file", threads=1)["v:0"]
    if profile.full_range:
        encoded = encoded.filter("scale", flags=SWS_FLAGS, in_range="full", out_range="limited").filter(
            "format", "yuv420p"
        )
    # Pair frames by number, not by timestamp.
    pairs = [stream.filter("settb", "1/1000").filter("setpts", "N").split() for stream in (encoded, reference)]
    scores = [ffmpeg.filter([pairs[0][n], pairs[1][n]], name) for n, name in enumerate(("ssim", "psnr"))]
    command: list[str] = ffmpeg.merge_outputs(*(ffmpeg.output(score, "-", f="null") for score in scores)).get_args()
    return [build.path, "-nostdin", "-hide_banner", "-nostats", "-loglevel", "info", *command]


def mean(values: list[float]) -> float:
    """Return the mean of the values, NaN if there are none."""
    return sum(values) / len(values) if values else math.nan
