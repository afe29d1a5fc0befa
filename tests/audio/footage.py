"""Videos with painted frame numbers and a track of clicks: a click marks the start of some frames, to the sample."""

import subprocess
from pathlib import Path

import numpy as np

from fastvid.decode.sound import AudioClip
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.job.job import run_job
from fastvid.videos.dataset import VideoDataset
from fastvid.videos.dataset import open as open_dataset
from tests.makers import arguments, ffmpeg, paint

FPS = 25
FRAMES = 150
CLICKS = np.cumsum(np.random.default_rng(5).integers(5, 12, 16)) + 2
"""Frames with a click at their start; the distances differ, so that a shift by any number of frames is noticed."""
TRACKS = {f"{codec}-{rate}": (codec, rate) for codec in ("aac", "alac") for rate in (44_100, 48_000)}
"""Codec and rate of each track, by key."""


def click_track(rate: int, channels: int = 2) -> np.ndarray:
    """Return clicks of one sample each over quiet noise, float32 [N, C]; the second channel is half as loud."""
    sound = np.random.default_rng(rate).normal(0, 0.01, (FRAMES * rate // FPS, channels))
    sound[CLICKS * rate // FPS] = 0.8 / 2.0 ** np.arange(channels)
    return sound.astype(np.float32)


def write_video(path: Path, sound: np.ndarray | None, rate: int, *options: str, frames: int = FRAMES) -> Path:
    """Write painted frames with sound, float32 [N, C], encoded by ffmpeg's `options`."""
    wav = path.with_suffix(".f32")
    command = [ffmpeg(), "-v", "error", "-f", "rawvideo", "-pix_fmt", "yuv420p", "-s", "160x96", "-r", str(FPS)]
    command += ["-i", "-"]
    if sound is not None:
        wav.write_bytes(sound.astype("<f4").tobytes())
        command += ["-f", "f32le", "-ar", str(rate), "-ac", str(sound.shape[1]), "-i", str(wav)]
    raw = b"".join(plane.tobytes() for planes in zip(*paint(frames, (96, 160)), strict=True) for plane in planes)
    subprocess.run([*command, *arguments("compact"), *options, "-y", str(path)], input=raw, check=True)
    wav.unlink(missing_ok=True)
    return path


def write_tracks(folder: Path) -> Path:
    """Write a video with clicks for each of `TRACKS`."""
    folder.mkdir()
    for key, (codec, rate) in TRACKS.items():
        # Without noise substitution, which differs between windows, and at a rate that does not move a click's peak.
        options = ["-c:a", codec, *(["-b:a", "256k", "-aac_pns", "0"] if codec == "aac" else [])]
        write_video(folder / f"{key}.mov", click_track(rate), rate, *options)
    return folder


def shard(sources: Path, out: Path, audio: str, max_seconds: float = 60.0) -> VideoDataset:
    """Return the dataset made of a folder of videos, in parts of at most `max_seconds`."""
    profile = PROFILES["compact"].changed(short_side=96)
    run_job(str(sources), out, profile=profile, audio=audio, max_seconds=max_seconds, workers=1)
    return open_dataset(str(out))


def clicks_off(clip: AudioClip, first_frame: int, skip: float = 0.0) -> int:
    """Return by how many samples the clicks of a clip are off at most."""
    loud, worst = np.abs(clip.data[0]), 0
    per_frame = clip.rate / FPS
    for click in CLICKS:
        at = round((int(click) - first_frame) * per_frame)
        if skip * clip.rate <= at < len(loud):
            low = max(0, at - 2 * int(per_frame))
            worst = max(worst, abs(low + int(np.argmax(loud[low : at + 2 * int(per_frame)])) - at))
    return worst


def mean_click_off(clip: AudioClip, first_frame: int) -> int:
    """Return by how many samples the mean click of a clip is off: encoding twice may move a single peak."""
    loud, per_frame = np.abs(clip.data[0]), clip.rate / FPS
    reach = 2 * int(per_frame)
    places = [round((int(click) - first_frame) * per_frame) for click in CLICKS]
    inside = [at for at in places if reach <= at < len(loud) - reach]
    return int(np.argmax(sum(loud[at - reach : at + reach] for at in inside))) - reach
