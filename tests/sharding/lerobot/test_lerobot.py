"""LeRobot datasets, where they are and encoded: every item is the one that LeRobot's own loader delivers."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fastvid
from fastvid.cli.main import main
from fastvid.errors import FormatError, UsageError
from fastvid.sharding.change.edit import remove_samples
from fastvid.sharding.change.history import collect_garbage
from fastvid.sharding.change.repack import compact_shards
from fastvid.sharding.lerobot.jobs import index_lerobot, shard_lerobot
from fastvid.sharding.sets import Selection, make_subset, merge_datasets
from fastvid.sharding.verify.verify import verify_dataset
from fastvid.storage import LocalStorage
from tests.sharding.lerobot.tools import CAMERAS, LENGTHS, STATS, V3, as_version_2, copied, differences, loader

EVERY = {f"episode_{number:06d}": number for number in range(len(LENGTHS))}
SIGNALS = ("observation.state", "action", "next.reward", "next.done")


@pytest.fixture(scope="module")
def indexed(tmp_path_factory):
    out = tmp_path_factory.mktemp("lerobot") / "set"
    report = index_lerobot(f"lerobot:{V3}", out, episodes_per_shard=4, workers=1)
    assert (report.packed, report.rejected) == (len(LENGTHS) * len(CAMERAS), {})
    return out


@pytest.fixture(scope="module")
def encoded(tmp_path_factory):
    """The dataset encoded again, in shards of four episodes, at its own sizes."""
    out = tmp_path_factory.mktemp("lerobot") / "set"
    profile = fastvid.sharding.encode.profiles.get_profile("intra").changed(short_side=64)
    report = shard_lerobot(f"lerobot:{V3}", out, profile=profile, episodes_per_shard=4, workers=1)
    assert report.rejected == {}
    return out


DATA = "data/chunk-000/file-000.parquet"


def rows():
    return pq.read_table(V3 / DATA)


def signal(dataset, key, name):
    row = dataset.rows[dataset.find(key)]
    frames = np.arange(dataset.num_frames[dataset.find(key)])
    return dataset.signals.values(name, np.array([row]), frames[None])[0]


def check_signals(dataset, keys):
    """Assert that all signals of some samples, by key, are those of the fixture's episodes."""
    table = rows()
    for key, episode in keys.items():
        mine = table.filter(pa.compute.equal(table["episode_index"], episode))
        for name in SIGNALS:
            expected = np.array(mine[name].to_pylist())
            assert np.array_equal(np.squeeze(signal(dataset, key, name)), np.squeeze(expected)), (key, name)


def test_items_in_place_are_those_of_lerobot_of_version_2_too(indexed, tmp_path):
    dataset = fastvid.open(indexed)
    assert (dataset.streams, dataset.classes) == (CAMERAS, ("lift the cube", "push it away"))
    assert dataset.num_frames.tolist() == list(LENGTHS)
    source = as_version_2(tmp_path / "old")
    index_lerobot(f"lerobot:{source}", tmp_path / "set", workers=1)
    for one in (dataset, fastvid.open(tmp_path / "set")):
        assert differences(loader(one)) == []
        for name in ("min", "max", "mean", "std", "count"):
            assert one.signals["action"]["stats"][name] == pytest.approx(dataset.signals["action"]["stats"][name])
    (source / STATS).write_text('{"stats": {"action": {"min": "", "max": 1, "mean": 1, "std": 1, "count": 1}}}')
    with pytest.raises(FormatError, match="statistics do not parse"):
        index_lerobot(f"lerobot:{source}", tmp_path / "no")


def test_commands_count_episodes_and_name_cameras_and_signals(indexed, tmp_path, capsys, caplog):
    with caplog.at_level("INFO"):
        assert main(["index", f"lerobot:{V3}", "--out", str(tmp_path / "set")]) == 0
    assert "6 episodes of 2 cameras" in caplog.text
    assert "12 packed: 6 episodes of 2 cameras" in capsys.readouterr().out
    assert main(["inspect", str(indexed)]) == 0
    said = capsys.readouterr().out
    assert "episodes    6 in " in said
    assert "cameras     observation.images.top, observation.images.wrist" in said
    assert "signals     action [2], " in said


def test_encoded_items_have_the_same_frames_and_signals(indexed, encoded):
    dataset = fastvid.open(encoded)
    assert [shard.samples for shard in dataset.generation.shards] == [4, 2]
    assert differences(loader(dataset), pictures=False) == []
    assert verify_dataset(str(encoded), workers=1).problems == []
    stats = json.loads((V3 / "meta/stats.json").read_text())
    for dataset in map(fastvid.open, (indexed, encoded)):
        assert dataset.signals["observation.state"]["names"] == ["x", "y", "z"]
        assert dataset.signals["action"]["stats"]["mean"] == stats["action"]["mean"]
        assert dataset.generation.extras["lerobot"]["tasks"] == ["lift the cube", "push it away"]
        with pytest.raises(UsageError, match=r"(?s)dataset has no signal 'actoin' .*hint: it has action"):
            dataset.signals["actoin"]


@pytest.mark.parametrize("which", ["indexed", "encoded"])
def test_changes_of_a_dataset_keep_the_signals_of_each_episode(which, request, tmp_path):
    shutil.copytree(request.getfixturevalue(which), tmp_path / "set")
    storage = LocalStorage(tmp_path / "set")
    check_signals(fastvid.open(tmp_path / "set"), EVERY)

    remove_samples(storage, ["episode_000001", "episode_000002"])
    compact_shards(storage)
    collect_garbage(storage)
    left = {key: number for key, number in EVERY.items() if number not in (1, 2)}
    check_signals(fastvid.open(tmp_path / "set"), left)
    assert verify_dataset(str(tmp_path / "set"), workers=1).problems == []
    assert len(list((tmp_path / "set").glob("*.signals.parquet"))) == 2

    few = ["episode_000000", "episode_000005"]
    make_subset(str(tmp_path / "set"), tmp_path / "few", Selection(keys=tuple(few)))
    check_signals(fastvid.open(tmp_path / "few"), {key: left[key] for key in few})
    merged = merge_datasets([tmp_path / "set", tmp_path / "few"], tmp_path / "both", prefixes=["a", "b"])
    assert merged.generation.num_samples == 6
    names = {f"a/{key}": number for key, number in left.items()} | {f"b/{key}": left[key] for key in few}
    check_signals(fastvid.open(tmp_path / "both"), names)
    assert verify_dataset(str(tmp_path / "both"), workers=1).problems == []


def test_signals_of_more_shards_are_joined_without_more_reads_of_the_annotations(indexed, tmp_path, monkeypatch):
    read, names = LocalStorage.read, list[str]()
    monkeypatch.setattr(LocalStorage, "read", lambda self, name: names.append(name) or read(self, name))

    def reads(*keys: str) -> int:
        names.clear()
        made = make_subset(indexed, tmp_path / str(len(keys)), Selection(keys=keys))
        check_signals(fastvid.open(made.dataset), {key: EVERY[key] for key in keys})
        return sum(name.startswith("annotations-") for name in names)

    assert len(fastvid.open(indexed).generation.shards) > 1
    assert reads(next(iter(EVERY))) == reads(*list(EVERY)[::2])


def test_merged_statistics_are_those_of_all_frames(indexed, tmp_path):
    merge_datasets([indexed, indexed], tmp_path / "both", prefixes=["a", "b"])
    one, both = (fastvid.open(folder).signals["action"]["stats"] for folder in (indexed, tmp_path / "both"))
    assert both["count"] == [2 * one["count"][0]]
    for name in ("min", "max", "mean", "std"):
        assert np.allclose(both[name], one[name])
    assert "q99" not in both


def test_damaged_signals_are_found(encoded, tmp_path):
    shutil.copytree(encoded, tmp_path / "set")
    file = tmp_path / "set/data-000001.signals.parquet"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.unlink()
    file.write_bytes(bytes(data))
    (problem,) = verify_dataset(str(tmp_path / "set"), workers=1).problems
    assert (problem.check, problem.shard) == ("signals", "data-000001")
    dataset = fastvid.open(tmp_path / "set")
    check_signals(dataset, {"episode_000000": 0})
    with pytest.raises(FormatError, match="signals are not those of the generation"):
        signal(dataset, "episode_000004", "action")


def test_a_dataset_is_restored_with_signals_if_their_files_are_beside_the_tars(encoded, tmp_path):
    for suffixes, expected in ((("tar",), ()), (("tar", "signals.parquet"), SIGNALS)):
        folder = tmp_path / str(len(suffixes))
        folder.mkdir()
        for suffix in suffixes:
            for file in encoded.glob(f"data-*.{suffix}"):
                (folder / file.name).write_bytes(file.read_bytes())
        assert main(["index", str(folder)]) == 0
        dataset = fastvid.open(folder)
        assert (dataset.streams, set(expected) <= set(dataset.signals)) == (CAMERAS, True)
        assert bool(dataset.signals) == bool(expected)
    check_signals(dataset, EVERY)


def test_an_episode_without_one_of_its_cameras_is_rejected_whole(tmp_path):
    source = as_version_2(tmp_path / "old")
    (source / f"videos/chunk-000/{CAMERAS[1]}/episode_000002.mp4").write_bytes(b"no video")
    report = index_lerobot(f"lerobot:{source}", tmp_path / "set", workers=1)
    assert (report.packed, sum(report.rejected.values())) == (10, 2)
    dataset, left = fastvid.open(tmp_path / "set"), {key: number for key, number in EVERY.items() if number != 2}
    assert dataset.keys.to_pylist() == list(left)
    check_signals(dataset, left)
    messages = [row["message"] for row in report.ledger.to_pylist() if row["reason"]]
    assert sum("another camera of its episode" in message for message in messages) == 1


def test_wrong_commands_say_what_to_do(tmp_path, capsys, indexed, encoded):
    out = ["--out", str(tmp_path / "set")]
    for words, message in (
        (["index", "lerobot:/nowhere", *out], "folder contains no LeRobot dataset"),
        (["index", f"lerobot:{V3}"], "a dataset of episodes is made in a new folder"),
        (["index", f"lerobot:{V3}", *out, "--annotations", "csv:x"], "--annotations is not for LeRobot datasets"),
        (["shard", f"lerobot:{V3}", *out, "--fps", "5"], "the rate of episodes cannot change to 5"),
        (["shard", f"lerobot:{V3}", *out, "--profile", "copy"], "profile 'copy' does not encode"),
        (["shard", f"lerobot:{V3}", f"lerobot:{V3}", *out], "a LeRobot dataset is a source by itself"),
        (["shard", f"lerobot:{V3}", *out, "--audio", "copy"], "--audio is not for LeRobot datasets"),
        (["transcode", str(encoded), *out], "a dataset with cameras or signals is not encoded again"),
        (["add", str(encoded), str(V3)], "single videos cannot be added to a dataset with cameras or signals"),
        (["export", str(indexed), "--to", "wds", *out], "a dataset with cameras or signals cannot be written"),
        (["export", str(indexed), "--to", "hf", *out], "a dataset with cameras or signals cannot be written"),
        (["export", str(encoded), "--to", "hf", *out], "a dataset with cameras or signals cannot be written"),
    ):
        assert main(words) == 2, words
        assert message in capsys.readouterr().err, words
    assert main(["export", str(encoded), "--to", "wds", *out]) == 0


def test_a_round_trip_gives_the_same_lerobot_dataset(indexed, tmp_path):
    back = tmp_path / "back"
    assert main(["export", str(indexed), "--to", "lerobot", "--out", str(back)]) == 0
    for name in ("meta/info.json", "meta/stats.json"):
        # Quantiles of numbers of frames are estimated by LeRobot, here computed.
        old, new = (json.loads((folder / name).read_text()) for folder in (V3, back))
        estimated = ("index", "episode_index") if name == "meta/stats.json" else ()
        assert {k: v for k, v in new.items() if k not in estimated} == {
            k: v for k, v in old.items() if k not in estimated
        }, name
    for name in (DATA, "meta/tasks.parquet"):
        old, new = (pq.read_table(folder / name) for folder in (V3, back))
        assert new.select(old.column_names).equals(old), name
    name = "meta/episodes/chunk-000/file-000.parquet"
    old, new = (pq.read_table(folder / name).to_pylist() for folder in (V3, back))
    for before, after in zip(old, new, strict=True):
        assert after["tasks"] == before["tasks"]
        for column in (column for column in after if column != "tasks" and "/q" not in column):
            assert after[column] == pytest.approx(before[column], rel=1e-6, abs=1e-6), column
    index_lerobot(f"lerobot:{back}", tmp_path / "again", workers=1)
    assert differences(loader(fastvid.open(tmp_path / "again"))) == []


def test_an_export_without_unused_tasks_has_the_statistics_of_the_new_numbers(tmp_path):
    source, tasks = copied(tmp_path / "old"), ["never done", "lift the cube", "push it away"]
    pq.write_table(pa.table({"task_index": range(3), "task": tasks}), source / "meta/tasks.parquet")
    table, place = rows(), rows().column_names.index("task_index")
    shifted = pa.compute.add(table["task_index"], 1)
    pq.write_table(table.set_column(place, "task_index", shifted), source / DATA)
    known = json.loads((source / "meta/stats.json").read_text())
    known["task_index"] |= {"max": [2.0], "mean": [known["task_index"]["mean"][0] + 1]}
    (source / "meta/stats.json").write_text(json.dumps(known))
    index_lerobot(f"lerobot:{source}", tmp_path / "set", workers=1)
    assert main(["export", str(tmp_path / "set"), "--to", "lerobot", "--out", str(tmp_path / "back")]) == 0
    stats = json.loads((tmp_path / "back/meta/stats.json").read_text())["task_index"]
    numbers = pq.read_table(tmp_path / "back" / DATA)["task_index"].to_numpy()
    assert (stats["max"], stats["mean"]) == ([1.0], [numbers.mean()])


def test_an_export_without_some_episodes_numbers_them_anew(encoded, tmp_path):
    out, only = tmp_path / "back", ["--where", "episode_index in (1, 3)"]
    assert main(["export", str(encoded), "--to", "lerobot", "--out", str(out), *only]) == 0
    info = json.loads((out / "meta/info.json").read_text())
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (2, 10, 1)
    camera = info["features"][CAMERAS[0]]
    assert (camera["info"]["video.codec"], camera["shape"]) == ("h264", [64, 96, 3])
    assert "video.crf" not in camera["info"]
    table, old = pq.read_table(out / DATA), rows()
    kept = old.filter(pa.compute.is_in(old["episode_index"], pa.array([1, 3])))
    assert table["action"].to_pylist() == kept["action"].to_pylist()
    assert table["index"].to_pylist() == list(range(10))
    assert table["episode_index"].to_pylist() == [0] + [1] * 9
    assert set(table["task_index"].to_pylist()) == {0}
    stats = json.loads((out / "meta/stats.json").read_text())["action"]
    values = np.array(kept["action"].to_pylist())
    for name, expected in (("mean", values.mean(0)), ("std", values.std(0)), ("q50", np.quantile(values, 0.5, axis=0))):
        assert np.allclose(stats[name], expected), name
    index_lerobot(f"lerobot:{out}", tmp_path / "again", workers=1)
    assert fastvid.open(tmp_path / "again").num_frames.tolist() == [1, 9]
