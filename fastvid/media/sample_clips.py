"""Generate short clips of a moving pattern, one per codec, in a second or two, to compare decoders."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

from fastvid.errors import MissingDependency
from fastvid.media.colour_tags import tagged
from fastvid.media.ffmpeg import find_ffmpeg

# 256 lines, the default of profiles; 64 frames, two of their GOPs.
_SOURCE: Final = "testsrc2=s=336x256:r=25:d=2.56"
_LIMITED: Final = f"scale=out_range=limited:out_color_matrix=smpte170m,format=yuv420p,{tagged(full_range=False)}"
_FULL: Final = f"scale=out_range=full:out_color_matrix=smpte170m,format=yuvj420p,{tagged(full_range=True)}"
_X264: Final = "-c:v libx264 -threads 1 -preset veryfast -tune fastdecode -crf 23 -x264-params"
_CLIPS: Final = {
    "h264 compact": ("libx264", f"{_X264} keyint=32:min-keyint=32:scenecut=0:open-gop=0:bframes=7:b-pyramid=none"),
    "h264 intra": ("libx264", f"{_X264} keyint=1"),
    "hevc": ("libx265", "-c:v libx265 -tag:v hvc1 -x265-params log-level=none:pools=1:info=0:keyint=16:open-gop=0"),
    "vp9": ("libvpx-vp9", "-c:v libvpx-vp9 -g 12 -crf 32 -b:v 0 -cpu-used 8 -auto-alt-ref 0 -lag-in-frames 0"),
    "mjpeg": ("mjpeg", "-c:v mjpeg -q:v 3"),
}


def make_sample_clips(folder: Path) -> dict[str, bytes]:
    """Return MP4s by name, one per codec for which ffmpeg has an encoder."""
    build = find_ffmpeg()
    clips = {}
    for name, (encoder, arguments) in _CLIPS.items():
        if encoder != "mjpeg" and encoder not in build.encoders:
            continue
        path = folder / f"{name.replace(' ', '-')}.mp4"
        picture = _FULL if encoder == "mjpeg" else _LIMITED
        command = [build.path, "-v", "error", "-f", "lavfi", "-i", _SOURCE, "-vf", picture, *arguments.split()]
        command += ["-y", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise MissingDependency(f"ffmpeg failed to encode {name}: {done.stderr.strip().splitlines()[-1:]}")
        clips[name] = path.read_bytes()
    return clips
