"""Which ffmpeg is used, and what identifies its build."""

import sys

import imageio_ffmpeg
import pytest

from fastvid.errors import MissingDependency, WorkerError
from fastvid.media import ffmpeg as module
from fastvid.media.ffmpeg import environment, find_ffmpeg
from tests.sharding.shardtools import other_build, stub


def test_ffmpeg_is_found_in_environment_then_path_then_wheel(monkeypatch):
    wheel = imageio_ffmpeg.get_ffmpeg_exe()
    monkeypatch.setenv(module.VARIABLE, wheel)
    assert (find_ffmpeg().path, find_ffmpeg().found) == (wheel, "environment")
    monkeypatch.delenv(module.VARIABLE)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert (find_ffmpeg().path, find_ffmpeg().found) == (wheel, "imageio-ffmpeg")
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(MissingDependency, match="ffmpeg is not installed") as caught:
        find_ffmpeg()
    assert module.VARIABLE in str(caught.value)


def test_missing_named_program_raises_without_fallback(monkeypatch):
    monkeypatch.setenv(module.VARIABLE, "/nonexistent/ffmpeg")
    with pytest.raises(MissingDependency, match="FASTVID_FFMPEG is '/nonexistent/ffmpeg'"):
        find_ffmpeg()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo hello", "is not ffmpeg"),
        ("exit 3", "exits with status 3"),
    ],
)
def test_program_that_is_not_ffmpeg_is_rejected(body, message, tmp_path, monkeypatch):
    monkeypatch.setenv(module.VARIABLE, stub(tmp_path / "ffmpeg", body))
    with pytest.raises(MissingDependency, match=message):
        find_ffmpeg()


def test_program_that_is_killed_is_not_reported_as_missing(tmp_path, monkeypatch):
    monkeypatch.setenv(module.VARIABLE, stub(tmp_path / "ffmpeg", "kill -9 $$"))
    with pytest.raises(WorkerError, match="ffmpeg was killed by SIGKILL on startup") as caught:
        find_ffmpeg()
    assert "run the command again" in caught.value.hint


@pytest.mark.parametrize(
    ("lack", "message"),
    [
        # The message of ffmpeg 4.4.
        (
            """case "$*" in *-fps_mode*) echo "Unrecognized option 'fps_mode'." >&2; exit 1;; esac""",
            "the option -fps_mode",
        ),
        ("""if [ "$1" = -filters ]; then REAL -filters | grep -v ' bwdif '; exit; fi""", "the filter bwdif"),
        ("exec 2>/dev/null", r"the count of packets and frames"),
        # A program that ignores all colour options and filters.
        (
            """for a; do shift; case "$a" in setparams=*) a=null;; esac; set -- "$@" "$a"; done""",
            "the colour tags of the filter setparams",
        ),
    ],
)
def test_ffmpeg_is_rejected_when_it_lacks_a_feature(lack, message, tmp_path, monkeypatch):
    real = find_ffmpeg().path
    whole = stub(tmp_path / "whole", f"""exec '{real}' "$@" """)
    monkeypatch.setenv(module.VARIABLE, whole)
    assert find_ffmpeg().path == whole
    monkeypatch.setenv(module.VARIABLE, stub(tmp_path / "ffmpeg", f"""{lack}\nexec REAL "$@" """.replace("REAL", real)))
    with pytest.raises(MissingDependency, match=f"lacks {message}") as caught:
        find_ffmpeg()
    assert module.VARIABLE in str(caught.value)


def test_ffmpeg_without_x264_is_accepted_for_other_profiles(tmp_path, monkeypatch):
    lack = """case "$*" in *libx264*) echo "Unknown encoder 'libx264'" >&2; exit 8;; esac"""
    real = find_ffmpeg().path
    listed = f"""if [ "$1" = -encoders ]; then {real} -encoders | grep -v x264; exit; fi"""
    body = f"""{lack}\n{listed}\nexec {real} "$@" """
    monkeypatch.setenv(module.VARIABLE, stub(tmp_path / "ffmpeg", body))
    assert (find_ffmpeg().encoders, find_ffmpeg().x264) == (("libvpx-vp9", "libx265", "mjpeg"), "")


def test_identity_depends_on_the_build_and_not_on_its_path(tmp_path, monkeypatch):
    ours = find_ffmpeg()
    assert ours.x264.startswith("core ")
    assert {"libx264", "libvpx-vp9"} <= set(ours.encoders)
    (tmp_path / "elsewhere").symlink_to(ours.path)
    monkeypatch.setenv(module.VARIABLE, str(tmp_path / "elsewhere"))
    assert find_ffmpeg().identity() == ours.identity()
    monkeypatch.setenv(module.VARIABLE, other_build(tmp_path / "other"))
    assert find_ffmpeg().identity() != ours.identity()


def test_environment_omits_variables_that_make_ffmpeg_write_reports(monkeypatch):
    monkeypatch.setenv("FFREPORT", "file=/tmp/report")
    assert "FFREPORT" not in environment()
