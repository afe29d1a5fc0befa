"""Datasets of unchanged foreign tars: every planned frame is the frame that a player shows."""

import io
import json
import shutil

import av
import numpy as np
import pyarrow.parquet as pq
import pytest
import webdataset

import fastvid
from fastvid.cli.main import main
from fastvid.decode.clips import reader_of
from fastvid.errors import ChecksumError, FormatError, JobError, SourceError, UsageError
from fastvid.format.packets import PacketTable
from fastvid.format.schema import PacketFlag, StreamFlag
from fastvid.media import prove
from fastvid.media.ffmpeg import Limits
from fastvid.media.probe import HEAD_BYTES, sniff
from fastvid.media.prove import index_video, play
from fastvid.media.reasons import Reason
from fastvid.sharding.job.index import index_tars, rebuild
from fastvid.sharding.verify.verify import verify_dataset
from tests.sharding.in_place import tools
from tests.sharding.shardtools import ledger, make, tar_of

X264 = ("-c:v", "libx264", "-g", "10")
X265 = ("-c:v", "libx265", "-preset", "ultrafast", "-x265-params")


def check(data):
    """Compare plans of a video with a full decode by FFmpeg's demuxer; return the index."""
    found = index_video(data, Limits(), hdr="keep")
    table = PacketTable(found.records, whole=is_whole(found))
    whole = play(data, sniff(data[:HEAD_BYTES]), Limits()).digests
    assert table.num_frames == found.info.num_frames == len(whole)
    picks = sorted({0, len(whole) - 1, *np.random.default_rng(0).integers(0, len(whole), 16).tolist()})
    assert tools.digests_by_plan(found.info.decoded, table, reader_of(data), picks) == [whole[n] for n in picks]
    return found


def is_whole(found):
    return bool(found.info.flags & StreamFlag.WHOLE)


@pytest.mark.parametrize(
    ("name", "options", "droppable"),
    [
        ("x264.mp4", ("-c:v", "libx264", "-g", "20", "-bf", "5"), True),
        ("open-h264.mp4", ("-c:v", "libx264", "-x264-params", "open-gop=1:keyint=10:bframes=3:scenecut=0"), True),
        ("open-hevc.mp4", (*X265, "log-level=none:open-gop=1:keyint=10:bframes=3:b-pyramid=1"), True),
        ("fragmented.mp4", (*X264, "-movflags", "frag_keyframe+empty_moov"), True),
        ("x264.mkv", X264, True),
        ("vp9.webm", ("-c:v", "libvpx-vp9", "-g", "10", "-cpu-used", "8", "-lag-in-frames", "8"), False),
        ("vp8.webm", ("-c:v", "libvpx", "-g", "10", "-auto-alt-ref", "1", "-lag-in-frames", "8"), False),
        ("x264.avi", (*X264, "-bf", "2"), True),
        ("x264.flv", X264, True),
        ("mjpeg.avi", ("-c:v", "mjpeg", "-q:v", "4"), True),
        ("av1.mp4", ("-c:v", "libaom-av1", "-usage", "realtime", "-cpu-used", "8", "-g", "10"), False),
    ],
)
def test_planned_frames_of_foreign_files_match_a_player(name, options, droppable, tmp_path):
    path = make(tmp_path / name, "-pix_fmt", "yuv420p", *options, size="80x48", frames=45)
    found = check(path.read_bytes())
    assert not is_whole(found)
    flags = found.records["flags"]
    assert bool((flags & PacketFlag.DROPPABLE).any()) == droppable
    # An open GOP starts at a picture that cannot be decoded on its own, so only the first is a key packet.
    keys = int(np.count_nonzero(flags & PacketFlag.KEY))
    assert keys == 1 if name.startswith("open") else keys > 1
    assert not found.info.flags & StreamFlag.CONFORMS


def film(path, *options, frames=40):
    return make(path, *options, size="80x48", frames=frames)


def test_damaged_videos_are_rejected_with_a_reason(tmp_path):
    data = film(tmp_path / "a.mp4", *X264).read_bytes()
    middle = index_video(data, Limits(), hdr="keep").records[12]
    start, size = int(middle["offset"]), int(middle["size"])
    broken = data[: start + 8] + bytes(size - 8) + data[start + size :]
    for bad in (broken, data[: len(data) // 3], b"", b"#EXTM3U\nfile:secret.mp4\n"):
        with pytest.raises(SourceError) as caught:
            index_video(bad, Limits())
        assert caught.value.reason in list(Reason)
    with pytest.raises(SourceError, match="not contiguous") as caught:
        index_video(make(tmp_path / "a.ts", *X264, size="160x96").read_bytes(), Limits())
    assert caught.value.reason == Reason.NO_INDEX


def test_wrong_droppable_flag_is_detected(tmp_path, monkeypatch):
    data = film(tmp_path / "a.mp4", "-c:v", "libx264", "-bf", "0", "-g", "20").read_bytes()
    assert not is_whole(index_video(data, Limits()))
    honest = prove.packet_flags

    def lying(*arguments):
        flags = honest(*arguments)
        flags[5] |= np.uint32(PacketFlag.DROPPABLE)
        flags[25] |= np.uint32(PacketFlag.KEY)
        return flags

    monkeypatch.setattr(prove, "packet_flags", lying)
    found = index_video(data, Limits(), hdr="keep")
    assert is_whole(found)
    assert "decoded on their own" in found.notes[-1]


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    kinds = {"a.mp4": (*X264, "-pix_fmt", "yuv420p"), "b.webm": ("-c:v", "libvpx", "-pix_fmt", "yuv420p", "-g", "10"),
             "c.avi": ("-c:v", "mpeg4")}  # fmt: skip
    folder = tmp_path_factory.mktemp("clips")
    return {name: make(folder / name, *how, size="80x48", frames=20).read_bytes() for name, how in kinds.items()}


@pytest.fixture
def tars(clips, tmp_path):
    """Two tars as webdataset and tar write them; the second has a sample without a video, a broken one, and dots."""
    folder, video = tmp_path / "tars", clips["a.mp4"]
    members = [("one/000000.mp4", video), ("one/000000.cls", b"1"), ("none.txt", b"only words"),
               ("bad.mp4", video[:200]), ("c d.avi", clips["c.avi"])]  # fmt: skip
    tar_of(folder / "00001.tar", members)
    described = {"caption": "a cat", "nested": {"fps": 25}}
    with webdataset.TarWriter(str(folder / "00000.tar")) as writer:
        writer.write({"__key__": "000000", "mp4": video, "txt": "a dog runs", "cls": 3})
        writer.write({"__key__": "000001", "json": described, "webm": clips["b.webm"]})
    return folder


def test_dataset_of_foreign_tars_can_be_read(tars, clips, capsys):
    before = {path.name: path.read_bytes() for path in tars.iterdir()}
    assert main(["index", str(tars), "--workers", "1"]) == 3
    assert "2 rejected" in capsys.readouterr().out
    assert all((tars / name).read_bytes() == data for name, data in before.items())
    dataset = fastvid.open(tars)
    assert dataset.keys.to_pylist()[:3] == ["000000", "000001", "one/000000"]
    assert dataset.labels.tolist() == [3, -1, 1, -1]
    assert dataset.column("caption").to_pylist() == ["a dog runs", "a cat", None, None]
    assert json.loads(dataset.column("nested")[1].as_py()) == {"fps": 25}
    for video, name in zip(dataset, ("a.mp4", "b.webm", "a.mp4", "c.avi"), strict=True):
        with av.open(io.BytesIO(clips[name])) as container:
            count = sum(1 for _ in container.decode(video=0))
        assert video.num_frames == count == 20
        assert video.frames([0, 19, 7]).data.shape == (3, 48, 80, 3)
    rows = {row["source_id"]: row for row in ledger(tars)}
    reasons = {name: row["reason"] for name, row in rows.items() if row["reason"]}
    assert reasons == {"none": "no-video-stream", "bad": "broken-container"}
    assert len(rows) == 6
    assert any(note.startswith("whole") for note in rows["c d"]["warnings"])
    report = verify_dataset(str(tars), workers=1)
    assert (report.problems, report.samples) == ([], 4)
    facts = pq.read_table(tars / "00001.parquet").to_pylist()
    assert [row["whole"] for row in facts] == [False, True]
    assert not any(row["conforms"] for row in facts)


def test_out_links_the_tars_and_sidecars_can_be_rebuilt(tars, tmp_path):
    out = tmp_path / "out"
    (tars / "00000.parquet").write_bytes(b"PAR1 of another tool")
    with pytest.raises(UsageError, match="another tool"):
        index_tars([str(tars)], workers=1)
    index_tars([str(tars)], str(out), workers=1)
    assert (out / "data-000000.tar").read_bytes() == (tars / "00000.tar").read_bytes()
    assert not list(tars.glob("*.pkt"))
    sidecars = {path.name: path.read_bytes() for path in out.iterdir() if path.suffix in (".idx", ".pkt")}
    for name in sidecars:
        (out / name).unlink()
    assert main(["index", str(out), "--workers", "1"]) == 0
    assert {name: (out / name).read_bytes() for name in sidecars} == sidecars
    # Another video under the same name is detected when it is read, and when the index is rebuilt.
    tar = out / "data-000000.tar"
    data = bytearray(tar.read_bytes())
    tar.unlink()
    at = data.index(b"mdat") + 200
    data[at : at + 64] = bytes(64)
    tar.write_bytes(data)
    with pytest.raises(ChecksumError):
        fastvid.open(out)["000000"].frames([0])
    report = verify_dataset(str(out), workers=1)
    assert {(problem.check, problem.key) for problem in report.problems} >= {("tar", ""), ("packets", "000000")}


def test_repair_writes_the_sidecars_of_foreign_tars_and_compacting_refuses_them(tars, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["index", str(tars), "--out", str(out), "--workers", "1", "--allow-rejected"]) == 0
    names = [path.name for path in out.iterdir() if path.name.startswith("data-") and path.suffix != ".tar"]
    sidecars = {name: (out / name).read_bytes() for name in names}
    (out / "data-000000.idx").unlink()
    damaged = bytearray(sidecars["data-000001.pkt"])
    damaged[-3] ^= 1
    (out / "data-000001.pkt").write_bytes(damaged)
    assert main(["verify", str(out), "--workers", "1"]) == 1
    assert main(["verify", str(out), "--workers", "1", "--repair"]) == 0
    assert "rebuilt sidecars: data-000000, data-000001" in capsys.readouterr().out
    assert {name: (out / name).read_bytes() for name in names} == sidecars
    # Removing a sample hides it immediately; its bytes in another tool's tar stay.
    assert main(["remove", str(out), "--keys", "000000"]) == 0
    before = sorted(path.name for path in out.rglob("*"))
    assert main(["compact", str(out)]) == 2
    assert "tars of another tool" in capsys.readouterr().err
    assert sorted(path.name for path in out.rglob("*")) == before
    assert "000000" not in fastvid.open(out).keys.to_pylist()


def test_broken_tars_get_ledger_rows_and_no_video_is_an_error(tars, tmp_path):
    shutil.copy(tars / "00000.tar", tmp_path / "whole.tar")
    data = (tars / "00000.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(data[: len(data) // 2])
    report = index_tars([str(tmp_path)], str(tmp_path / "out"), workers=1)
    assert (report.packed, report.rejected) == (2, {Reason.BROKEN_CONTAINER: 1})
    with pytest.raises(JobError, match="broken-container"):
        index_tars([str(tmp_path / "cut.tar")], str(tmp_path / "none"), workers=1)
    with pytest.raises(UsageError, match="no tar"):
        index_tars([str(tmp_path / "out" / "generations")])
    tar = tmp_path / "out" / "data-000001.tar"
    tar.unlink()
    tar.write_bytes(data[: len(data) // 2])
    with pytest.raises(FormatError):
        rebuild(str(tmp_path / "out"), workers=1)
