"""How near an encoded sample is to its source, scaled as the profile scales it: ffmpeg's SSIM and PSNR."""

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
from fastvid.media.probe import SourceInfo, open_source, probe
from fastvid.media.reasons import Reason
from fastvid.sharding.encode.profile import Profile
from fastvid.sharding.encode.profiles import SWS_FLAGS, input_options, picture_filters

_SSIM: Final = re.compile(r"SSIM .*All:(\d\.\d+)")
_PSNR: Final = re.compile(r"PSNR .*average:(\d+\.\d+|inf)")
# Equal pictures have no noise; a number that can be averaged stands for it.
_MOST_PSNR: Final = 100.0


def compare(build: FfmpegBuild, profile: Profile, path: str, encoded: bytes, limits: Limits) -> tuple[float, float]:
    """SSIM (1 is equal) and PSNR in dB over all planes and frames of a sample that holds the whole source.

    Raises:
        SourceError: ffmpeg fails, or takes too long.
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
            raise SourceError(f"ffmpeg compares for longer than {seconds:.0f} s", reason=Reason.TIMEOUT) from error
    said = done.stderr.decode("utf-8", "replace")
    ssim, psnr = _SSIM.search(said), _PSNR.search(said)
    if done.returncode or ssim is None or psnr is None:
        raise SourceError(f"ffmpeg does not compare: {said.strip()[-200:]}", reason=Reason.ENCODE_FAILED, file=path)
    return float(ssim[1]), min(_MOST_PSNR, float(psnr[1])) if psnr[1] != "inf" else _MOST_PSNR


def build_comparison(
    build: FfmpegBuild, profile: Profile, info: SourceInfo, source_url: str, encoded_url: str, limits: Limits
) -> list[str]:
    """The ffmpeg command that prints SSIM and PSNR of an encoded source against what went into the encoder."""
    source = ffmpeg.input(source_url, **input_options(info, limits))
    # The filters of every profile end in limited range but those of full-range codecs, which are brought back here.
    wanted = picture_filters(build, replace(profile, codec="h264", crf=0), info, source["V:0"])
    encoded = ffmpeg.input(encoded_url, f="mov", protocol_whitelist="file", threads=1)["v:0"]
    if profile.full_range:
        encoded = encoded.filter("scale", flags=SWS_FLAGS, in_range="full", out_range="limited").filter(
            "format", "yuv420p"
        )
    # Frame by frame, whatever the clocks say.
    pairs = [stream.filter("settb", "1/1000").filter("setpts", "N").split() for stream in (encoded, wanted)]
    scores = [ffmpeg.filter([pairs[0][n], pairs[1][n]], name) for n, name in enumerate(("ssim", "psnr"))]
    command: list[str] = ffmpeg.merge_outputs(*(ffmpeg.output(score, "-", f="null") for score in scores)).get_args()
    return [build.path, "-nostdin", "-hide_banner", "-nostats", "-loglevel", "info", *command]


def mean(values: list[float]) -> float:
    """Their mean; not a number of none."""
    return sum(values) / len(values) if values else math.nan
