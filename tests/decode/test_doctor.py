"""`fastvid doctor`: its report, its self-test, and its detection of a decoder that returns wrong frames."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from fastvid.cli import doctor
from fastvid.cli.main import main
from fastvid.decode import engines, pixels
from fastvid.decode.backends import BACKENDS, Backend, backend
from fastvid.decode.parity import SampleClip, compare
from fastvid.decode.pyav import PyAvDecoder
from fastvid.decode.request import DevicePlanes, DeviceRgb, Rgb
from fastvid.errors import DecodeError
from fastvid.format.schema import Codec, Range
from fastvid.media.ffmpeg import find_ffmpeg
from fastvid.sharding.verify.self_test import self_test
from tests import fake_cuda
from tests.conformance.posing import SPOILED, posing
from tests.sharding.shardtools import REPOSITORY, stub


class Fails(PyAvDecoder):
    outputs = frozenset({Rgb})

    def decode(self, clips, outputs):
        return [DecodeError("the engine is on fire") for _ in clips]


class Breaks(PyAvDecoder):
    outputs = frozenset({Rgb})

    def decode(self, clips, outputs):
        raise OSError("the driver is gone")


def made(name):
    return Backend(name, f"{__name__}:{name}", "cpu", frozenset(Codec), "nothing")


LATE, BRIGHTER = posing(Rgb, "late"), posing(Rgb, "limited range as full range")


def test_compare_detects_wrong_frames_and_failures(videos):
    clip = SampleClip("compact", videos.textured("compact").data)
    rows = compare([clip], [backend("pyav"), LATE, made("Fails"), made("Breaks")], seconds=0.01)
    assert [row.frames for row in rows] == [True, False, None, None]
    assert (rows[0].mean, rows[0].most) == (0, 0)
    assert rows[0].rate > 0
    assert rows[1].problem.startswith("frame 9 ")
    assert rows[2].problem == "the engine is on fire"
    assert rows[3].problem == "OSError: the driver is gone"


@pytest.mark.parametrize("kind", [DeviceRgb, DevicePlanes])
def test_compare_refuses_decoders_of_a_device_that_are_wrong_without_an_error(videos, kind):
    clip = SampleClip("compact", videos.textured("compact").data)
    right, wrong = posing(kind), [posing(kind, spoiled) for spoiled in SPOILED]
    rows = compare([clip], [backend("pyav"), right, *wrong], seconds=0)
    assert [(row.backend, row.frames) for row in rows] == [
        ("pyav", True),
        (right.name, True),
        *((one.name, False) for one in wrong),
    ]
    for row in rows[2:]:
        assert row.problem.startswith("frame ")


@pytest.mark.parametrize("kind", [DeviceRgb, DevicePlanes])
def test_late_frames_within_the_bound_are_refused(videos, kind):
    clip = SampleClip("compact", videos.textured("compact").data)
    (_, row) = compare([clip], [backend("pyav"), posing(kind, "late", bound=100.0)], seconds=0)
    assert not row.frames
    assert row.problem == "frame 9 looks like frame 1"


@pytest.fixture
def few(monkeypatch, videos):
    """Make doctor use one clip that already exists."""
    monkeypatch.setattr(
        "fastvid.media.ffmpeg.make_sample_clips", lambda folder: {"compact": videos.textured("compact").data}
    )


def test_doctor_reports_every_decoder(few, capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["decoders"]["pyav"]["missing"] is None
    assert [step["name"] for step in found["proof"]][:3] == ["shard", "plan", "decode pyav"]
    assert found["problems"] == []
    assert {row["backend"] for row in found["parity"]} >= {"pyav"}
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "proof     yes  shard: 40 frames" in text
    assert "yes  decode pyav: the 8 requested frames" in text
    assert "FAILED" not in text
    assert "compact" in text
    assert "agree" in text


def test_doctor_fails_when_decoders_disagree(few, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "BACKENDS", BACKENDS | {"late": LATE})
    assert main(["doctor"]) == 1
    assert "DIFFER" in capsys.readouterr().out
    assert main(["doctor", "--no-parity"]) == 1
    late = "requested frames [1, 6, 11, 16, 21, 26, 31, 36], decoded frames that look like [1, 1, 6,"
    assert f"decode {LATE.name}: {late}" in capsys.readouterr().out


def test_self_test_checks_frames_and_colours():
    steps = list(self_test([backend("pyav"), LATE, made("Fails"), made("Breaks"), BRIGHTER]))
    problems = {step.name: step.problem for step in steps}
    assert problems["shard"] is problems["plan"] is problems["decode pyav"] is None
    assert "decoded frames that look like" in problems[f"decode {LATE.name}"]
    assert problems["decode Fails"] == "the engine is on fire"
    assert problems["decode Breaks"] == "OSError: the driver is gone"
    assert "colours differ by" in problems[f"decode {BRIGHTER.name}"]


def in_process(folder, site):
    """Run doctor in a new process; each of its interpreters executes `site` on startup."""
    (folder / "sitecustomize.py").write_text(site)
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(REPOSITORY)])}
    done = subprocess.run(
        [sys.executable, "-m", "fastvid", "doctor", "--no-parity"],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout


LACKS_A_CALL = """
import av, functools
whole = av.open
@functools.wraps(whole)
def opened(*args, **options):
    if "format" in options:
        raise TypeError("open() got an unexpected keyword argument 'format'")
    return whole(*args, **options)
av.open = opened
"""


def test_self_test_fails_when_pyav_lacks_a_function(tmp_path):
    code, out = in_process(tmp_path, LACKS_A_CALL)
    assert code == 1
    assert "yes  pyav (" in out  # it loads
    assert "proof     NO   shard: crashed: the worker exited with 1 in phase probe:" in out
    assert "open() got an unexpected keyword argument 'format'" in out
    assert "hint: install another version of PyAV" in out


def test_doctor_reports_the_rest_when_pyav_is_missing(tmp_path):
    code, out = in_process(tmp_path, "import sys\nsys.modules['av'] = None")
    assert code == 1
    assert "NO   pyav: decoder 'pyav' is not available" in out
    assert "proof     NO   shard:" in out


def without_x264(folder, *, listed):
    """Write an ffmpeg that cannot encode H.264 but may list the encoder."""
    encoders = "" if listed else 'case "$*" in -encoders) "$real" "$@" | grep -v libx264; exit;; esac\n'
    body = (
        f"real={find_ffmpeg().path}\n{encoders}"
        'case "$*" in *empty_moov*) ;; *libx264*) echo "[fatal] Unknown encoder libx264" >&2; exit 8;; esac\n'
        'exec "$real" "$@"'
    )
    return stub(folder / "ffmpeg", body)


@pytest.mark.parametrize(("listed", "why"), [(False, "has no encoder 'libx264'"), (True, "Unknown encoder libx264")])
def test_self_test_fails_when_ffmpeg_lacks_x264(listed, why, tmp_path, monkeypatch, capsys):
    program = without_x264(tmp_path, listed=listed)
    monkeypatch.setenv("FASTVID_FFMPEG", program)
    assert main(["doctor", "--no-parity"]) == 1
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("proof")]
    assert line.startswith("proof     NO   shard: ")
    assert why in line
    assert program in out
    assert "FASTVID_FFMPEG" in out.partition("proof")[2]
    assert out.splitlines()[-1].startswith("FAILED    shard: ")


def test_doctor_names_the_missing_video_capability_of_a_container(monkeypatch):
    monkeypatch.setattr("fastvid.sharding.verify.self_test.self_test", lambda decoders: [])
    there = {"libcuda.so.1", "libnvidia-ml.so.1"}
    monkeypatch.setattr(doctor, "_loads", lambda name: name in there)
    found = doctor.examine(parity=False)
    assert "video" in found["driver"]["problem"]
    assert "NVIDIA_DRIVER_CAPABILITIES" in doctor.text(found)
    there |= {"libnvcuvid.so.1", "libnvidia-encode.so.1"}
    assert doctor.examine(parity=False)["driver"]["problem"] is None
    there.clear()
    assert doctor.examine(parity=False)["driver"]["problem"] is None


def test_doctor_says_which_engines_a_gpu_has_and_whether_the_kernel_compiles(monkeypatch):
    fake_cuda.install(monkeypatch, devices=2)
    monkeypatch.setattr("fastvid.sharding.verify.self_test.self_test", lambda decoders: [])
    monkeypatch.setattr(pixels, "kernel_problem", lambda device: "no compiler" if device.index else None)

    def capabilities(device_id):
        if device_id:
            raise RuntimeError("CUDA error: out of memory")
        return {Codec.H264: 7, Codec.HEVC: 7}

    monkeypatch.setattr(engines, "capabilities", capabilities)
    found = doctor.examine(parity=False)
    text = doctor.text(found)
    assert "GPUs      Fake: NVDEC 7 for h264, 7 for hevc" in text
    assert "          Fake: NVDEC CUDA error: out of memory" in text
    assert [gpu["kernel"] for gpu in found["gpus"]] == [None, "no compiler"]
    assert "kernel that converts planes compiles and is right" in text
    assert "          no compiler" in text
    for name in ("dali-gpu", "nvdec"):
        assert f"{name}" in text


def test_sample_clips_have_the_stated_codecs_and_ranges_and_every_decoder_agrees(tmp_path):
    from fastvid.media.ffmpeg import make_sample_clips

    clips = make_sample_clips(tmp_path)
    assert {"h264 compact", "h264 intra", "mjpeg"} <= set(clips)
    ranges = {name: SampleClip(name, data).info.range for name, data in clips.items()}
    assert ranges == {name: Range.FULL if name == "mjpeg" else Range.LIMITED for name in clips}
    intra = SampleClip("intra", clips["h264 intra"])
    assert len(intra.table.plan(intra.frames).packets) == len(np.unique(intra.frames))
    compact = SampleClip("compact", clips["h264 compact"])
    plan = compact.table.plan(compact.frames)
    assert len(plan.packets) < plan.packets_from_keys
    usable = [one for one in BACKENDS.values() if one.why_unavailable() is None]
    rows = compare([SampleClip(*one) for one in clips.items()], usable, seconds=0)
    assert {row.backend for row in rows} == {one.name for one in usable}
    assert all(row.frames for row in rows)
