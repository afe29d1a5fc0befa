"""`fastvid doctor`: what it finds, and that it sees a decoder that gives wrong frames."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fastvid.cli import doctor
from fastvid.cli.main import main
from fastvid.decode.backends import Backend, backend
from fastvid.decode.parity import SampleClip, compare
from fastvid.decode.pyav import PyAvDecoder
from fastvid.decode.request import Rgb
from fastvid.errors import DecodeError
from fastvid.format.schema import Codec


class OneFrameLate(PyAvDecoder):
    """Gives the frame before the one that was asked for, from the second clip frame on."""

    outputs = frozenset({Rgb})

    def decode(self, clips, outputs):
        errors = super().decode(clips, outputs)
        for output in outputs:
            output.data[:, 1:] = output.data[:, :-1].copy()
        return errors


class Fails(PyAvDecoder):
    outputs = frozenset({Rgb})

    def decode(self, clips, outputs):
        return [DecodeError("the engine is on fire") for _ in clips]


def made(name):
    return Backend(name, f"{__name__}:{name}", "cpu", frozenset(Codec), "nothing")


def test_wrong_frames_and_failures_are_seen(videos):
    clip = SampleClip("compact", videos.textured("compact").data)
    rows = compare([clip], [backend("pyav"), made("OneFrameLate"), made("Fails")], seconds=0.01)
    assert [(row.backend, row.frames) for row in rows] == [("pyav", True), ("OneFrameLate", False), ("Fails", None)]
    assert (rows[0].mean, rows[0].most) == (0, 0)
    assert rows[0].rate > 0
    assert rows[2].problem == "the engine is on fire"


def test_colours_are_compared_by_range(videos):
    pytest.importorskip("nvidia.dali")
    clips = [SampleClip(name, videos.textured(name).data) for name in ("vp9", "mjpeg", "mjpeg-limited")]
    rows = compare(clips, [backend("pyav"), backend("dali-cpu")], seconds=0.01)
    assert [row.range for row in rows if row.backend == "dali-cpu"] == ["limited", "full", "limited"]
    for row in rows:
        assert row.frames
        assert row.mean < 3


@pytest.fixture
def few(monkeypatch, videos):
    """Doctor with one clip that is there already."""
    monkeypatch.setattr(
        "fastvid.shard.sample_clips.make_sample_clips", lambda folder: {"compact": videos.textured("compact").data}
    )


def test_the_whole_command(few, capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["decoders"]["pyav"]["missing"] is None
    assert {row["backend"] for row in found["parity"]} >= {"pyav"}
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "compact" in text
    assert "agree" in text


def test_disagreement_is_an_exit_code(few, monkeypatch, capsys):
    known = dict(doctor.backends()) | {"late": made("OneFrameLate")}
    monkeypatch.setattr(doctor, "backends", lambda: known)
    assert main(["doctor"]) == 1
    assert "DIFFER" in capsys.readouterr().out
    assert main(["doctor", "--no-parity"]) == 0


def test_a_container_without_the_video_capability_is_named(monkeypatch):
    there = {"libcuda.so.1", "libnvidia-ml.so.1"}
    monkeypatch.setattr(doctor, "_loads", lambda name: name in there)
    found = doctor.examine(parity=False)
    assert "video" in found["driver"]["problem"]
    assert "NVIDIA_DRIVER_CAPABILITIES" in doctor.text(found)
    there |= {"libnvcuvid.so.1", "libnvidia-encode.so.1"}
    assert doctor.examine(parity=False)["driver"]["problem"] is None
    there.clear()
    assert doctor.examine(parity=False)["driver"]["problem"] is None


def test_sample_clips_are_what_they_say(tmp_path):
    from fastvid.shard.sample_clips import make_sample_clips

    clips = make_sample_clips(tmp_path)
    assert {"h264 compact", "h264 intra", "mjpeg"} <= set(clips)
    intra = SampleClip("intra", clips["h264 intra"])
    assert len(intra.table.plan(intra.frames).packets) == len(np.unique(intra.frames))
    compact = SampleClip("compact", clips["h264 compact"])
    plan = compact.table.plan(compact.frames)
    assert len(plan.packets) < plan.packets_from_keys
