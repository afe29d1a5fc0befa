"""Export: tars with current annotations that tools without fastvid read."""

import json
import tarfile

import pyarrow.parquet as pq
import pytest
import webdataset

import fastvid
from fastvid.cli.main import main
from fastvid.errors import UsageError
from fastvid.sharding.change.edit import relabel_samples, remove_samples
from fastvid.sharding.change.export import LAYOUTS, export_samples
from fastvid.sharding.job.index import index_tars
from fastvid.sharding.job.job import run_job
from fastvid.storage import LocalStorage, open_storage
from tests.datasets import make_clip, pack
from tests.sharding.shardtools import contents, copy_files, tar_of

# webdataset leaves its files to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def store(tmp_path):
    """Two shards of three samples, of which c/4 is removed and c/0 has another label than in its tar."""
    clip = make_clip(tmp_path / "clip.mp4")
    shards = [[(f"c/{n}", clip, n % 2) for n in range(3 * s, 3 * s + 3)] for s in range(2)]
    columns = {"split": ["train", "val"] * 3, "caption": [f"clip {n}" for n in range(6)]}
    store = pack(tmp_path / "d", shards, columns=columns)
    relabel_samples(store, {"c/0": {"label": "right", "caption": "new"}})
    remove_samples(store, ["c/4"])
    return store


def read(folder):
    tars = [str(path) for path in sorted(folder.glob("*.tar"))]
    return list(
        webdataset.WebDataset(tars, shardshuffle=False).decode().to_tuple("__key__", "mp4", "cls", "txt", "json")
    )


def test_webdataset_reads_current_labels_and_captions_of_each_split(store, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["export", store.url, "--to", "wds", "--out", str(out)]) == 0
    assert "train: 2 samples\nval: 3 samples\n" in capsys.readouterr().out
    clip = (tmp_path / "clip.mp4").read_bytes()
    found = {name: read(out / name) for name in ("train", "val")}
    shown = {name: [(key, label, text) for key, _, label, text, _ in samples] for name, samples in found.items()}
    assert shown == {
        "train": [("c/0", 1, "new"), ("c/2", 0, "clip 2")],
        "val": [("c/1", 1, "clip 1"), ("c/3", 1, "clip 3"), ("c/5", 1, "clip 5")],
    }
    for name, samples in found.items():
        for _, video, label, _, meta in samples:
            assert video == clip
            assert (meta["class"], meta["split"]) == (("left", "right")[label], name)
    assert (out / "classes.txt").read_text().splitlines() == ["left", "right"]
    assert json.loads((out / "export.json").read_text())["generation"] == 3


def test_only_selected_samples_are_exported_and_energon_finds_its_records(store, tmp_path):
    done = export_samples(store.url, str(tmp_path / "some"), split="train", where="class = 'left'")
    assert (dict(done.samples), done.files) == ({"train": 1}, ("train/000000.tar",))
    done = export_samples(store.url, str(tmp_path / "out"), to="energon")
    meta = tmp_path / "out" / ".nv-meta"
    parts = {"train": ["train/000000.tar"], "val": ["val/000000.tar", "val/000001.tar"]}
    assert json.loads((meta / "split.yaml").read_text())["split_parts"] == parts
    counts = dict(zip(done.files, [2, 1, 2], strict=True))
    assert json.loads((meta / ".info.json").read_text())["shard_counts"] == counts
    assert "CrudeWebdataset" in (meta / "dataset.yaml").read_text()


def test_what_cannot_be_exported_is_refused(store, tmp_path):
    out = str(tmp_path / "out")
    for to, message in (
        ("zarr", "unknown layout 'zarr'"),
        ("lerobot", "only a dataset that was made of a LeRobot dataset can be written as one"),
    ):
        with pytest.raises(UsageError, match=message):
            export_samples(store.url, out, to=to)
    with pytest.raises(UsageError, match="contains 'annotations-000001"):
        export_samples(store.url, store.url)
    LocalStorage(tmp_path / "used").write("export-unfinished.json", b"of another selection")
    with pytest.raises(UsageError, match="choose an empty folder"):
        export_samples(store.url, str(tmp_path / "used"))
    relabel_samples(store, {"c/0": {"split": "../up"}})
    with pytest.raises(UsageError, match="cannot name a folder"):
        export_samples(store.url, out)
    assert not (tmp_path / "up").exists()


def test_video_folders_have_current_annotations_beside_the_videos(store, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["export", store.url, "--to", "hf", "--out", str(out)]) == 0
    assert "5 videos" in capsys.readouterr().out
    rows = pq.read_table(out / "train" / "metadata.parquet").to_pylist()
    names = ("file_name", "key", "label", "class", "caption")
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("000000.mp4", "c/0", 1, "right", "new"),
        ("000001.mp4", "c/2", 0, "left", "clip 2"),
    ]
    assert "removed" not in rows[0]
    assert sorted(path.stem for path in (out / "val").iterdir()) == ["000000", "000001", "000002", "metadata"]
    assert (out / "val" / "000002.mp4").read_bytes() == (tmp_path / "clip.mp4").read_bytes()


@pytest.mark.parametrize("to", [layout for layout in LAYOUTS if layout != "lerobot"])
def test_datasets_in_object_stores_are_exported_into_them(to, store, s3, tmp_path):
    export_samples(store.url, str(tmp_path / "whole"), to=to)
    url = f"s3://{s3.bucket()}"
    copy_files(store, open_storage(f"{url}/d"))
    export_samples(f"{url}/d", f"{url}/out", to=to)
    assert contents(open_storage(f"{url}/out")) == contents(LocalStorage(tmp_path / "whole"))


def test_each_video_of_a_key_is_exported_by_itself(tmp_path):
    clips = [make_clip(tmp_path / f"{number}.mp4", frames=3 + number) for number in range(4)]
    members = [("s0.left.mp4", clips[0]), ("s0.right.mp4", clips[1]), ("s0.txt", "both"), ("s0.right.txt", "right")]
    tar_of(tmp_path / "tars" / "0.tar", [*members, ("s1.mp4", clips[2]), ("s1.mp4", clips[3])])
    index_tars([str(tmp_path / "tars")], workers=1)
    for to in ("wds", "hf"):
        export_samples(str(tmp_path / "tars"), str(tmp_path / to), to=to)
    with tarfile.open(tmp_path / "wds" / "data" / "000000.tar") as tar:
        found = {one.name: tar.extractfile(one).read() for one in tar if not one.name.endswith(".json")}
    said = {"s0_left.txt": b"both", "s0_right.txt": b"right"}
    assert found == said | {f"{key}.mp4": clips[n] for n, key in enumerate(("s0_left", "s0_right", "s1"))}
    assert [(tmp_path / "hf" / "data" / f"00000{n}.mp4").read_bytes() for n in range(3)] == clips[:3]


def test_several_labels_go_round_through_other_tools_tars(tmp_path):
    (tmp_path / "raw").mkdir()
    labels = {"a": ["run", "jump"], "b": ["swim"], "c": None}
    for name in labels:
        make_clip(tmp_path / "raw" / f"{name}.mp4")
    rows = [{"path": f"{name}.mp4", "labels": classes} for name, classes in labels.items()]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run_job(str(tmp_path / "raw"), tmp_path / "d", annotations=f"jsonl:{tmp_path / 'rows.jsonl'}", workers=1)
    export_samples(str(tmp_path / "d"), str(tmp_path / "out"))
    assert main(["index", str(tmp_path / "out"), "--out", str(tmp_path / "back"), "--workers", "1"]) == 0
    first, back = (fastvid.open(tmp_path / name) for name in ("d", "back"))
    assert first.classes == back.classes == ("jump", "run", "swim")
    assert several(first) == several(back) == labels
    assert hot(first) == hot(back) == {"a": [1, 1, 0], "b": [0, 0, 1], "c": [0, 0, 0]}


@pytest.mark.parametrize(
    ("names", "classes", "labels"),
    [((), ("0", "1", "2"), ["2", "0"]), (("jump", "run", "swim"), ("jump", "run", "swim"), ["swim", "jump"])],
)
def test_numbers_of_several_labels_are_named(names, classes, labels, tmp_path):
    clip = make_clip(tmp_path / "clip.mp4")
    (tmp_path / "tars").mkdir()
    with webdataset.TarWriter(str(tmp_path / "tars" / "0.tar")) as writer:
        writer.write({"__key__": "a", "mp4": clip, "json": {"labels": [2, 0]}})
        writer.write({"__key__": "b", "mp4": clip, "json": {"labels": [1]}})
        writer.write({"__key__": "c", "mp4": clip, "cls": "1 2"})
    index_tars([str(tmp_path / "tars")], class_names=names, workers=1)
    indexed = fastvid.open(tmp_path / "tars")
    assert (indexed.classes, several(indexed)["a"]) == (classes, labels)
    assert hot(indexed) == {"a": [1, 0, 1], "b": [0, 1, 0], "c": [0, 1, 1]}
    run_job(str(tmp_path / "tars"), tmp_path / "encoded", class_names=names, workers=1)
    assert several(fastvid.open(tmp_path / "encoded")) == several(indexed)


def several(dataset):
    return dict(zip(dataset.keys.to_pylist(), dataset.column("labels").to_pylist(), strict=True))


def hot(dataset):
    loader = fastvid.ClipLoader(
        dataset, frames=fastvid.Segments(1), spatial=fastvid.CenterCrop(16), labels=fastvid.MultiHot("labels"),
        global_batch_size=1, shuffle=False,
    )  # fmt: skip
    return {batch.key[0]: batch.labels[0].int().tolist() for batch in loader}
