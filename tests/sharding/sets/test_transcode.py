"""Encoding a dataset again keeps its keys, annotations, classes and sound, on disks and object stores."""

import pytest

from fastvid.cli.main import main
from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.sharding.change.edit import relabel_samples, remove_samples
from fastvid.sharding.change.repack import compact_shards
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.job.job import run_job, transcode_dataset
from fastvid.sharding.job.ledger import block, read_blocked
from fastvid.sharding.verify.verify import verify_dataset
from fastvid.storage import LocalStorage, open_storage
from tests.datasets import recommit
from tests.sharding.shardtools import copy_files, ffmpeg, make, tars

SMALL = PROFILES["intra"].changed(short_side=64)
TINY = PROFILES["intra"].changed(short_side=32)
ROWS = """path,label,start,end,split,caption
a b.mp4,walk,0,0.4,train,a dog
a b.mp4,run,0.4,9,val,"a cat, running"
b.mp4,jump,,,train,
c.mp4,rest,,,val,nothing
"""


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """Four samples with sound of four classes, of which one has no sample, in two shards."""
    folder = tmp_path_factory.mktemp("old")
    sound = ["-f", "lavfi", "-i", "sine=frequency=440:sample_rate=16000:duration=0.8", "-c:v", "copy", "-c:a", "aac"]
    (folder / "raw").mkdir()
    for name in ("a b", "b", "c"):
        ffmpeg("-i", str(make(folder / "plain.mp4")), *sound, str(folder / "raw" / f"{name}.mp4"))
    (folder / "rows.csv").write_text(ROWS)
    options = {"annotations": f"csv:{folder / 'rows.csv'}", "profile": SMALL, "audio": "copy"}
    run_job(str(folder / "raw"), folder / "out", samples_per_shard=2, workers=1, **options)
    return folder / "out"


def copied(old, folder):
    copy_files(LocalStorage(old), LocalStorage(folder))
    return folder


def rows(url):
    return {row["key"]: row for row in Dataset(str(url)).annotations.to_pylist() if not row["removed"]}


def sounds(url):
    dataset, found = Dataset(str(url)), {}
    for sample in range(len(dataset)):
        (index, at) = (int(part[0]) for part in dataset.locate([sample]))
        reader = dataset.shard(index).audio(at)
        found[dataset.key(sample)] = None if reader is None else bytes(reader.bytes(0, reader.size))
    return found


KEPT = ("label", "split", "caption", "start_seconds", "end_seconds", "asked_end_seconds", "num_frames")


def check(before, url):
    after = rows(url)
    assert after.keys() == before.keys()
    for key, row in before.items():
        assert [after[key].get(name) for name in KEPT] == [row.get(name) for name in KEPT]
        assert after[key]["parent"] == (row["parent"] or row["source_id"])
        assert after[key]["height"] == 32
        # Facts in a tar's JSON are no annotations.
        assert not {"conforms", "pix_fmt", "source", "source_source_id", "source_fps", "source_height"} & set(
            after[key]
        )
    assert not verify_dataset(str(url)).problems


def test_annotations_classes_keys_and_sound_are_kept(old, tmp_path, caplog):
    assert len({row["split"] for row in rows(old).values()}) == 2
    options = ["--profile", "intra", "--short-side", "32"]
    assert main(["transcode", str(old), "--out", str(tmp_path / "new"), *options]) == 0
    check(rows(old), tmp_path / "new")
    assert Dataset(str(tmp_path / "new")).classes == Dataset(str(old)).classes
    assert sounds(tmp_path / "new") == sounds(old)
    assert None not in sounds(old).values()
    assert len(tars(tmp_path / "new")) == 2
    assert "if the originals still exist" in caplog.text


def test_removed_samples_stay_out_and_classes_without_samples_stay(old, tmp_path):
    store = LocalStorage(copied(old, tmp_path / "d"))
    gone = next(key for key, row in rows(old).items() if row["caption"] == "nothing")
    relabel_samples(store, {gone: {"caption": "gone"}})
    remove_samples(store, [gone])
    transcode_dataset(store.url, tmp_path / "new", profile=TINY, audio="drop", workers=1)
    check({key: row for key, row in rows(old).items() if key != gone}, tmp_path / "new")
    assert Dataset(str(tmp_path / "new")).classes == Dataset(str(old)).classes
    assert set(sounds(tmp_path / "new").values()) == {None}


def test_shards_of_no_sample_are_refused(old, tmp_path):
    with pytest.raises(UsageError, match="samples_per_shard is 0, expected at least 1"):
        transcode_dataset(str(old), tmp_path / "new", profile=TINY, samples_per_shard=0)


def test_a_dataset_without_shards_says_that_it_has_no_sample(old, tmp_path):
    store = LocalStorage(copied(old, tmp_path / "d"))
    remove_samples(store, list(rows(old)))
    compact_shards(store)
    with pytest.raises(UsageError, match=r"no sample matches \[file=.*/d\]"):
        transcode_dataset(store.url, tmp_path / "new", profile=TINY, workers=1)
    assert not (tmp_path / "new").exists()


def test_dataset_in_an_object_store_is_encoded_into_another(s3, old, tmp_path):
    bucket = s3.bucket()
    url = f"s3://{bucket}/old"
    copy_files(LocalStorage(old), open_storage(url))
    transcode_dataset(url, f"s3://{bucket}/new", profile=TINY, workers=1)
    check(rows(old), f"s3://{bucket}/new")
    assert sounds(f"s3://{bucket}/new") == sounds(old)
    # Samples are fetched by range, not as whole tars.
    requests = [(path, status) for method, path, status in s3.requests(bucket) if method == "GET"]
    fetched = [status for path, status in requests if path.startswith("old/") and ".tar" in path]
    assert set(fetched) == {206}


def test_labels_without_class_names_are_kept(old, tmp_path):
    store = LocalStorage(copied(old, tmp_path / "d"))
    recommit(store, classes=())
    transcode_dataset(store.url, tmp_path / "new", profile=TINY, workers=1)
    table = Dataset(str(tmp_path / "new")).annotations
    found = dict(zip(table["key"].to_pylist(), table["label"].to_pylist(), strict=True))
    assert found == {key: row["label"] for key, row in rows(old).items()}


def test_what_the_old_dataset_blocks_is_blocked_in_every_dataset_made_from_it(old, tmp_path):
    taken = LocalStorage(copied(old, tmp_path / "d"))
    other = LocalStorage(copied(old, tmp_path / "other"))
    hashes = block(taken, ["0" * 64])
    with pytest.raises(UsageError, match="made by a job that differs"):
        transcode_dataset(taken.url, other.url, profile=TINY, workers=1)
    assert not other.exists("blocked.json")  # a refused command changes nothing
    transcode_dataset(taken.url, tmp_path / "new", profile=TINY, workers=1)
    run_job([taken.url], tmp_path / "again", profile=TINY, workers=1)
    for name in ("new", "again"):
        assert read_blocked(LocalStorage(tmp_path / name)) == hashes


def test_what_cannot_be_encoded_is_refused(old, tmp_path, capsys):
    assert main(["transcode", str(old), "--out", str(tmp_path / "new"), "--profile", "copy"]) == 2
    assert "encodes nothing" in capsys.readouterr().err
    with pytest.raises(UsageError, match="encoded as 'aac'"):
        transcode_dataset(old, tmp_path / "new", audio="aac")
    with pytest.raises(UsageError, match="datasets and other sources cannot be in one job"):
        run_job([str(old), str(tmp_path)], tmp_path / "new", profile=TINY)
    with pytest.raises(UsageError, match="is in two of the datasets"):
        run_job([str(old), str(copied(old, tmp_path / "d"))], tmp_path / "new", profile=TINY)
