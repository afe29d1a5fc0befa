"""A split column: no group is divided, classes keep their proportions, and new samples do not move old ones."""

import re

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastvid.cli.main import main
from fastvid.errors import ConflictError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.sharding import sets
from fastvid.sharding.change.edit import relabel_samples, remove_samples
from fastvid.sharding.sets import Group, divide, group_names, split_samples
from tests.datasets import make_clip, pack

GROUPS = st.lists(st.tuples(st.integers(1, 9), st.sampled_from("abc")), min_size=1, max_size=60).map(
    lambda found: [Group(f"g{number}", size, kind) for number, (size, kind) in enumerate(found)]
)
SHARES = st.sampled_from([(0.9, 0.1), (0.5, 0.5), (0.8, 0.1, 0.1), (0.25, 0.25, 0.25, 0.25)])


def size(groups, sides, side):
    return sum(group.size for group in groups if sides[group.name] == side)


@given(groups=GROUPS, shares=SHARES, seed=st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_each_stratum_has_its_share_within_the_largest_group(groups, shares, seed):
    sides = divide(groups, shares, seed=seed)
    bound = (len(shares) - 1) * max(group.size for group in groups) + 1e-6
    for kind in (None, *{group.stratum for group in groups}):
        some = [group for group in groups if kind in (None, group.stratum)]
        total = sum(group.size for group in some)
        for side, share in enumerate(shares):
            assert abs(size(some, sides, side) - share * total) <= bound


@given(groups=GROUPS, shares=SHARES, order=st.randoms(use_true_random=False), cut=st.integers(0, 60))
@settings(max_examples=100, deadline=None)
def test_neither_the_order_of_groups_nor_new_groups_matter(groups, shares, order, cut):
    assert divide(order.sample(groups, len(groups)), shares, seed=3) == divide(groups, shares, seed=3)
    old = divide(groups[:cut], shares)
    new = divide(groups, shares, placed=old)
    assert {name: new[name] for name in old} == old
    assert new.keys() == {group.name for group in groups}


def test_a_missing_value_is_a_group_of_its_own():
    table = pa.table({"key": ["1", "2", "3"], "source_id": ["x", "y", "2"], "parent": ["f", None, "f"],
                      "who": [None, "1", "1"]})  # fmt: skip
    assert group_names(table, "parent") == ["f", "y", "f"]
    assert len(set(group_names(table, "who"))) == 2
    with pytest.raises(UsageError, match="no column 'speaker'"):
        group_names(table, "speaker")


@pytest.fixture
def store(tmp_path):
    """Twenty files of two segments each, of two classes, in two shards."""
    clip = make_clip(tmp_path / "clip.mp4", frames=3)
    names = [f"f{number:02d}" for number in range(20)]
    samples = [(f"{name}/{half}", clip, int(number % 4 == 0)) for number, name in enumerate(names) for half in (0, 1)]
    parents = [f"{name}.mp4" for name in names for _ in (0, 1)]
    return pack(tmp_path / "d", [samples[:20], samples[20:]], columns={"parent": parents})


def sides(store):
    return {row["parent"]: row["split"] for row in Dataset(store.url).annotations.to_pylist()}


def test_segments_of_a_file_are_in_one_split_and_classes_keep_their_shares(store, capsys):
    assert main(["split", store.url, "0.8,0.2", "--stratify", "label"]) == 0
    rows = Dataset(store.url).annotations.to_pylist()
    assert len({(row["parent"], row["split"]) for row in rows}) == 20
    for where, counts in ((None, [32, 8]), ("class = 'right'", [8, 2])):
        assert [len(Dataset(store.url, split=name, where=where)) for name in ("train", "val")] == counts
    text = capsys.readouterr().out
    assert re.search(r"^train: 32 samples, [\d.]+ s, \d+ groups$", text, re.MULTILINE)
    assert "generation 2: 40 samples got a split" in text


def test_splitting_again_assigns_only_samples_without_a_split(store):
    split_samples(store, [0.8, 0.2])
    before = sides(store)
    assert split_samples(store, [0.8, 0.2]).placed == 0
    assert Dataset(store.url).generation.number == 2
    # As after an addition: a whole file and a further segment of a known one have no split.
    relabel_samples(store, {"f03/0": {"split": None}, "f07/0": {"split": None}, "f07/1": {"split": None}})
    report = split_samples(store, [0.8, 0.2], seed=9)
    assert (report.placed, report.kept) == (3, 37)
    assert {name: side for name, side in sides(store).items() if name != "f07.mp4"} == {
        name: side for name, side in before.items() if name != "f07.mp4"
    }
    rows = Dataset(store.url).annotations.to_pylist()
    assert {row["split"] for row in rows if row["parent"] == "f03.mp4"} == {before["f03.mp4"]}
    assert split_samples(store, [0.8, 0.2], seed=9, replace=True).placed == 40
    assert sides(store) != before


def test_removed_samples_are_not_divided(store):
    remove_samples(store, ["f01/0", "f01/1"])
    assert split_samples(store, [0.5, 0.5]).placed == 38


def test_wrong_arguments_change_nothing(store, capsys):
    for arguments, message in (
        ("0.9,0.2", "have the sum 1.1"),
        ("1.0", "have the sum 1"),
        ("0.9,x", "are no numbers"),
        ("0.9,0.1 --names a,a", "the names are a,a"),
        ("0.4,0.2,0.2,0.2", "the names are none"),
        ("0.9,0.1 --column label", "no name of a split column"),
        ("0.9,0.1 --by speaker", "no column 'speaker'"),
        ("0.9,0.1 --stratify speaker", "no column 'speaker'"),
        ("0.999,0.001", "split 'val' would be empty: there are 20 groups"),
    ):
        assert main(["split", store.url, *arguments.split()]) == 2
        assert message in capsys.readouterr().err
    assert Dataset(store.url).generation.number == 1


def test_values_of_another_origin_are_not_overwritten(store):
    relabel_samples(store, {"f03/0": {"split": "holdout"}})
    with pytest.raises(UsageError, match="has the values holdout, not train, val"):
        split_samples(store, [0.8, 0.2])
    relabel_samples(store, {"f03/0": {"split": "train"}, "f03/1": {"split": "val"}})
    with pytest.raises(UsageError, match=r"'f03\.mp4' is in the splits 'train' and 'val'"):
        split_samples(store, [0.8, 0.2])


def test_splits_that_are_given_meanwhile_are_not_overwritten(store, monkeypatch):
    def divide_and_relabel(*args, **options):
        relabel_samples(store, {"f03/0": {"split": "val"}, "f03/1": {"split": "val"}})
        return divide(*args, **options)

    monkeypatch.setattr(sets, "divide", divide_and_relabel)
    with pytest.raises(ConflictError, match="nothing was written"):
        split_samples(store, [0.8, 0.2])
    monkeypatch.undo()
    split_samples(store, [0.8, 0.2])
    assert sides(store)["f03.mp4"] == "val"
