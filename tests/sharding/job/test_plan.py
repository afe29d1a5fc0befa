"""Assignment of sources to shards."""

import datetime
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastvid.errors import UsageError
from fastvid.media.reasons import Reason
from fastvid.sharding.job.frozen import start_work
from fastvid.sharding.job.job import EncodeShards
from fastvid.sharding.job.plan import JobPart, file_order, plan_shards
from fastvid.sharding.sources.sources import Source, SourceList
from fastvid.storage import LocalStorage
from tests.sharding.shardtools import settings

keys = st.sets(st.integers(0, 10**6), min_size=1, max_size=60)


def sources(numbers, size=0):
    return [Source(f"{n}.mp4", f"{n}.mp4", size, label=str(n % 4), key=str(n)) for n in sorted(numbers)]


@pytest.mark.parametrize(
    ("text", "variables", "part"),
    [
        ("auto", {"ID": "3", "COUNT": "8", "MIN": "0"}, "3/8"),
        ("auto", {"RANK": "1", "WORLD_SIZE": "2"}, "1/2"),
        ("auto/64", {"JOB_COMPLETION_INDEX": "5"}, "5/64"),
        ("auto/64", {"ID": "9", "COUNT": "4", "MIN": "3"}, "9/64"),
        ("auto", {"ID": "3", "COUNT": "4", "MIN": "3"}, "auto/64"),
        ("auto", {"JOB_COMPLETION_INDEX": "5"}, "auto/64"),
        ("auto/4", {"JOB_COMPLETION_INDEX": "5"}, "invalid part '5/4'"),
        ("auto", {}, "SLURM_ARRAY_TASK_ID, JOB_COMPLETION_INDEX, RANK"),
        *((text, {}, "invalid part") for text in ("2/2", "1", "-1/2", "1/0", "a/b", "1/2/3", "٣/٤", "")),
    ],
)
def test_automatic_part_is_that_of_the_array_pod_or_rank(text, variables, part, monkeypatch):
    for name in ("SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}" if name in ("ID", "COUNT", "MIN") else name, value)
    if "/" in part and part[0].isdigit():
        assert str(JobPart.parse(text)) == part
    else:
        with pytest.raises(UsageError, match=part):
            JobPart.parse(text)


def test_a_part_of_a_frozen_list_is_its_own_rows_and_lists_nothing(tmp_path):
    columns = {"day": datetime.date(2026, 1, 1), "score": float("nan"), "name": "\udce4"}
    listed = tuple(replace(one, columns=columns) for one in sources(range(50)))
    broken = Source("x", "x", problem=(Reason.MISSING, "gone"), key="x")
    found = SourceList((*listed, broken), ("0", "1"), {"hidden file": 2})

    def start(part, listing=None, given="a", folder=tmp_path):
        store = LocalStorage(folder)
        make = partial(EncodeShards, store, settings=settings(), samples_per_shard=4)
        return start_work(store, {"given": given}, part, lambda: listing or pytest.fail(given), make)

    whole = start(JobPart(0, 3), found)
    again = start(JobPart(1, 3))
    assert again.identity == whole.identity
    assert [len(shard) for shard in again.shards] == [0, 4, 0] * 4 + [0]
    assert [str(one) for one in again.shards[1]] == [str(one) for one in whole.shards[1]]
    assert {one.id for one in again.found.sources} == {one.id for shard in again.shards for one in shard}
    fewer = replace(found, sources=found.sources[1:])
    assert len(start(None, fewer).found.sources) == 51
    (tmp_path / "signed").mkdir()
    signed = SourceList((Source("a.mp4", "https://host/a.mp4?signature=1", key="a"),), (), {})
    start(None, signed, folder=tmp_path / "signed")
    assert not list(tmp_path.glob("signed/**/*.sources")), "signatures are secrets, and expire"
    assert len(start(JobPart(1, 3), fewer, "b").found.sources) == 50, "another list is read anew"


@given(keys, st.integers(1, 20), st.randoms())
def test_every_source_has_one_slot_for_any_listing_order(numbers, samples, random):
    listed = sources(numbers)
    plan = plan_shards(listed, samples=samples)
    assert sorted(source.key for shard in plan for source in shard) == sorted(source.key for source in listed)
    assert all(len(shard) == samples for shard in plan[:-1])
    assert 1 <= len(plan[-1]) <= samples
    assert plan_shards(random.sample(listed, len(listed)), samples=samples) == plan


@given(keys, st.integers(1, 50))
def test_shards_are_bounded_in_bytes_but_never_empty(numbers, limit):
    for shard in plan_shards(sources(numbers, size=7), samples=1000, source_bytes=limit):
        assert shard
        assert len(shard) == 1 or len(shard) * 7 <= limit


def test_seeds_mix_differently_and_classes_are_mixed():
    listed = sources(range(400))
    plan = plan_shards(listed, samples=100)
    assert plan != plan_shards(listed, samples=100, seed=1)
    # Classes of 100 sources each: a shard with a single class would not be mixed.
    for shard in plan:
        counts = [sum(source.label == str(label) for source in shard) for label in range(4)]
        assert min(counts) > 5


def clips(files, each, size=0):
    """Return `each` clips of every file, listed in no order of the files."""
    return [
        Source(f"{file}#{clip}", f"{file}.mp4", size, start=float(clip), key=f"{file}-{clip}", parent=f"{file}.mp4")
        for clip in range(each)
        for file in range(files)
    ]


@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 20), st.randoms())
def test_clips_of_a_file_share_a_shard_or_are_in_consecutive_ones(files, each, samples, random):
    listed = clips(files, each)
    plan = plan_shards(listed, samples=samples)
    assert plan_shards(random.sample(listed, len(listed)), samples=samples) == plan
    assert sorted(source.key for shard in plan for source in shard) == sorted(source.key for source in listed)
    for file in range(files):
        shards = [number for number, shard in enumerate(plan) if any(s.parent == f"{file}.mp4" for s in shard)]
        assert shards == list(range(shards[0], shards[-1] + 1))
        assert len(shards) == 1 or each > samples
    assert all(1 <= len(shard) <= samples for shard in plan)
    # Tasks in this order read each file once.
    order = [source.parent for shard in plan for source in sorted(shard, key=lambda source: file_order(source, 0))]
    assert len([file for file, _ in groupby(order)]) == files


def test_clips_of_a_file_are_mixed_with_those_of_others_and_weigh_as_one_file():
    (shard,) = plan_shards(clips(4, 25, size=100), samples=1000, source_bytes=400)
    changes = sum(one.parent != other.parent for one, other in pairwise(shard))
    assert changes > 40
    assert len(plan_shards(clips(4, 25, size=100), samples=1000, source_bytes=300)) == 2
