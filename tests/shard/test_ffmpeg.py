"""Which ffmpeg is used, and how it is told from others."""

from __future__ import annotations

import sys

import imageio_ffmpeg
import pytest

from fastvid.errors import MissingDependency
from fastvid.shard import ffmpeg as module
from fastvid.shard.ffmpeg import environment, find_ffmpeg
from tests.shard.shardtools import stub


def test_the_environment_wins_then_the_path_then_the_wheel(monkeypatch):
    wheel = imageio_ffmpeg.get_ffmpeg_exe()
    monkeypatch.setenv(module.VARIABLE, wheel)
    assert (find_ffmpeg().path, find_ffmpeg().found) == (wheel, "environment")
    monkeypatch.delenv(module.VARIABLE)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert (find_ffmpeg().path, find_ffmpeg().found) == (wheel, "imageio-ffmpeg")
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(MissingDependency, match="there is no ffmpeg") as caught:
        find_ffmpeg()
    assert module.VARIABLE in str(caught.value)


def test_a_named_program_that_is_not_there_is_an_error_and_no_fallback(monkeypatch):
    monkeypatch.setenv(module.VARIABLE, "/nonexistent/ffmpeg")
    with pytest.raises(MissingDependency, match="names '/nonexistent/ffmpeg'"):
        find_ffmpeg()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo 'ffmpeg version 4.4.2 Copyright'", r"ffmpeg 4\.4\.2 is older than 5\.1"),
        ("echo hello", "does not answer as ffmpeg does"),
        ("exit 3", "exits with 3"),
    ],
)
def test_programs_that_will_not_do_are_refused(body, message, tmp_path, monkeypatch):
    monkeypatch.setenv(module.VARIABLE, stub(tmp_path / "ffmpeg", body))
    with pytest.raises(MissingDependency, match=message):
        find_ffmpeg()


def test_two_builds_have_two_identities_and_one_build_has_one_wherever_it_lies(tmp_path, monkeypatch):
    ours = find_ffmpeg()
    assert ours.x264.startswith("core ")
    assert {"libx264", "libvpx-vp9"} <= set(ours.encoders)
    (tmp_path / "elsewhere").symlink_to(ours.path)
    monkeypatch.setenv(module.VARIABLE, str(tmp_path / "elsewhere"))
    assert find_ffmpeg().identity() == ours.identity()
    monkeypatch.setenv(module.VARIABLE, imageio_ffmpeg.get_ffmpeg_exe())
    assert find_ffmpeg().identity() != ours.identity()


def test_ffmpeg_gets_no_variable_that_makes_it_write_reports(monkeypatch):
    monkeypatch.setenv("FFREPORT", "file=/tmp/report")
    assert "FFREPORT" not in environment()
