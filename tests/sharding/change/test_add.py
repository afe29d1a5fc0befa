"""`fastvid add`: adds new sources to an existing dataset exactly once."""

import itertools
import os
import shutil

import pytest

from fastvid.cli.main import main
from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.format.generations import read_generation
from fastvid.media.ffmpeg import find_ffmpeg
from fastvid.sharding.change.add import add_sources
from fastvid.sharding.change.edit import remove_samples
from fastvid.sharding.change.history import collect_garbage
from fastvid.sharding.change.repack import compact_shards
from fastvid.sharding.in_place import index_videos
from fastvid.sharding.job.job import run_job
from fastvid.sharding.job.ledger import read_ledger, write_ledger
from fastvid.sharding.sets import merge_datasets
from fastvid.sharding.verify.verify import verify_dataset
from fastvid.storage import LocalStorage
from tests import forks
from tests.sharding.shardtools import make, other_build
from tests.storage.faulty import FaultyServer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    make(folder / "videos/jump/a.mp4", frames=9)
    make(folder / "videos/run/b.mp4", frames=10)
    (folder / "videos/run/broken.mp4").write_bytes(b"\0\0\0\x18ftypisom" + bytes(64))
    run_job(str(folder / "videos"), str(folder / "data"), workers=1)
    return folder


@pytest.fixture
def place(base, tmp_path):
    """A copy of the base that tests may change. The videos' paths differ from those in the ledger."""
    shutil.copytree(base, tmp_path / "base")
    return tmp_path / "base"


def ids(store):
    return sorted(Dataset(store.url).column("source_id").to_pylist())


def test_new_sources_get_new_shards_and_old_ones_stay(place):
    store = LocalStorage(place / "data")
    before = {name: store.read(name) for name in store.list("data-")}
    make(place / "videos/fly/c.mp4", frames=11)
    make(place / "videos/jump/d.mp4", frames=12)
    done = add_sources(store.url, str(place / "videos"), workers=1)
    assert (done.known, done.generation, done.report.packed) == (3, 2, 2)
    assert "source_id" not in repr(done), "the ledger is not for a shell"
    assert ids(store) == ["fly/c.mp4", "jump/a.mp4", "jump/d.mp4", "run/b.mp4"]
    assert {name: store.read(name) for name in before} == before
    now = Dataset(store.url)
    assert [shard.name for shard in now.generation.shards] == ["data-000000", "data-000001"]
    assert now.classes == ("jump", "run", "fly"), "new classes go behind the known ones"
    labels = dict(zip(now.column("source_id").to_pylist(), now.labels.tolist(), strict=True))
    assert labels == {"jump/a.mp4": 0, "run/b.mp4": 1, "fly/c.mp4": 2, "jump/d.mp4": 0}
    assert len(Dataset(store.url, generation=1)) == 2
    ledger = {row["source_id"]: row for row in read_ledger(store)[0].to_pylist()}
    assert len(ledger) == 5
    assert (ledger["fly/c.mp4"]["shard"], ledger["jump/a.mp4"]["shard"]) == ("data-000001", "data-000000")
    assert verify_dataset(store.url, workers=1).ok
    assert not store.list("ledger-parts/")

    again = add_sources(store.url, str(place / "videos"), workers=1)
    assert (again.known, again.generation, again.report.packed) == (5, 2, 0)
    # The job that made the dataset still recognises it.
    os.remove(place / "videos/fly/c.mp4")
    os.remove(place / "videos/jump/d.mp4")
    assert run_job(str(place / "videos"), store.url, workers=1).packed == 4


def test_an_addition_that_0_2_began_is_made_anew(place):
    store = LocalStorage(place / "data")
    store.write("ledger-parts/add/ledger-parts/job.json", b'{"seed": 0, "samples_per_shard": 1000}')
    store.write("ledger-parts/add/data-000000.tar", b"a shard of 0.2, which it would have copied")
    make(place / "videos/fly/c.mp4", frames=11)
    assert add_sources(store.url, str(place / "videos"), workers=1).report.packed == 1
    assert ids(store) == ["fly/c.mp4", "jump/a.mp4", "run/b.mp4"]
    assert not store.list("ledger-parts/")
    assert verify_dataset(store.url, workers=1).ok


def test_removed_samples_are_not_added_again(place):
    store = LocalStorage(place / "data")
    remove_samples(store, ["jump/a"])
    compact_shards(store)
    collect_garbage(store)
    make(place / "videos/jump/c.mp4", frames=11)
    add_sources(store.url, str(place / "videos"), workers=1)
    assert ids(store) == ["jump/c.mp4", "run/b.mp4"]


def test_rejected_sources_are_retried_on_request(place, capsys):
    store = LocalStorage(place / "data")
    shutil.copy(place / "videos/run/b.mp4", place / "videos/run/broken.mp4")
    assert add_sources(store.url, str(place / "videos"), workers=1).known == 3
    assert main(["add", store.url, str(place / "videos"), "--workers", "1", "--retry-rejected"]) == 0
    said = capsys.readouterr().out
    assert "2 already known" in said
    assert "1 packed" in said
    assert "run/broken.mp4" in ids(store)
    rows = {row["source_id"]: row["status"] for row in read_ledger(store)[0].to_pylist()}
    assert rows == {"jump/a.mp4": "packed", "run/b.mp4": "packed", "run/broken.mp4": "packed"}


def test_another_file_under_a_known_name_is_refused_or_renamed(place, base):
    store = LocalStorage(place / "data")
    make(place / "more/jump/a.mp4", frames=14)
    # A known file is recognised under another name, by its path in the ledger.
    done = add_sources(store.url, str(base / "videos/jump"), workers=1)
    assert (done.known, done.report.packed) == (1, 0)
    with pytest.raises(UsageError, match=r"'jump/a\.mp4' is in the dataset already, from another file"):
        add_sources(store.url, str(place / "more"), workers=1)
    done = add_sources(store.url, str(place / "more"), prefix="jump", workers=1)
    assert done.report.packed == 1
    assert ids(store) == ["jump/a.mp4", "jump/jump/a.mp4", "run/b.mp4"]
    assert len(set(Dataset(store.url).keys.to_pylist())) == 3


def test_videos_of_a_list_of_urls_are_known_by_their_url_without_fragment(tmp_path):
    make(tmp_path / "a.mp4", frames=9)
    out, table = str(tmp_path / "data"), tmp_path / "urls.csv"
    with FaultyServer() as server:
        server.files |= {name: (tmp_path / "a.mp4").read_bytes() for name in ("a.mp4", "b.mp4")}
        table.write_text(f"path\n{server.url}/a.mp4#t=0.1\n")
        assert main(["index", "--annotations", f"csv:{table}", "--out", out]) == 0
        table.write_text(f"path\n{server.url}/a.mp4#t=0.2\n{server.url}/b.mp4\n")
        assert main(["add", out, "--annotations", f"csv:{table}"]) == 0
        assert len(ids(LocalStorage(out))) == 2
        # Also where the first list named the URL as a source.
        assert main(["index", f"{server.url}/b.mp4#t=0.1", "--out", out + "2"]) == 0
        assert main(["add", out + "2", "--annotations", f"csv:{table}"]) == 0
        assert len(ids(LocalStorage(out + "2"))) == 2


def test_cuts_that_left_the_list_go_and_may_come_back(place, capsys):
    store, scenes = LocalStorage(place / "data"), place / "scenes.csv"
    make(place / "films/film.mp4", frames=50)
    words = ["add", store.url, str(place / "films"), "--annotations", f"csv:{scenes}", "--workers", "1", "--sync"]
    for cuts in ((0, 0.6, 1.2), (0, 0.8, 1.2), (0, 0.6, 1.2)):
        pairs = "".join(f"film.mp4,{start},{end}\n" for start, end in itertools.pairwise(cuts))
        scenes.write_text(f"path,start,end\n{pairs}")
        assert main(words) == 0
        named = [f"film.mp4#{start:g}-{end:g}" for start, end in itertools.pairwise(cuts)]
        assert ids(store) == [*named, "jump/a.mp4", "run/b.mp4"]
    assert "2 removed, because they left the list: film.mp4#0-0.8, film.mp4#0.8-1.2" in capsys.readouterr().out
    assert verify_dataset(store.url, workers=1).ok


def test_a_file_of_the_same_size_is_compared_by_its_bytes(tmp_path, caplog):
    videos, store = tmp_path / "videos", LocalStorage(tmp_path / "data")
    video, other = make(videos / "a.mp4", frames=9), make(videos / "b.mp4", frames=9)
    run_job(str(videos), store.url, workers=1)
    tags = {row["source_id"]: row["source_tag"] for row in read_ledger(store)[0].to_pylist()}
    tars = {name: store.read(name) for name in store.list("data-")}
    # The same bytes with another time, as copies have; then other bytes of the same size.
    for path in (video, other):
        os.utime(path, ns=(1, 1))
    again = LocalStorage(tmp_path / "again")
    run_job(str(videos), again.url, workers=1)
    assert {name: again.read(name) for name in tars} == tars
    assert again.read("dataset.json") == store.read("dataset.json")
    assert main(["shard", str(videos), "--out", store.url, "--workers", "1"]) == 0
    assert "since then 2 changed (a.mp4, b.mp4)" in caplog.text
    assert add_sources(store.url, str(videos), workers=1, dry_run=True).changed == []
    assert {row["source_id"]: row["source_tag"] for row in read_ledger(store)[0].to_pylist()} == tags
    done = add_sources(store.url, str(videos), workers=1)
    assert (done.known, done.changed, done.generation) == (2, [], 1)
    assert {row["source_tag"] for row in read_ledger(store)[0].to_pylist()} == {"modified-1"}
    content = store.read("ledger.parquet")
    store.delete("ledger.parquet")
    assert add_sources(store.url, str(videos), workers=1, dry_run=True).known == 2
    assert not store.exists("ledger.parquet")
    store.write("ledger.parquet", content)
    data = bytearray(video.read_bytes())
    data[-1] ^= 1  # in the encoder's name
    video.write_bytes(data)
    done = add_sources(store.url, str(videos), workers=1)
    assert (done.known, done.changed, done.report.packed) == (1, ["a.mp4"], 1)
    assert ids(store) == ["a.mp4", "b.mp4"]
    assert {name: store.read(name) for name in tars} == tars


def test_videos_that_left_their_folder_go_unless_they_are_most(place, capsys):
    store, videos = LocalStorage(place / "data"), place / "videos"
    rows = read_ledger(store)[0].to_pylist()
    write_ledger(store, [row | {"path": str(videos / row["source_id"])} for row in rows], {})
    words = ["add", store.url, "--workers", "1", "--allow-rejected"]
    make(place / "more/c.mp4", frames=14)
    assert main([*words, str(place / "more"), "--sync"]) == 0
    assert ids(store) == ["c.mp4", "jump/a.mp4", "run/b.mp4"], "only videos below the source can leave it"
    for video in (videos / "jump/a.mp4", videos / "run/b.mp4"):
        video.unlink()
    assert main([*words, str(videos), "--sync"]) == 2
    assert "2 of 3 videos of the dataset left the list" in capsys.readouterr().err
    shutil.copy(place / "more/c.mp4", videos / "run/b.mp4")
    before = read_generation(store)[1].number
    (place / "link").symlink_to(videos)
    for folder in (videos, place / "link"):
        assert main([*words, str(folder), "--sync", "--dry-run"]) == 0
        assert "1 to be removed, because they left the list: jump/a.mp4" in capsys.readouterr().out
    assert read_generation(store)[1].number == before
    (videos / "run/b.mp4").unlink()
    assert main([*words, str(videos), "--sync", "--remove-most"]) == 0
    assert "2 removed, because they left the list: jump/a.mp4, run/b.mp4" in capsys.readouterr().out
    assert ids(store) == ["c.mp4"]
    make(videos / "jump/a.mp4", frames=15)
    assert main([*words, str(videos)]) == 0
    assert ids(store) == ["c.mp4", "jump/a.mp4"], "a video that came back is added again"


def test_only_what_stays_visible_has_copies_to_drop(tmp_path):
    videos, store = tmp_path / "videos", LocalStorage(tmp_path / "data")
    for number, name in enumerate("aho"):
        make(videos / f"{name}.mp4", frames=9 + number)
    run_job(str(videos), store.url, workers=1)
    remove_samples(store, ["h"])
    (videos / "a.mp4").rename(videos / "moved.mp4")
    for name in "ho":
        shutil.copy(videos / f"{name}.mp4", videos / f"{name}2.mp4")
    words = ["add", store.url, str(videos), "--workers", "1", "--drop-duplicates", "--sync"]
    for _ in range(2):
        assert main(words) == 0
        assert ids(store) == ["h2.mp4", "moved.mp4", "o.mp4"]
    rows = {row["source_id"]: row["status"] for row in read_ledger(store)[0].to_pylist()}
    assert rows == dict.fromkeys(("h.mp4", "h2.mp4", "moved.mp4", "o.mp4"), "packed") | {"o2.mp4": "removed"}


@pytest.mark.parametrize("order", [("one", "two"), ("two", "one")], ids=["in-place-last", "encoded-last"])
def test_a_changed_file_is_added_again_unless_it_is_in_place(tmp_path, order):
    encoded, listed = (make(tmp_path / f"{name}/{name}.mp4", frames=9) for name in ("encoded", "listed"))
    run_job(str(encoded.parent), tmp_path / "one", workers=1)
    index_videos(str(listed.parent), str(tmp_path / "two"), workers=1)
    merge_datasets([tmp_path / name for name in order], tmp_path / "both")
    for video, packed in ((encoded, 1), (listed, 0)):
        make(video, frames=10)
        done = add_sources(str(tmp_path / "both"), str(video.parent), workers=1)
        assert (done.changed, done.report.packed) == ([video.name], packed)
    now = Dataset(str(tmp_path / "both"))
    frames = dict(zip(now.column("source_id").to_pylist(), now.column("num_frames").to_pylist(), strict=True))
    assert frames == {"encoded.mp4": 10, "listed.mp4": 9}


def test_a_changed_file_that_is_broken_takes_its_samples_along(place, capsys):
    store, video = LocalStorage(place / "data"), place / "videos/jump/a.mp4"
    table = read_ledger(store)[0].to_pylist()
    write_ledger(store, [row | {"path": str(place / "videos" / row["source_id"])} for row in table], {})
    video.write_text("no video")
    assert main(["add", store.url, str(place / "videos"), "--workers", "1"]) == 3
    assert "1 changed since: jump/a.mp4" in capsys.readouterr().out
    assert ids(store) == ["run/b.mp4"]


def test_nothing_is_written_without_a_dataset_or_a_new_sample(place, tmp_path):
    assert main(["add", str(tmp_path / "none"), str(place / "videos")]) == 1
    assert not (tmp_path / "none").exists()
    store = LocalStorage(place / "data")
    (place / "videos/run/text.mp4").write_text("no video")
    done = add_sources(store.url, str(place / "videos"), workers=1)
    assert (done.generation, done.report.packed) == (1, 0)
    assert dict(done.report.rejected) == {"not-video": 1}
    assert read_ledger(store)[0].num_rows == 4


def test_number_labels_are_class_indices_and_stay_if_their_list_changes(place, capsys):
    store, labels = LocalStorage(place / "data"), place / "list.txt"
    make(place / "new/c.mp4", frames=9)
    labels.write_text("c.mp4 7\n")
    with pytest.raises(UsageError, match="unknown class '7'"):
        add_sources(store.url, str(place / "new"), annotations=f"list:{labels}", workers=1)
    labels.write_text("c.mp4 1\n")
    add_sources(store.url, str(place / "new"), annotations=f"list:{labels}", workers=1)
    job = ["index", str(place / "new"), "--annotations", f"list:{labels}", "--out", str(place / "own")]
    assert main(job) == 0
    labels.write_text("c.mp4 0\n")
    assert main(job) == 2
    assert main(["add", store.url, *job[1:4]]) == 0
    said, relabel = capsys.readouterr(), "hint: `fastvid relabel DIR --annotations"
    assert f"differs in its annotations [file={place / 'own'}]\n  {relabel}" in said.err
    assert "1 already known (`fastvid relabel` changes annotations)" in said.out
    now = Dataset(store.url)
    assert (now.classes, now.labels[now.find("c")]) == (("jump", "run"), 1)


@pytest.mark.parametrize(
    ("classes", "new", "rows", "expected"),
    [
        (("0", "1", "10"), "2", None, "2"),
        (("0", "1", "10"), "10", None, "10"),
        (("0", "1", "10"), "x", "c.mp4 2", "2"),
        (("jump", "run"), "1", None, "1"),
        (("jump", "run"), "x", "c.mp4 1", "run"),
        (("jump", "run"), "x", "c.mp4 0 1", ["jump", "run"]),
        (("jump", "10"), "x", "c.mp4 1", None),
        ((), "7", None, "7"),
    ],
)
def test_a_number_is_a_class_name_unless_annotations_count_the_classes(classes, new, rows, expected, tmp_path):
    for name in classes or ["."]:
        make(tmp_path / "old" / name / f"of-{name[-1:]}.mp4", frames=9)
    run_job(str(tmp_path / "old"), str(tmp_path / "data"), workers=1)
    make(tmp_path / "new" / new / "c.mp4", frames=9)
    (tmp_path / "list.txt").write_text(rows or "")
    found = f"list:{tmp_path / 'list.txt'}" if rows else None
    if expected is None:
        with pytest.raises(UsageError, match="unknown class '1'") as caught:
            add_sources(str(tmp_path / "data"), str(tmp_path / "new"), annotations=found, workers=1)
        assert "--classes" in caught.value.hint
        return
    add_sources(str(tmp_path / "data"), str(tmp_path / "new"), annotations=found, workers=1)
    now = Dataset(str(tmp_path / "data"))
    sample = now.annotations.to_pylist()[-1]
    assert (sample.get("labels") or now.classes[sample["label"]]) == expected


def test_columns_get_the_type_that_holds_old_and_new_values(tmp_path, caplog):
    for name, row in (("old", "1,7,3"), ("new", "0.5,many,9007199254740993")):
        make(tmp_path / name / f"{name}.mp4", frames=9)
        (tmp_path / f"{name}.csv").write_text(f"path,score,views,long\n{name}.mp4,{row}\n")
    given = [f"csv:{tmp_path / name}.csv" for name in ("old", "new")]
    run_job(str(tmp_path / "old"), str(tmp_path / "data"), annotations=given[0], workers=1)
    add_sources(str(tmp_path / "data"), str(tmp_path / "new"), annotations=given[1], workers=1)
    now = Dataset(str(tmp_path / "data"))
    told = [now.column(name).to_pylist() for name in ("score", "views", "long")]
    assert told == [[1.0, 0.5], ["7", "many"], [3, 9007199254740993]]
    assert "column 'views' becomes text: it had values of type int64, and the new ones are string" in caplog.text
    assert "column 'score'" not in caplog.text


def test_another_build_of_ffmpeg_is_refused_until_it_is_allowed(place, tmp_path):
    store = LocalStorage(place / "data")
    make(place / "videos/jump/c.mp4", frames=11)
    make(place / "videos/run/d.mp4", frames=12)
    version, other = find_ffmpeg().version, other_build(tmp_path / "ffmpeg")

    def run(*options, **variables):
        arguments = ["add", store.url, place / "videos", "--workers", "1", "--samples-per-shard", "1", *options]
        done = forks.fastvid(*arguments, **variables)
        return done.returncode, done.stderr

    code, said = run(FASTVID_FFMPEG=other)
    assert code == 1
    assert f"another build of ffmpeg: version was {version!r} and is 'other-{version}'" in said
    assert run(fault="ledger:2")[0] == -9
    shutil.rmtree(place / "data/ledger-parts")
    assert "data-000001.tar" in collect_garbage(store).files, "an abandoned addition goes"
    assert run(fault="ledger:2")[0] == -9
    code, said = run("--allow-encoder-change", "--seed", "1", FASTVID_FFMPEG=other)
    assert code == 1
    assert "the unfinished addition here has encoder." in said
    assert "delete ledger-parts/add to abandon it" in said
    code, said = run("--allow-encoder-change", FASTVID_FFMPEG=other)
    assert code == 0, said
    versions = [shard.encoder["version"] for shard in read_generation(store)[1].shards]
    assert versions == [version, version, f"other-{version}"]
    assert ids(store) == ["jump/a.mp4", "jump/c.mp4", "run/b.mp4", "run/d.mp4"]
