"""Planned decoding equals full decoding by ffmpeg bit for bit, and every planned packet is necessary."""

from __future__ import annotations

import hashlib
import subprocess

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastvid.decode.pyav import PyAvDecoder
from fastvid.decode.request import Planes
from tests.conformance.outputs import decoded, empty
from tests.makers import Video, arguments, ffmpeg

PROFILES = ("compact", "intra", "vp9")

_SCALED = "scale=-2:256:flags=bicubic,crop=trunc(iw/16)*16:256,setsar=1,format=yuv420p"


@pytest.fixture(scope="module")
def decoder():
    decoder = PyAvDecoder()
    yield decoder
    decoder.close()


def digests(out: Planes) -> list[str]:
    """Return the MD5 of each frame's planes, as computed by ffmpeg's framemd5."""
    frames = zip(out.y, out.u, out.v, strict=True)
    return [hashlib.md5(b"".join(np.ascontiguousarray(p).tobytes() for p in planes)).hexdigest() for planes in frames]


@pytest.mark.parametrize("encoding", [*PROFILES, "pyramid", "hevc", "av1", "av1-layers"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_planned_frames_of_profiles_match_ffmpeg(decoder, videos, encoding, data):
    video = videos.textured(encoding)
    frames = data.draw(st.lists(st.integers(0, video.info.num_frames - 1), min_size=1, max_size=12))
    got = digests(decoded(decoder, video.clip(frames), Planes))
    assert got == [video.framemd5[frame] for frame in frames]


@pytest.mark.parametrize("encoding", ["hevc", "av1-layers", "pyramid"])
def test_plan_skips_unwanted_droppable_packets(videos, encoding):
    table = videos.textured(encoding).table
    assert not table.whole
    plan = table.plan([5, 20, 37, 63])
    assert len(plan.packets) < plan.packets_from_keys


@pytest.mark.parametrize("encoding", PROFILES)
def test_decoding_fails_when_a_planned_packet_is_missing(decoder, videos, encoding):
    video = videos.textured(encoding)
    frames = [5, 18, 37, 63]
    clip = video.clip(frames)
    expected = digests(decoded(decoder, clip, Planes))
    plan = video.table.plan(frames).packets
    for packet in plan.tolist():
        shorter = video.clip(frames, packets=plan[plan != packet])
        out = empty(shorter, Planes)
        (error,) = decoder.decode([shorter], [out])
        assert error is not None or digests(out) != expected, f"packet {packet} of {len(plan)} was not needed"


def segments(num_frames: int, rng: np.random.Generator) -> np.ndarray:
    """Return one frame from each of eight equal parts."""
    edges = np.linspace(0, num_frames, 9)
    return np.minimum((edges[:-1] + rng.random(8) * np.diff(edges)).astype(np.int64), num_frames - 1)


def check_footage(decoder, footage, folder, encoding: str, count: int | None) -> tuple[int, int]:
    """Compare random requests of real videos with ffmpeg; return the packets fed with and without a plan."""
    rng = np.random.default_rng(5)
    fed = from_keys = 0
    sources = sorted((footage / "clean").iterdir())
    for source in sources if count is None else sources[:: len(sources) // count]:
        path = folder / f"{source.stem}.mp4"
        command = [ffmpeg(), "-v", "error", "-i", str(source), "-map", "0:v:0"]
        subprocess.run([*command, *arguments(encoding, _SCALED), "-y", str(path)], check=True)
        video = Video(path)
        total = video.info.num_frames
        start = int(rng.integers(0, max(1, total - 61)))
        for frames in (
            segments(total, rng),
            np.minimum(start + np.arange(16) * 4, total - 1),
            rng.integers(0, total, 5),
            np.asarray([total - 1, 0]),
        ):
            clip = video.clip(frames)
            got = digests(decoded(decoder, clip, Planes))
            assert got == [video.framemd5[frame] for frame in frames.tolist()], path.name
            if len(frames) == 8:
                fed += len(clip.sizes)
                from_keys += video.table.plan(frames).packets_from_keys
        path.unlink()
    return fed, from_keys


def test_planned_frames_of_real_footage_match_ffmpeg(decoder, footage, tmp_path):
    fed, from_keys = check_footage(decoder, footage, tmp_path, "compact", 4)
    assert fed < from_keys


@pytest.mark.soak
@pytest.mark.parametrize("encoding", PROFILES)
def test_planned_frames_of_all_real_footage_match_ffmpeg(decoder, footage, tmp_path, encoding):
    fed, from_keys = check_footage(decoder, footage, tmp_path, encoding, None)
    if encoding == "compact":
        assert fed <= 0.30 * from_keys
