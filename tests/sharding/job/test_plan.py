"""Assignment of sources to shards."""

from itertools import groupby, pairwise

from hypothesis import given
from hypothesis import strategies as st

from fastvid.sharding.job.plan import file_order, plan_shards
from fastvid.sharding.sources.sources import Source

keys = st.sets(st.integers(0, 10**6), min_size=1, max_size=60)


def sources(numbers, size=0):
    return [Source(f"{n}.mp4", f"{n}.mp4", size, label=str(n % 4), key=str(n)) for n in sorted(numbers)]


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
