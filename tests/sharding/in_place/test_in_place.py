"""Videos indexed in place, on a disk, in a store and on the web: what each shows, and files that change."""

import hashlib
import os
import shutil
import tarfile
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

import fastvid
from fastvid.cli.main import main
from fastvid.errors import ChecksumError, ConflictError, FastvidError, FormatError, StorageError, UsageError
from fastvid.format import writing
from fastvid.format.generations import read_generation
from fastvid.format.schema import StreamFlag
from fastvid.format.writing import pack_index
from fastvid.media.index_video import SMALL_FILE
from fastvid.media.reasons import Reason
from fastvid.sharding import in_place
from fastvid.sharding.change.edit import remove_samples
from fastvid.sharding.change.history import collect_garbage
from fastvid.sharding.change.repack import compact_shards
from fastvid.sharding.in_place import index_videos, reindex
from fastvid.sharding.job.ledger import read_ledger
from fastvid.sharding.verify.verify import repair_sidecars, verify_dataset
from fastvid.storage import LocalStorage, RemoteOptions, open_storage
from tests import makers
from tests.sharding.in_place import tools
from tests.sharding.shardtools import ffmpeg, turn
from tests.storage.faulty import FaultyServer

ENCODINGS = ("compact", "pyramid", "hevc", "hevc-cra", "vp9", "av1", "av1-layers", "mjpeg")


@pytest.fixture(scope="module")
def folder(videos, tmp_path_factory):
    found = tmp_path_factory.mktemp("films")
    for encoding in ENCODINGS:
        (found / encoding[0]).mkdir(exist_ok=True)
        shutil.copy(videos.painted(encoding).path, found / encoding[0] / f"{encoding}.mp4")
    return found


@pytest.fixture(scope="module", params=["none", "sample", "all"])
def indexed(folder, tmp_path_factory, request):
    out = tmp_path_factory.mktemp(request.param) / "set"
    report = index_videos([str(folder)], out, proof=request.param, samples_per_shard=3, workers=1)
    assert (report.packed, report.rejected) == (len(ENCODINGS), {})
    return out


@pytest.fixture
def mine(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "films")
    index_videos([str(tmp_path / "films")], tmp_path / "set", samples_per_shard=3, workers=1)
    return tmp_path


def flip(path, at=None):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)


def test_every_frame_is_the_one_that_ffmpeg_shows_by_plans_as_small_as_those_of_tars(videos, folder, indexed):
    dataset = fastvid.open(indexed)
    assert sorted(dataset.classes) == sorted({name[0] for name in ENCODINGS})
    assert not list(indexed.glob("*.tar"))
    for sample in range(len(dataset)):
        key = dataset.key(sample)
        assert tools.wrong_frames(dataset, sample, folder / f"{key.replace('_', '-')}.mp4") == [], key
    for encoding in ("compact", "pyramid", "hevc"):
        both = dataset[f"{encoding[0]}/{encoding}"], videos.painted(encoding)
        assert len({len(one.table.plan([5, 33, 61]).packets) for one in both}) == 1, encoding
    assert verify_dataset(str(indexed), workers=1).problems == []


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_a_replaced_file_is_an_error_that_names_it(mine, workers):
    path = mine / "films" / "c" / "compact.mp4"
    flip(path)
    clips = fastvid.ClipLoader(
        fastvid.open(mine / "set"), frames=fastvid.Dense(70, 1), spatial=fastvid.Resize(64), global_batch_size=8,
        shuffle=False, workers=fastvid.Workers(workers, num_threads=1),
    )  # fmt: skip
    with pytest.raises((StorageError, ChecksumError)) as caught:
        list(clips)
    assert str(path) in str(caught.value)
    assert "not the version that was indexed" in str(caught.value)
    assert "fastvid index" in caught.value.hint


def test_a_replaced_file_that_was_indexed_again_is_read_anew(videos, tmp_path):
    film, new = tmp_path / "films" / "a.mp4", tmp_path / "new.mp4"
    film.parent.mkdir()
    for name in ("compact", "intra"):
        new.write_bytes(videos.painted(name).data)
        new.replace(film)
        index_videos([str(film.parent)], tmp_path / name, workers=1)
        (video,) = fastvid.open(tmp_path / name)
        assert np.array_equal(video.frames([3]).data, fastvid.Video(videos.painted(name).path).frames([3]).data)


def test_a_file_of_another_time_is_refused_where_no_checksum_shows_a_change(videos, tmp_path):
    large = tmp_path / "films" / "large.mp4"
    large.parent.mkdir()
    # Larger than what is read whole, so that there are no checksums.
    makers.spread(videos.painted("compact").path, large, 5 << 20)
    index_videos([str(large.parent)], tmp_path / "set", proof="none", workers=1)
    dataset = fastvid.open(tmp_path / "set")
    assert dataset.shard(0).info(0).flags & StreamFlag.UNCHECKED
    before = dataset[0].frames([0, 1]).data
    os.utime(large, (1, 1))
    with pytest.raises(StorageError, match="not the version that was indexed") as caught:
        fastvid.open(tmp_path / "set")[0].frames([0, 1])
    assert "fastvid index" in caught.value.hint
    assert reindex(str(tmp_path / "set")).changed == 1
    assert np.array_equal(fastvid.open(tmp_path / "set")[0].frames([0, 1]).data, before)


def test_changed_files_are_indexed_again_and_keep_their_labels(mine, videos):
    out, path = mine / "set", mine / "films" / "c" / "compact.mp4"
    labels = dict(zip(fastvid.open(out).keys.to_pylist(), fastvid.open(out).labels.tolist(), strict=True))
    shutil.copy(videos.painted("pyramid", frames=41).path, path)
    found = reindex(str(out))
    assert (found.changed, len(found.shards), found.generation) == (1, 1, 2)
    dataset = fastvid.open(out)
    sample = dataset.find("c/compact")
    assert dataset.num_frames[sample] == 41
    assert tools.wrong_frames(dataset, sample, path) == []
    assert dict(zip(dataset.keys.to_pylist(), dataset.labels.tolist(), strict=True)) == labels
    assert verify_dataset(str(out), workers=1).problems == []
    shards = {row["shard"] for row in read_ledger(LocalStorage(out))[0].to_pylist()}
    assert shards == {shard.name for shard in dataset.generation.shards}
    assert reindex(str(out)).shards == {}
    path.write_bytes(b"no video")
    with pytest.raises(FormatError, match="can no longer be indexed"):
        reindex(str(out))
    assert read_generation(LocalStorage(out))[1].number == 2


@pytest.mark.parametrize("other", ["compact", "index"])
def test_shards_that_are_replaced_meanwhile_are_not_indexed_again(mine, videos, monkeypatch, other):
    def index_and_change(*args):
        monkeypatch.undo()
        parts = index(*args)
        if other == "compact":
            remove_samples(LocalStorage(mine / "set"), ["c/compact"])
            compact_shards(LocalStorage(mine / "set"))
        else:
            shutil.copy(videos.painted("pyramid", frames=42).path, path)
            reindex(str(mine / "set"))
        return parts

    path, index = mine / "films" / "c" / "compact.mp4", in_place._index
    shutil.copy(videos.painted("pyramid", frames=41).path, path)
    monkeypatch.setattr(in_place, "_index", index_and_change)
    with pytest.raises(ConflictError):
        reindex(str(mine / "set"))
    assert verify_dataset(str(mine / "set"), workers=1).problems == []


def test_videos_that_were_moved_are_found_below_another_root(mine, monkeypatch):
    before = fastvid.open(mine / "set")[0].frames([3]).data
    (mine / "films").rename(mine / "moved")
    hint = r"does not exist[\s\S]*`fastvid\.open\(DIR, root=FOLDER\)`.*`fastvid index DIR --root FOLDER`"
    with pytest.raises(StorageError, match=hint):
        fastvid.open(mine / "set")[1].frames([3])
    monkeypatch.chdir(mine)
    moved = fastvid.open(mine / "set", root="moved")
    assert np.array_equal(moved[0].frames([3]).data, before)
    clips = fastvid.ClipLoader(
        moved, frames=fastvid.Segments(2), spatial=fastvid.Resize(32), global_batch_size=4,
        workers=fastvid.Workers("process", num_threads=1),
    )  # fmt: skip
    assert sum(len(batch.position) for batch in clips) == len(moved)
    assert main(["index", str(mine / "set"), "--root", "moved"]) == 0
    assert np.array_equal(fastvid.open(mine / "set")[0].frames([3]).data, before)
    assert verify_dataset(str(mine / "set"), workers=1).problems == []


@pytest.mark.parametrize(
    ("named", "root"),
    [("films", "films"), ("films/c", "films/c"), ("films/c/compact.mp4", "films/c"), ("films/c/..", "films")],
)
def test_the_root_is_the_folder_that_was_named(named, root, videos, tmp_path, monkeypatch):
    place = tmp_path / "\udcff"  # no UTF-8
    (place / "films" / "c").mkdir(parents=True)
    monkeypatch.chdir(place)
    shutil.copy(videos.painted("compact").path, "films/c/compact.mp4")
    index_videos(named, "set", workers=1)
    assert read_generation(LocalStorage("set"))[1].root == os.path.abspath(root)
    os.rename(root, "moved")
    assert fastvid.open("set", root="moved")[0].frames([0]).data.any()
    with pytest.raises(UsageError, match="not below the new root") as caught:
        reindex("set", root="elsewhere")
    assert os.path.abspath(root) in caught.value.hint
    reindex("set", root="moved")
    assert read_generation(LocalStorage("set"))[1].root == os.path.abspath("moved")
    assert fastvid.open("set")[0].frames([0]).data.any()


def test_files_of_removed_samples_may_be_gone(mine, videos):
    out, dataset = mine / "set", fastvid.open(mine / "set")
    gone = [dataset.key(sample) for sample in range(4)]  # all of the first shard, and one of the second
    remove_samples(LocalStorage(out), gone)
    for key in gone:
        (mine / "films" / f"{key.replace('_', '-')}.mp4").unlink()
    assert verify_dataset(str(out), workers=1).problems == verify_dataset(str(out), sample=9, workers=1).problems == []
    assert reindex(str(out)).shards == {}
    changed = mine / "films" / f"{dataset.key(4).replace('_', '-')}.mp4"
    shutil.copy(videos.painted("pyramid", frames=41).path, changed)
    assert list(reindex(str(out)).shards) == ["data-000001"]
    (mine / "films").rename(mine / "moved")
    assert None in reindex(str(out), root=str(mine / "moved")).shards.values()
    now = fastvid.open(out)
    assert (now.keys.to_pylist(), now.num_frames[0]) == (dataset.keys.to_pylist()[4:], 41)
    assert (now.annotations.num_rows, len(now.generation.shards)) == (4, 2)
    assert verify_dataset(str(out), workers=1).problems == []
    remove_samples(LocalStorage(out), now.keys.to_pylist())
    shutil.rmtree(mine / "moved")
    reindex(str(out), root=str(mine / "elsewhere"))
    assert read_generation(LocalStorage(out))[1].shards == ()


def test_commands_of_a_dataset_work_without_its_videos_inside(mine):
    out = mine / "set"
    keys = fastvid.open(out).keys.to_pylist()
    remove_samples(LocalStorage(out), keys=[keys[0]])
    compact_shards(LocalStorage(out))
    collect_garbage(LocalStorage(out))
    assert fastvid.open(out).keys.to_pylist() == keys[1:]
    assert not [path for path in out.glob("data-*") if keys[0].encode() in path.read_bytes()]
    shutil.copytree(out, mine / "copy")
    assert main(["subset", str(out), "--share", "0.5", "--out", str(mine / "half")]) == 0
    assert main(["merge", str(out), str(mine / "half"), "--prefix", "a,b", "--out", str(mine / "both")]) == 0
    for name in ("set", "copy", "half", "both"):
        assert verify_dataset(str(mine / name), workers=1).problems == [], name
    dataset = fastvid.open(mine / "both")
    assert len(dataset) == len(keys) - 1 + len(fastvid.open(mine / "half"))
    sample = dataset.find("a/h/hevc")
    assert tools.wrong_frames(dataset, sample, mine / "films" / "h" / "hevc.mp4", most=5) == []


def test_verify_finds_damage_and_repairs_sidecars(mine):
    out = mine / "set"
    flip(out / "data-000000.pkt")
    report = verify_dataset(str(out), workers=1)
    assert {problem.check for problem in report.problems} == {"pkt"}
    assert repair_sidecars(str(out), report) == ("data-000000",)
    assert verify_dataset(str(out), workers=1).problems == []
    flip(next(out.glob("*.files")))
    assert {problem.check for problem in verify_dataset(str(out), workers=1).problems} == {"files"}
    damaged = fastvid.open(out)
    with pytest.raises(FormatError, match="not the one that was indexed"):
        [damaged[sample].frames([0]) for sample in range(len(damaged))]


def test_damaged_packet_tables_are_indexed_again_as_their_hint_says(mine, capsys):
    out = mine / "set"
    flip(out / "data-000000.pkt", -1)
    dataset = fastvid.open(out)
    with pytest.raises(FormatError, match="packet table does not match") as caught:
        [dataset[sample].frames([0]) for sample in range(len(dataset))]
    assert "run `fastvid index DIR`" in caught.value.hint
    assert main(["index", str(out)]) == 0
    assert "indexed 1 shard again" in capsys.readouterr().out
    assert verify_dataset(str(out), workers=1).problems == []
    (out / "data-000002.pkt").unlink()
    assert main(["index", str(out)]) == 0
    assert verify_dataset(str(out), workers=1).problems == []
    flip(out / "data-000001.pkt", 20)  # in what all tables share
    with pytest.raises(FormatError):
        [fastvid.open(out)[sample].frames([0]) for sample in range(len(dataset))]
    assert len(reindex(str(out)).shards) == 1
    assert verify_dataset(str(out), workers=1).problems == []
    capsys.readouterr()
    for words in (
        ["--prove", "all"],
        ["--annotations", "csv:rows.csv"],
        ["--prove", "none", "--out", str(mine / "new")],
    ):
        assert main(["index", str(out), *words]) == 2
        assert "indexed again with its own annotations" in capsys.readouterr().err


def test_parts_and_several_workers_make_the_same_dataset(mine):
    for part, workers in (("1/2", 1), ("0/2", 2)):
        index_videos([str(mine / "films")], mine / "parts", part=part, samples_per_shard=3, workers=workers)
    index_videos([str(mine / "films")], mine / "parts", samples_per_shard=3, workers=1)
    for path in (mine / "set").glob("*.pkt"):
        assert (mine / "parts" / path.name).read_bytes() == path.read_bytes()


def test_wrong_arguments_are_told(folder, tmp_path):
    with pytest.raises(UsageError, match="invalid proof"):
        index_videos([str(folder)], tmp_path / "set", proof="some")
    table = tmp_path / "urls.csv"
    table.write_text("path\nhttps://example.com/film.mp4?token=secret\n")
    with pytest.raises(UsageError, match="signature"):
        index_videos([], tmp_path / "set", annotations=f"csv:{table}")
    assert main(["index", str(folder)]) == 2


@pytest.mark.parametrize("proof", ["none", "sample", "all"])
def test_rgb_pictures_are_rejected_and_a_wrong_tag_of_rgb_is_ignored(proof, tmp_path):
    films = tmp_path / "films"
    films.mkdir()
    picture = ("-f", "lavfi", "-i", "testsrc=size=96x96:rate=25", "-frames:v", "5")
    tag = ("-bsf:v", "h264_metadata=matrix_coefficients=0", "-movflags", "+write_colr")
    ffmpeg(*picture, "-c:v", "libx264rgb", str(films / "rgb.mp4"))
    ffmpeg(*picture, "-c:v", "libx264", "-pix_fmt", "yuv420p", str(films / "plain.mp4"))
    ffmpeg(*picture, "-c:v", "libx264", "-pix_fmt", "yuv420p", *tag, str(films / "tagged.mp4"))
    out = tmp_path / "set"
    assert index_videos([str(films)], out, proof=proof, workers=1).rejected == {"no-index": 1}
    rows = {row["source_id"]: row for row in pq.read_table(out / "ledger.parquet").to_pylist()}
    assert "its pictures are gbrp" in rows["rgb.mp4"]["message"]
    dataset = fastvid.open(out)
    tagged, plain = (dataset[key].frames([0, 4]).data for key in ("tagged", "plain"))
    np.testing.assert_array_equal(tagged, plain)
    assert main(["shard", str(films), "--out", str(tmp_path / "copied"), "--profile", "copy", "--workers", "1"]) == 3
    copied = fastvid.open(tmp_path / "copied")
    np.testing.assert_array_equal(copied["tagged"].frames([0, 4]).data, plain)


def test_a_file_of_more_than_4_gib(videos, tmp_path):
    path = tmp_path / "films" / "huge.mp4"
    path.parent.mkdir()
    makers.spread(videos.painted("compact").path, path, 5 << 30)
    index_videos([str(path.parent)], tmp_path / "set", workers=1)
    shown, frames = tools.played(videos.painted("compact").path), [0, 17, 44, 69]
    assert tools.planned(fastvid.open(tmp_path / "set"), 0, frames) == [shown[frame] for frame in frames]
    assert path.stat().st_size > 5 << 30


@pytest.mark.parametrize("indexed", ["none"], indirect=True)
def test_samples_are_written_exported_and_encoded_again(folder, indexed, tmp_path):
    stored = (folder / "p" / "pyramid.mp4").read_bytes()
    assert main(["get", str(indexed), "p/pyramid", "-o", str(tmp_path / "one.mp4")]) == 0
    assert (tmp_path / "one.mp4").read_bytes() == stored
    assert main(["export", str(indexed), "--to", "wds", "--out", str(tmp_path / "wds")]) == 0
    with tarfile.open(next((tmp_path / "wds").rglob("*.tar"))) as tar:
        names = {name.replace("_", "-") for name in tar.getnames() if name.endswith(".mp4")}
    assert names
    assert names <= {f"{encoding[0]}/{encoding}.mp4" for encoding in ENCODINGS}
    some = tmp_path / "some"
    assert main(["subset", str(indexed), "--where", "key like 'p/%' or key like 'c/%'", "--out", str(some)]) == 0
    assert main(["transcode", str(some), "--out", str(tmp_path / "new"), "--short-side", "64", "--workers", "1"]) == 0
    new = fastvid.open(tmp_path / "new")
    assert sorted(new.keys.to_pylist()) == sorted(fastvid.open(some).keys.to_pylist())
    assert new.classes == fastvid.open(indexed).classes


def test_parts_of_files_are_encoded_again_by_get_and_transcode(folder, tmp_path):
    table, out = tmp_path / "clips.csv", str(tmp_path / "set")
    table.write_text("path,start,end\nc/compact.mp4,0.4,1.2\n")
    index_videos([str(folder)], out, annotations=f"csv:{table}", workers=1)
    assert main(["get", out, fastvid.open(out).key(0), "-o", str(tmp_path / "part.mp4")]) == 0
    assert len(tools.played(tmp_path / "part.mp4")) == 20
    assert main(["export", out, "--to", "hf", "--out", str(tmp_path / "hf")]) == 2
    assert main(["transcode", out, "--out", str(tmp_path / "new"), "--short-side", "64", "--workers", "1"]) == 0
    assert fastvid.open(tmp_path / "new").num_frames.tolist() == [20]


def test_videos_are_added_in_place(mine, videos):
    out = mine / "set"
    before = fastvid.open(out).keys.to_pylist()
    more = mine / "more" / "x"
    more.mkdir(parents=True)
    shutil.copy(videos.painted("vp9-intra").path, more / "new.mp4")
    assert main(["add", str(out), str(mine / "more"), "--workers", "1"]) == 0
    dataset = fastvid.open(out)
    assert sorted(dataset.keys.to_pylist()) == sorted([*before, "x/new"])
    assert not list(out.glob("*.tar"))
    assert tools.wrong_frames(dataset, dataset.find("x/new"), more / "new.mp4", most=5) == []
    assert tools.wrong_frames(dataset, dataset.find("p/pyramid"), mine / "films/p/pyramid.mp4", most=5) == []
    assert dataset.generation.root == str(mine)
    assert main(["add", str(out), str(mine / "more"), "--workers", "1"]) == 0
    assert len(fastvid.open(out)) == len(before) + 1
    assert verify_dataset(str(out), workers=1).problems == []


def test_blocked_bytes_are_refused_and_copies_found_though_nothing_was_hashed(mine, caplog, capsys):
    out, path, other = str(mine / "set"), mine / "films" / "c" / "compact.mp4", mine / "other"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert main(["remove", out, "--sha256", digest, "--reason", "ticket"]) == 0
    assert "8 samples of unknown SHA-256" in caplog.text
    assert "name them by --keys or --source" in caplog.text
    other.mkdir()
    shutil.copy(path, other / "again.mp4")
    assert main(["add", out, str(other), "--workers", "1"]) == 3
    assert "blocked: its bytes were taken down" in capsys.readouterr().out
    shutil.copy(path, mine / "films" / "v" / "vp9.mp4")
    with pytest.raises(FormatError, match="its bytes were taken down"):
        reindex(out)
    assert read_generation(LocalStorage(out))[1].number == 1
    copies = mine / "copies"
    copies.mkdir()
    for name in "ab":
        shutil.copy(path, copies / f"{name}.mp4")
    index_videos([str(mine / "films" / "h")], mine / "new", workers=1)
    assert main(["add", str(mine / "new"), str(copies), "--drop-duplicates", "--workers", "1"]) == 0
    assert set("ab") & set(fastvid.open(mine / "new").keys.to_pylist()) == {"a"}


def test_a_takedown_leaves_no_name_in_the_dataset(mine):
    out = mine / "set"
    takedown = ["remove", "--source", "c/compact.mp4", "--reason", "asked to"]
    for name, *words in (takedown, ["compact"], ["gc", "--yes"]):
        assert main([name, str(out), *words]) == 0
    assert "c/compact" not in fastvid.open(out).keys.to_pylist()
    assert not [path for path in out.rglob("*") if path.is_file() and b"c/compact" in path.read_bytes()]
    receipt = next((out / "removals").glob("*.json"))
    assert main(["verify", str(out), "--receipt", str(receipt), "--name", "c/compact"]) == 0


def test_a_dataset_of_an_earlier_version_says_what_is_unknown_until_it_is_indexed_again(
    videos, tmp_path, monkeypatch, caplog, capsys
):
    """fastvid 0.2 stored neither how pictures are turned nor when frames are shown."""
    (tmp_path / "films").mkdir()
    turn(videos.painted("intra").path, tmp_path / "films" / "turned.mp4")

    def as_before(samples, streams, content, *, described):
        plain = [replace(one, info=one.info.decoded) for sample in samples for one in sample.streams]
        return pack_index([replace(samples[0], streams=tuple(plain))], streams, content)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "pack_index", as_before)
        index_videos([str(tmp_path / "films")], tmp_path / "set", workers=1)
    assert fastvid.open(tmp_path / "set")[0].frames([0, 1]).data.shape == (2, 96, 160, 3)
    fastvid.open(tmp_path / "set")[0]
    assert [record.message.count("indexed by fastvid 0.2") for record in caplog.records] == [1]
    with FaultyServer(LocalStorage(tmp_path / "set")) as server:  # which takes no files
        assert main(["index", server.url]) == 1
        assert "fastvid index DIR --out NEW" in capsys.readouterr().err
        for _ in range(2):
            assert main(["index", server.url, "--out", str(tmp_path / "new")]) == 0
    assert main(["index", str(tmp_path / "set")]) == 0
    caplog.clear()
    for name in ("set", "new"):
        dataset = fastvid.open(tmp_path / name)
        assert dataset[0].frames([0, 1]).data.shape == (2, 160, 96, 3)
        assert dataset.keys.to_pylist() == ["turned"]
    assert not [record for record in caplog.records if "0.2" in record.message]


def check_frames(out, folder):
    """Compare 12 frames of each sample, each decoded from its own plan, with those of its file."""
    dataset = fastvid.open(out)
    for sample in range(len(dataset)):
        path, video = folder / dataset.column("source_id")[sample].as_py(), dataset[sample]
        assert tools.wrong_frames(dataset, sample, path, most=12) == [], path
        # Its pictures can be converted, too.
        assert video.frames([0]).data.shape == (1, video.height & ~1, video.width & ~1, 3), path


@pytest.mark.parametrize(
    ("kind", "proof", "every", "least"),
    [
        pytest.param("clean", "none", 1, 47, marks=pytest.mark.soak),
        pytest.param("clean", "sample", 1, 47, marks=pytest.mark.soak),
        pytest.param("odd", "sample", 1, 95, marks=pytest.mark.soak),
        pytest.param("odd", "all", 12, 8, marks=pytest.mark.soak),
        ("clean", "none", 12, 4),
        ("odd", "sample", 12, 8),
    ],
)
def test_every_frame_is_the_one_that_a_player_shows(footage, tmp_path, kind, proof, every, least):
    folder = tmp_path / kind
    folder.mkdir()
    for path in sorted((footage / kind).iterdir())[::every]:
        shutil.copyfile(path, folder / path.name)
    report = index_videos([str(folder)], tmp_path / "set", proof=proof, hdr="keep", workers=2)
    assert report.packed >= least
    check_frames(tmp_path / "set", folder)
    assert verify_dataset(str(tmp_path / "set"), workers=2).problems == []


def test_bad_files_are_rejected_or_right(footage, tmp_path):
    good = next(path for path in sorted((footage / "clean").iterdir()) if path.suffix == ".mp4")
    report = index_videos([str(footage / "bad"), str(good)], tmp_path / "set", workers=2)
    assert report.rejected
    assert Reason.CRASHED not in report.rejected
    check_frames(tmp_path / "set", footage)


GAP = 2 * SMALL_FILE


@pytest.fixture
def film(videos, tmp_path):
    """An MP4 of more bytes than are read whole, most of which are no packet."""
    path = tmp_path / "films" / "film.mp4"
    path.parent.mkdir()
    makers.spread(videos.painted("compact", frames=200).path, path, GAP)
    return path


def test_videos_that_changed_are_proven_again_as_much_as_before(film, tmp_path):
    proofs = ("all", "none")
    for proof in proofs:
        index_videos(film.parent, tmp_path / proof, proof=proof, workers=1)
    both = str(tmp_path / "both")
    assert main(["merge", *(str(tmp_path / proof) for proof in proofs), "--prefix", "all,none", "--out", both]) == 0
    film.touch()
    assert reindex(both, workers=1).changed
    dataset = fastvid.open(both)
    for proof, flags in zip(proofs, (StreamFlag.NONE, StreamFlag.UNCHECKED), strict=True):
        assert dataset[f"{proof}/film"].info.flags & StreamFlag.UNCHECKED == flags


@pytest.fixture
def bucket(s3, film, videos):
    """The URL of a folder in a store that contains two videos."""
    url = f"s3://{s3.bucket()}/films"
    for name, path in (("c/film", film), ("p/pyramid", videos.painted("pyramid").path)):
        open_storage(url).write(f"{name}.mp4", path.read_bytes())
    return url


@pytest.mark.parametrize("proof", ["none", "sample"])
def test_a_bucket_is_indexed_and_read_in_place(bucket, film, videos, tmp_path, proof):
    report = index_videos([bucket], tmp_path / "set", proof=proof, workers=1)
    assert (report.packed, report.rejected) == (2, {})
    dataset = fastvid.open(tmp_path / "set")
    assert dataset.classes == ("c", "p")
    for key, path in (("c/film", film), ("p/pyramid", videos.painted("pyramid").path)):
        assert tools.wrong_frames(dataset, dataset.find(key), path, most=10) == []
    assert verify_dataset(str(tmp_path / "set"), workers=1).problems == []
    shutil.rmtree(film.parent)
    clips = fastvid.ClipLoader(
        dataset, frames=fastvid.Segments(2), spatial=fastvid.Resize(32), global_batch_size=2,
        workers=fastvid.Workers("process", num_threads=1),
    )  # fmt: skip
    assert sum(len(batch.position) for batch in clips) == 2
    another = open_storage(bucket, options=RemoteOptions(concurrency=1))  # as if of another process
    another.write("p/pyramid.mp4", another.read("p/pyramid.mp4")[::-1])
    for told in ("replaced|not the version", "not the version that was indexed"):
        with pytest.raises(FastvidError, match=told):
            fastvid.open(tmp_path / "set")["p/pyramid"].frames([3])


def test_an_object_that_was_replaced_is_an_error_also_of_an_index_in_the_store(bucket, videos):
    out = bucket.rpartition("/")[0] + "/index"
    index_videos([bucket], out, proof="none", workers=1)
    assert fastvid.open(out)["c/film"].frames([3]).data.shape == (1, 96, 160, 3)
    assert not [name for name in open_storage(out).list() if name.endswith((".tar", ".mp4"))]
    store = open_storage(bucket)
    data = bytearray(store.read("c/film.mp4"))
    data[-1000] ^= 1
    store.write("c/film.mp4", bytes(data))
    with pytest.raises(StorageError, match=r"not the version that was indexed.*film\.mp4"):
        fastvid.open(out)["c/film"].frames([3])
    store.write("c/film.mp4", videos.painted("compact", frames=200).path.read_bytes())
    assert reindex(out).changed == 1
    assert fastvid.open(out)["c/film"].frames([3]).data.shape == (1, 96, 160, 3)


def test_a_film_on_a_web_server_is_indexed_by_few_small_ranges(film, tmp_path):
    data = film.read_bytes()
    with FaultyServer() as server:
        server.files["film.mp4"] = data
        table = tmp_path / "films.csv"
        table.write_text(f"path\n{server.url}/film.mp4\n")
        index_videos([], tmp_path / "set", annotations=f"csv:{table}", proof="none", workers=1)
        gets = [seen for seen in server.log if seen.method == "GET"]
        assert all(seen.range is not None for seen in gets)
        assert sum(seen.body for seen in gets) < len(data) / 10
        assert len(gets) < 20
        before = len(server.log)
        dataset = fastvid.open(tmp_path / "set")
        dataset[0].frames([100])
        mine = server.log[before:]
        assert sum(seen.method == "GET" for seen in mine) <= 2
        assert sum(seen.body for seen in mine) < 200_000
        assert tools.wrong_frames(dataset, 0, film, most=5) == []
