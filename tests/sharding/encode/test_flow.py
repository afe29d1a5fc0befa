"""Optical flow of samples: correct, deterministic, stored as estimated, and part of the job's identity."""

import io
import json
import os
import subprocess
import sys
import tarfile
from dataclasses import replace

import av
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import fastvid
from fastvid.cli.main import main
from fastvid.errors import JobError, MissingDependency, SourceError, UsageError, WorkerError
from fastvid.format.dataset import Dataset
from fastvid.format.generations import read_generation
from fastvid.format.planes import STEPS, ZERO, to_levels, to_pixels
from fastvid.format.schema import Range
from fastvid.format.shard import Shard
from fastvid.format.writing import index_shard
from fastvid.media.ffmpeg import find_ffmpeg
from fastvid.media.timing import tagged
from fastvid.sharding.change.add import add_sources
from fastvid.sharding.encode.flow import choose_streams, estimate_flow, flow_settings, same_streams
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.encode.transcode import encode_flow, verify
from fastvid.sharding.job.job import run_job
from fastvid.sharding.job.ray_engine import settings_here
from fastvid.sharding.verify.verify import verify_dataset
from fastvid.storage import LocalStorage
from tests.makers import texture
from tests.sharding.shardtools import REPOSITORY, command, encode, ffmpeg, make, settings

pytest.importorskip("cv2", reason="optical flow needs OpenCV")

COMPACT = PROFILES["compact"].changed(short_side=64)
OPTIONS = ["--short-side", "64", "--streams", "rgb,flow", "--samples-per-shard", "2"]


def drifting(frames=6, size=(64, 96)):
    luma = texture(1, size)[0][0]
    return [np.roll(luma, 3 * number, axis=1) for number in range(frames)]


def write_drifting(path, frames=6):
    height, width = 64, 96
    chroma = bytes([128]) * (height * width // 2)
    data = b"".join(frame.tobytes() + chroma for frame in drifting(frames))
    raw = ["-f", "rawvideo", "-pix_fmt", "yuv420p", "-s", f"{width}x{height}", "-r", "25", "-i", "-"]
    ffmpeg(*raw, "-crf", "5", "-preset", "ultrafast", str(path), data=data)
    return path


SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 6), st.just(2))
FLOWS = hnp.arrays(np.float32, SHAPES, elements=st.floats(-60, 60, width=32))


@given(FLOWS, st.sampled_from([1.0, 7.5, 20.0, 64.0]))
def test_flow_round_trips_within_half_a_level_and_is_clipped_beyond_the_bound(flow, bound):
    back = to_pixels(to_levels(flow, bound), bound)
    assert back.shape == flow.shape
    assert np.abs(back - np.clip(flow, -bound, bound)).max() <= 0.5 * bound / STEPS * (1 + 1e-4)


@pytest.mark.parametrize("method", ["dis", "tvl1"])
def test_flow_of_a_known_drift_is_found_and_repeated_for_the_last_frame(method):
    settings = flow_settings(method)
    levels = [one.copy() for one in estimate_flow(drifting(3), settings)]
    assert len(levels) == 3
    flow = to_pixels(levels[0], settings.bound)[8:-8, 12:-12]
    assert np.median(flow[..., 0]) == pytest.approx(3, abs=0.3)
    assert np.median(flow[..., 1]) == pytest.approx(0, abs=0.3)
    assert (levels[2] == levels[1]).all()
    (only,) = estimate_flow(drifting(1), settings)
    assert (only == ZERO).all()
    assert not list(estimate_flow([], settings))


_DIGEST = """
import hashlib, sys
import cv2
from fastvid.sharding.encode import flow
from tests.makers import texture
import numpy as np
luma = texture(1, (96, 160))[0][0]
frames = [np.roll(luma, 3 * n, axis=1) for n in range(4)]
digest = hashlib.sha256()
for levels in flow.estimate_flow(frames, flow.flow_settings("dis")):
    digest.update(levels.tobytes())
print(digest.hexdigest())
"""


def test_flow_bytes_are_equal_on_an_older_cpu():
    # The environment variables that limit the CPU features used by OpenCV and by Intel's library inside it.
    older = {"OPENCV_CPU_DISABLE": "SSE4_1,SSE4_2,AVX,FP16,AVX2,AVX512-SKX", "OPENCV_IPP": "disabled"}
    printed = []
    for extra in ({}, older):
        words, environment = [sys.executable, "-c", _DIGEST], os.environ | {"PYTHONPATH": str(REPOSITORY)} | extra
        printed.append(subprocess.run(words, env=environment, capture_output=True, check=True, timeout=300).stdout)
    assert printed[0] == printed[1]


@pytest.mark.parametrize("name", [name for name, profile in PROFILES.items() if not profile.copies])
def test_every_profile_stores_the_estimated_flow(name, tmp_path):
    profile = PROFILES[name].changed(short_side=64)
    build = find_ffmpeg()
    if not profile.runs_on(build):
        pytest.skip(f"{build.path} has no encoder {profile.encoder}")
    path = write_drifting(tmp_path / "drift.mp4", 9)
    video = encode(path, profile)[0]
    shape = verify(video, profile, frames=(9, 9), rate=25)
    how = flow_settings("dis")
    data = encode_flow(settings(profile), how, video, shape, 25)
    assert data == encode_flow(settings(profile), how, video, shape, 25)
    with av.open(io.BytesIO(video)) as pictures, av.open(io.BytesIO(data)) as stored:
        luma = [_luma(frame) for frame in pictures.decode(video=0)]
        frames = list(stored.decode(video=0))
        levels = np.stack([_luma(frame) for frame in frames])
    assert {int(frame.color_range) for frame in frames} == {2}
    assert levels.shape == (9, 128, 96)
    estimated = np.stack([one.copy() for one in estimate_flow(luma, how)])
    error = to_pixels(levels, how.bound) - to_pixels(estimated, how.bound)
    # A level is 0.16 pixels.
    assert np.abs(error).mean() < 0.2
    assert abs(error.mean()) < 0.05


def test_flow_changed_by_encoding_is_rejected(tmp_path, monkeypatch):
    profile = COMPACT
    video = encode(write_drifting(tmp_path / "drift.mp4"), profile)[0]
    shape = verify(video, profile, frames=(6, 6), rate=25)
    from fastvid.sharding.encode import transcode

    honest = transcode.output_options

    def darker(*arguments, **options):
        # What a build of ffmpeg would write if it treated full range as limited.
        return honest(*arguments, **options) | {"filter:v": f"lutyuv=y=16+val*219/255,{tagged(full_range=True)}"}

    monkeypatch.setattr(transcode, "output_options", darker)
    with pytest.raises(SourceError, match="the encoded flow is wrong: the mean of a frame differs"):
        encode_flow(settings(profile), flow_settings("dis"), video, shape, 25)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw")
    for number in range(4):
        make(folder / ("a", "b")[number % 2] / f"v{number}.mp4", "-preset", "ultrafast", frames=6 + number)
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    done = command(folder, "--out", out, *OPTIONS, "--workers", 2)
    assert done.returncode == 0, done.stderr
    return out


def test_flow_is_described_in_the_tables(undisturbed):
    dataset = Dataset(str(undisturbed))
    assert dataset.streams == ("rgb", "flow")
    assert dataset.generation.extras["flow"]["method"] == "dis"
    assert dataset.generation.extras["flow"]["bound"] == 20.0
    shard = dataset.shard(0)
    picture, flow = shard.info(0), shard.info(0, "flow")
    assert (flow.width, flow.height, flow.num_frames) == (picture.width, 2 * picture.height, picture.num_frames)
    assert (flow.fps, flow.range, flow.flow_bound, picture.flow_bound) == (picture.fps, Range.FULL, 20.0, 0.0)
    facts = pq.read_table(undisturbed / "data-000000.parquet").to_pylist()
    assert [row["stream"] for row in facts] == ["rgb", "flow"] * shard.num_samples
    assert {row["stream"]: row["flow_bound"] for row in facts} == {"rgb": None, "flow": 20.0}
    with tarfile.open(undisturbed / "data-000000.tar") as tar:
        meta = json.load(tar.extractfile(next(name for name in tar.getnames() if name.endswith(".json"))))
    assert meta["flow"]["parameters"]["PatchStride"] == 3


def test_audit_checks_flow_and_sidecars_are_rebuilt_from_the_tar(undisturbed):
    report = verify_dataset(str(undisturbed), workers=1)
    assert (report.problems, report.checked["decode"]) == ([], 8)
    store, names = LocalStorage(undisturbed), ("data-000000.pkt", "data-000000.idx")
    before = [store.read(name) for name in names]
    index_shard(store, "data-000000", streams=("rgb", "flow"))
    assert before == [store.read(name) for name in names]


def test_another_bound_is_another_job_and_added_sources_get_the_same_flow(folder, undisturbed, tmp_path):
    options = {"profile": COMPACT, "streams": "rgb,flow", "workers": 1}
    with pytest.raises(UsageError, match=r"differs in streams\.flow\.bound"):
        run_job(str(folder), undisturbed, flow_bound=10, samples_per_shard=2, **options)
    base = tmp_path / "base"
    run_job(str(folder / "a"), base, **options)
    assert add_sources(str(base), str(folder / "b"), workers=1).report.packed == 2
    _, generation = read_generation(LocalStorage(base))
    assert generation.streams == ("rgb", "flow")
    assert not verify_dataset(str(base), workers=1).problems
    other = json.loads(json.dumps(generation.extras))
    other["flow"]["opencv"] = "3.2.1"
    with pytest.raises(JobError, match=r"computed by OpenCV 3\.2\.1"):
        same_streams(other)
    assert same_streams(other, allow_encoder_change=True) == same_streams(generation.extras)


def test_node_with_another_opencv_raises():
    how = settings(streams=choose_streams("rgb,flow"))
    assert settings_here(how, "node").streams == how.streams
    node = replace(how, streams=replace(how.streams, flow=replace(how.streams.flow, opencv="3.2.1")))
    with pytest.raises(WorkerError, match=r"node east: .*OpenCV 3\.2\.1"):
        settings_here(node, "east")


def test_flow_is_returned_in_pixels(tmp_path, capsys):
    write_drifting(tmp_path / "raw.mp4", 5)
    run_job(str(tmp_path / "raw.mp4"), tmp_path / "out", profile=COMPACT, streams="rgb,flow", workers=1)
    flow = fastvid.open(tmp_path / "out")["raw"].flow([0, 4])
    assert flow.shape == (2, 64, 96, 2)
    assert np.median(flow[:, 8:-8, 12:-12], axis=(1, 2)) == pytest.approx(np.array([[3, 0], [3, 0]]), abs=0.3)
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert "dis by OpenCV" in capsys.readouterr().out


def test_invalid_streams_raise_clear_errors(monkeypatch):
    for arguments, message in (
        ({"streams": "flow"}, "invalid streams 'flow'"),
        ({"streams": "rgb,depth"}, "rgb,depth"),
        ({"streams": "rgb,rgb"}, "rgb,rgb"),
        ({"streams": "rgb,flow", "method": "farneback"}, "unknown flow method 'farneback'[\\s\\S]*dis, tvl1"),
        ({"streams": "rgb,flow", "bound": 0.0}, "flow bound is 0.0"),
        ({"audio": "mp3"}, "unknown audio mode 'mp3'[\\s\\S]*drop, copy, aac"),
    ):
        with pytest.raises(UsageError, match=message):
            choose_streams(**arguments)
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(MissingDependency, match=r"fastvid-toolkit\[flow\]"):
        choose_streams("rgb,flow")


def test_job_without_flow_keeps_its_identity_and_does_not_import_opencv(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    run_job(str(folder / "a"), tmp_path / "out", profile=COMPACT, workers=1)
    store = LocalStorage(tmp_path / "out")
    assert read_generation(store)[1].extras == {}
    assert Shard(store, "data-000000").num_streams == 1


def _luma(frame):
    plane = frame.planes[0]
    return np.ndarray((frame.height, frame.width), np.uint8, plane, 0, (plane.line_size, 1)).copy()
