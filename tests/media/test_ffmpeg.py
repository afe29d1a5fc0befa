"""Which ffmpeg is used, and how it is told from others."""

from __future__ import annotations

import sys

import imageio_ffmpeg
import pytest

from fastvid.errors import MissingDependency
from fastvid.media import ffmpeg as module
from fastvid.media.ffmpeg import environment, find_ffmpeg
from tests.sharding.shardtools import other_build, stub


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
        ("echo hello", "does not answer as ffmpeg does"),
        ("exit 3", "exits with 3"),
    ],
)
def test_programs_that_will_not_do_are_refused(body, message, tmp_path, monkeypatch):
    monkeypatch.setenv(module.VARIABLE, stub(tmp_path / "ffmpeg", body))
    with pytest.raises(MissingDependency, match=message):
        find_ffmpeg()


@pytest.mark.parametrize(
    ("lack", "message"),
    [
        # What 4.4 says.
        (
            """case "$*" in *-fps_mode*) echo "Unrecognized option 'fps_mode'." >&2; exit 1;; esac""",
            "the option -fps_mode",
        ),
        ("""if [ "$1" = -filters ]; then REAL -filters | grep -v ' yadif '; exit; fi""", "the filter yadif"),
        ("exec 2>/dev/null", r"the count of packets and frames"),
        # One that heeds neither the filter nor any other word on colour.
        (
            """for a; do shift; case "$a" in setparams=*) a=null;; esac; set -- "$@" "$a"; done""",
            "colour as the filter setparams sets it",
        ),
    ],
)
def test_a_program_is_refused_by_what_it_lacks_whatever_its_version(lack, message, tmp_path, monkeypatch):
    real = find_ffmpeg().path
    whole = stub(tmp_path / "whole", f"""exec '{real}' "$@" """)
    monkeypatch.setenv(module.VARIABLE, whole)
    assert find_ffmpeg().path == whole
    monkeypatch.setenv(module.VARIABLE, stub(tmp_path / "ffmpeg", f"""{lack}\nexec REAL "$@" """.replace("REAL", real)))
    with pytest.raises(MissingDependency, match=f"lacks {message}") as caught:
        find_ffmpeg()
    assert module.VARIABLE in str(caught.value)


def test_a_program_without_x264_is_one_for_other_profiles(tmp_path, monkeypatch):
    lack = """case "$*" in *libx264*) echo "Unknown encoder 'libx264'" >&2; exit 8;; esac"""
    real = find_ffmpeg().path
    listed = f"""if [ "$1" = -encoders ]; then {real} -encoders | grep -v x264; exit; fi"""
    body = f"""{lack}\n{listed}\nexec {real} "$@" """
    monkeypatch.setenv(module.VARIABLE, stub(tmp_path / "ffmpeg", body))
    assert (find_ffmpeg().encoders, find_ffmpeg().x264) == (("libvpx-vp9", "libx265", "mjpeg"), "")


def test_two_builds_have_two_identities_and_one_build_has_one_wherever_it_lies(tmp_path, monkeypatch):
    ours = find_ffmpeg()
    assert ours.x264.startswith("core ")
    assert {"libx264", "libvpx-vp9"} <= set(ours.encoders)
    (tmp_path / "elsewhere").symlink_to(ours.path)
    monkeypatch.setenv(module.VARIABLE, str(tmp_path / "elsewhere"))
    assert find_ffmpeg().identity() == ours.identity()
    monkeypatch.setenv(module.VARIABLE, other_build(tmp_path / "other"))
    assert find_ffmpeg().identity() != ours.identity()


def test_ffmpeg_gets_no_variable_that_makes_it_write_reports(monkeypatch):
    monkeypatch.setenv("FFREPORT", "file=/tmp/report")
    assert "FFREPORT" not in environment()
