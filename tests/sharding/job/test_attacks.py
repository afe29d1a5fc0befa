"""Files that pose as videos to read other files, reach the network or exhaust the machine."""

import ctypes
import os
import struct
import subprocess
from pathlib import Path

import pytest

from fastvid.media.ffmpeg import Limits, find_ffmpeg
from fastvid.media.reasons import Reason
from fastvid.sharding.job.job import run_job
from tests.sharding.shardtools import SMALL, ffmpeg, ledger, make
from tests.storage.local_server import LocalHandler, LocalServer

_IN_OPEN, _IN_NONBLOCK = 0x20, 0o4000


class Watch:
    """Detects by inotify whether any process opens a file."""

    def __init__(self, path: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(_IN_NONBLOCK)
        assert self._descriptor >= 0
        assert libc.inotify_add_watch(self._descriptor, os.fsencode(path), _IN_OPEN) >= 0

    def opened(self) -> bool:
        try:
            return bool(os.read(self._descriptor, 1 << 16))
        except BlockingIOError:
            return False


@pytest.fixture(scope="module")
def canary(tmp_path_factory):
    path = make(tmp_path_factory.mktemp("secret") / "canary.ts", "-c:v", "libx264", "-pix_fmt", "yuv420p", frames=30)
    return path, Watch(path)


@pytest.fixture(scope="module")
def server(canary):
    """A web server with the canary, and a record of its requests."""
    asked: list[str] = []
    data = canary[0].read_bytes()

    class Handler(LocalHandler):
        def do_GET(self):  # noqa: N802
            asked.append(self.path)
            self.answer(200, data)

    with LocalServer(Handler) as server:
        yield server.endpoint, asked


def scripts(path: Path, web: str) -> dict[str, str]:
    hls = "#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:1.2,\n{}\n#EXT-X-ENDLIST\n"
    mpd = (
        '<?xml version="1.0"?>\n<MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"'
        ' profiles="urn:mpeg:dash:profile:isoff-on-demand:2011" mediaPresentationDuration="PT1.2S"><Period>'
        '<AdaptationSet contentType="video" mimeType="video/mp4"><Representation id="v" bandwidth="1000">'
        '<BaseURL>{0}</BaseURL><SegmentList duration="2"><SegmentURL media="{0}"/></SegmentList>'
        "</Representation></AdaptationSet></Period></MPD>\n"
    )
    return {
        "hls-file.ts": hls.format(f"file://{path}"),
        "hls-http.ts": hls.format(f"{web}/hls.ts"),
        "concat-file.mp4": f"ffconcat version 1.0\nfile 'file:{path}'\n",
        "concat-http.mkv": f"ffconcat version 1.0\nfile '{web}/concat.ts'\n",
        "dash-file.mp4": mpd.format(path.name),
        "drawing.mp4": f'<svg xmlns="http://www.w3.org/2000/svg" width="64" height="64"><image href="file://{path}"/></svg>',
        "session.mov": "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\nc=IN IP4 127.0.0.1\r\nm=video 5004 RTP/AVP 96\r\n",
        # A blank line and a byte-order mark at the start do not help.
        "blank.mp4": "\ufeff\n  " + hls.format(f"file://{path}"),
    }


@pytest.fixture(scope="module")
def attacked(canary, server, tmp_path_factory):
    """Run a job over all attacks and one harmless video; its rows, and the attacks' folder."""
    raw = tmp_path_factory.mktemp("raw")
    for name, text in scripts(canary[0], server[0]).items():
        (raw / name).write_text(text)
    make(raw / "honest.mp4", "-pix_fmt", "yuv420p", frames=4)
    # A picture whose name is a pattern that matches other pictures.
    for name, frames in (("pic%d.gif", 3), ("pic1.gif", 1), ("pic2.gif", 1)):
        make(raw / "still.gif", frames=frames, size="64x64").rename(raw / name)
    (raw / "out.mp4").symlink_to(canary[0])
    os.mkfifo(raw / "endless.mp4")
    (raw / "zeros.mp4").symlink_to("/dev/zero")
    head = make(tmp_path_factory.mktemp("head") / "x.mp4", frames=3).read_bytes()[:40]
    (raw / "claims.mp4").write_bytes(head + struct.pack(">I4sQ", 1, b"mdat", 1 << 60))
    # Large pictures in small files: the first one, and a later one.
    parts, x264 = tmp_path_factory.mktemp("parts"), ("-c:v", "libx264", "-preset", "ultrafast", "-pix_fmt", "yuv420p")
    for path, side, frames, options in (
        (raw / "bomb.gif", 8192, 1, ()), (parts / "a.h264", 64, 5, x264), (parts / "b.h264", 8192, 1, x264)
    ):  # fmt: skip
        ffmpeg("-f", "lavfi", "-i", f"color=size={side}x{side}", "-frames:v", str(frames), *options, str(path))
    (raw / "later.h264").write_bytes((parts / "a.h264").read_bytes() + (parts / "b.h264").read_bytes())
    canary[1].opened()
    server[1].clear()
    out = tmp_path_factory.mktemp("out") / "out"
    report = run_job(str(raw), str(out), profile=SMALL, workers=2)
    return raw, {row["source_id"]: row for row in ledger(out)}, report, (canary[1].opened(), list(server[1]))


def unprotected(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [find_ffmpeg().path, "-nostdin", "-v", "error", *arguments, "-frames:v", "2", "-f", "null", "-"]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=300)


def test_hostile_sources_open_no_other_file_and_no_connection(attacked):
    _, rows, report, (opened, asked) = attacked
    assert not opened
    assert asked == []
    assert (report.packed, rows["honest.mp4"]["num_frames"]) == (4, 4)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hls-file.ts", "-allowed_extensions ALL -f hls"),
        ("blank.mp4", "-allowed_extensions ALL -f hls"),
        ("concat-file.mp4", "-safe 0 -f concat"),
        ("dash-file.mp4", "-f dash"),
    ],
)
def test_scripts_naming_files_are_refused(name, options, attacked, canary):
    raw, rows, _, _ = attacked
    assert rows[name]["reason"] == Reason.PLAYLIST
    # The control. Names in a manifest are relative to it, and a player needs no blanks at the start.
    script = canary[0].parent / name
    script.write_text((raw / name).read_text().lstrip("\ufeff\n "))
    canary[1].opened()
    unprotected(*options.split(), "-i", str(script))
    assert canary[1].opened()


@pytest.mark.parametrize("name", ["hls-http.ts", "concat-http.mkv"])
def test_scripts_naming_servers_are_refused(name, attacked, server):
    raw, rows, _, _ = attacked
    assert rows[name]["reason"] == Reason.PLAYLIST
    server[1].clear()
    options = ["-safe", "0", "-f", "concat"] if name.startswith("concat") else ["-f", "hls"]
    unprotected("-protocol_whitelist", "file,http,tcp", *options, "-i", str(raw / name))
    assert server[1]


def test_drawings_and_sessions_are_refused(attacked):
    raw, rows, _, _ = attacked
    assert rows["drawing.mp4"]["reason"] == rows["session.mov"]["reason"] == Reason.PLAYLIST
    # The control, as far as the library behind it goes, which follows no link to a file: the drawing is drawn.
    assert unprotected("-f", "svg_pipe", "-i", str(raw / "drawing.mp4")).returncode == 0


def test_file_name_with_a_pattern_is_taken_literally(attacked):
    raw, rows, _, _ = attacked
    assert rows["pic%d.gif"]["num_frames"] == 3
    # The control: as an image sequence the name is a pattern, and the matching files are read, one frame each.
    command = [find_ffmpeg().path, "-nostdin", "-v", "error", "-f", "image2", "-c:v", "gif"]
    command += ["-i", str(raw / "pic%d.gif"), "-f", "framemd5", "-"]
    lines = subprocess.run(command, capture_output=True, check=True, text=True).stdout.splitlines()
    assert len([line for line in lines if not line.startswith("#")]) == 2


def test_links_out_of_the_folder_and_endless_files_are_refused(attacked, canary, tmp_path):
    _, rows, report, _ = attacked
    assert rows["out.mp4"]["reason"] == Reason.OUTSIDE
    assert not {"endless.mp4", "zeros.mp4"} & set(rows)
    assert report.ignored["special file"] == 2
    assert rows["claims.mp4"]["status"] == "rejected"
    # The control: links are followed on request, but even then a device is no video.
    folder = tmp_path / "raw"
    folder.mkdir()
    (folder / "out.mp4").symlink_to(canary[0])
    (folder / "zeros.mp4").symlink_to("/dev/zero")
    canary[1].opened()
    report = run_job(str(folder), str(tmp_path / "out"), profile="copy", workers=1, follow_links=True)
    assert canary[1].opened()
    assert (report.packed, report.ignored) == (1, {"special file": 1})


def test_large_pictures_in_small_files_are_refused(attacked):
    raw, rows, _, _ = attacked
    assert rows["bomb.gif"]["reason"] == Reason.TOO_LARGE
    assert rows["later.h264"]["reason"] in (Reason.TOO_LARGE, Reason.DAMAGED)
    assert (raw / "bomb.gif").stat().st_size < 1_000_000
    # The control: without a limit both are decoded, at 200 MB per picture.
    for name in ("bomb.gif", "later.h264"):
        assert unprotected("-i", str(raw / name)).returncode == 0


def test_long_films_in_small_files_stop_at_the_limit(tmp_path):
    path = make(tmp_path / "raw" / "long.mp4", "-preset", "ultrafast", size="32x32", frames=1500)
    make(tmp_path / "raw" / "short.mp4", "-preset", "ultrafast", size="32x32", frames=5)
    report = run_job(str(path.parent), str(tmp_path / "out"), profile="copy", workers=1, limits=Limits(max_frames=1000))
    assert dict(report.rejected) == {Reason.TOO_LONG: 1}
    assert report.packed == 1


@pytest.mark.parametrize("profile", ["copy", SMALL], ids=["copy", "compact"])
def test_hostile_file_names_are_only_names(profile, tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    data = make(tmp_path / "a.mp4", "-pix_fmt", "yuv420p", frames=2).read_bytes()
    names = [
        b" a b .mp4", b"-y.mp4", b"--help.mp4", b"it's \"quoted\".mp4", b"new\nline.mp4", b"pipe:0.mp4", b"file:x.mp4",
        b"http:--x.mp4", b"%03d.mp4", b"$(touch x);`id`.mp4", b"\xff\xfe\x80.mp4", "\u202efour.mp4".encode(),
    ]  # fmt: skip
    for name in names:
        with open(os.path.join(os.fsencode(raw), name), "wb") as file:
            file.write(data)
    report = run_job(str(raw), str(tmp_path / "out"), profile=profile, workers=1)
    assert (report.packed, report.rejected) == (len(names), {})
    rows = report.ledger.to_pylist()
    assert len({row["key"] for row in rows}) == len(names)
    assert "bytes:%FF%FE%80.mp4" in {row["source_id"] for row in rows}
