"""ClipLoader with damaged clips: an error at the right batch, or a counted skip, never another clip."""

import traceback
from collections import Counter

import pytest

from fastvid.errors import ChecksumError, DecodeError, FastvidError, MissingDependency, UsageError, WorkerError
from fastvid.load.workers import engine
from tests.load import fakes
from tests.load.fakes import FakeDataset, fake
from tests.load.tools import epoch_of, fastvid_threads, make, rows


def test_a_damaged_clip_raises_at_its_own_batch():
    dataset = FakeDataset(64)
    loader = make(dataset, prefetch=4, shuffle=False)
    dataset.damage(42)
    starts = []
    with pytest.raises(ChecksumError) as caught:
        starts.extend(batch.start for batch in loader)
    assert starts == [0, 8, 16, 24, 32]
    assert (caught.value.where["key"], caught.value.where["shard"]) == ("key42", "data-000002")
    assert loader.position == 40
    told = "".join(traceback.format_exception(caught.value))
    assert "clip_worker.py" not in told, "the frames of a decode thread"
    assert not fastvid_threads()
    dataset.damage(42)  # a second flip repairs it
    assert [batch.start for batch in loader] == [40, 48, 56]


def test_the_traceback_of_a_bug_is_whole(monkeypatch):
    monkeypatch.setattr("fastvid.load.workers.clip_worker.fetch", lambda *_, **__: 1 // 0)
    with pytest.raises(ZeroDivisionError) as caught:
        list(make(FakeDataset(8)))
    assert "clip_worker.py" in "".join(traceback.format_exception(caught.value))


def test_with_several_damaged_clips_the_first_row_is_named_for_any_thread_count():
    dataset = FakeDataset(16)
    for sample in (3, 5, 7):
        dataset.damage(sample)
    for _ in range(20):
        with pytest.raises(ChecksumError, match="key3"):
            list(make(dataset, shuffle=False, num_threads=4))


@pytest.mark.parametrize("world", [1, 2])
def test_skipped_clips_are_masked_counted_and_never_replaced(world, caplog):
    dataset, whole = FakeDataset(64), FakeDataset(64)
    for sample in (9, 33):
        dataset.damage(sample)
    expected = [row for batch in epoch_of(whole, 1) for row in batch if row[1] not in (9, 33)]
    options = {"on_error": "skip", "world_size": world}
    loaders = [make(dataset, rank=rank, **options) for rank in range(world)]
    found, masked, weight = [], [], []
    for batches in zip(*loaders, strict=True):
        for batch in batches:
            found += rows(batch)
            masked += batch.sample[~batch.valid].tolist()
            assert (batch.video[~batch.valid] == 0).all()
            assert (batch.label[~batch.valid] == -100).all()
        weight.append(sum(float(batch.weight.sum()) for batch in batches))
    assert found == expected
    assert sorted(masked) == [9, 33]
    assert sorted(weight) == pytest.approx([7 / 8] * 2 + [1] * 6)
    assert sum((loader.stats.total.skips for loader in loaders), Counter()) == {"ChecksumError": 2}
    assert "clip skipped: packet" in caplog.text
    assert "key33" in caplog.text


def test_too_many_skipped_clips_are_an_error():
    dataset = FakeDataset(64)
    for sample in range(0, 64, 2):
        dataset.damage(sample)
    delivered = []
    loader = make(dataset, on_error="skip", max_skip_rate=0.1)
    with pytest.raises(FastvidError, match=r"clips were skipped \(\d+ ChecksumError\)") as caught:
        delivered.extend(loader)
    assert isinstance(caught.value.__cause__, ChecksumError)
    assert len(delivered) <= 2
    assert len(list(make(dataset, on_error="skip", max_skip_rate=1.0))) == 8


def test_clips_that_the_decoder_reports_as_damaged_are_skipped():
    loader = make(FakeDataset(40), decoder=fake("ReportingDecoder"), on_error="skip", max_skip_rate=0.5)
    skipped = [sample for batch in loader for sample in batch.sample[~batch.valid].tolist()]
    assert sorted(skipped) == [0, 10, 20, 30]
    assert loader.stats.total.skips == {"DecodeError": 4}
    with pytest.raises(DecodeError, match="multiple of ten"):
        list(make(FakeDataset(40), decoder=fake("ReportingDecoder")))


def test_an_unexpected_exception_is_never_skipped():
    with pytest.raises(ZeroDivisionError) as caught:
        list(make(FakeDataset(40), decoder=fake("BuggyDecoder"), on_error="skip", max_skip_rate=1.0))
    assert any("while loading key" in note for note in caught.value.__notes__)


def test_an_unsupported_codec_is_never_skipped():
    nothing = fake()
    nothing = type(nothing)("nothing", nothing.target, "cpu", frozenset(), "nothing")
    with pytest.raises(UsageError, match="decoder 'nothing' does not decode h264"):
        list(make(FakeDataset(40), decoder=nothing, on_error="skip", max_skip_rate=1.0))


def test_a_decoder_that_fails_to_open_ends_the_iteration():
    with pytest.raises(MissingDependency, match="no such device"):
        list(make(FakeDataset(40), decoder=fake("ClosedDecoder")))


def test_a_decoder_that_is_not_installed_is_refused_on_construction():
    absent = type(fake())("absent", "no_such_module:Decoder", "cpu", frozenset(), "no-such-package")
    with pytest.raises(MissingDependency, match="pip install 'no-such-package'"):
        make(FakeDataset(40), decoder=absent)
    with pytest.raises(UsageError, match="unknown decoder 'nvenc'"):
        make(FakeDataset(40), decoder="nvenc")


def test_a_hanging_decoder_raises_an_error_naming_the_clip(monkeypatch):
    monkeypatch.setattr(engine, "_JOIN_SECONDS", 0.1)
    fakes.HangingDecoder.go_on.clear()
    try:
        with pytest.raises(WorkerError, match="no batch within 2 s; being fetched or decoded: key7 of data-000000"):
            list(make(FakeDataset(40), decoder=fake("HangingDecoder"), shuffle=False, timeout=2.0))
    finally:
        fakes.HangingDecoder.go_on.set()
