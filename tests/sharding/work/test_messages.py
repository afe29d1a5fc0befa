"""What travels between job and workers, and waits on disk."""

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastvid.errors import FormatError
from fastvid.media.ffmpeg import Limits, find_ffmpeg
from fastvid.media.reasons import Reason
from fastvid.runtime.processes import HEADER_BYTES, pack, piece_size, unpack
from fastvid.sharding.encode.profiles import PROFILES, Settings
from fastvid.sharding.work.tasks import EncodedSample, Outcome, SourceTask, parse_record

samples = st.builds(
    EncodedSample,
    key=st.text(min_size=1),
    meta=st.dictionaries(st.text(), st.one_of(st.integers(), st.text(), st.none())),
    streams=st.dictionaries(st.sampled_from(["rgb", "flow"]), st.binary(), min_size=1),
)
outcomes = st.builds(
    Outcome,
    index=st.integers(0, 10**9),
    samples=st.lists(samples, max_size=3).map(tuple),
    reason=st.one_of(st.none(), st.sampled_from(Reason)),
    message=st.text(),
    transient=st.booleans(),
    seconds=st.floats(0, 1e6),
    warnings=st.lists(st.text(), max_size=3).map(tuple),
)


@given(outcomes)
def test_outcomes_come_back_as_they_went(outcome):
    assert Outcome.from_bytes(outcome.to_bytes()) == outcome


@given(outcomes, st.data())
def test_a_changed_or_cut_piece_is_never_taken_for_another(outcome, data):
    piece = bytearray(outcome.to_bytes())
    position = data.draw(st.integers(0, len(piece) - 1))
    piece[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(FormatError):
        Outcome.from_bytes(bytes(piece))
    with pytest.raises(FormatError):
        Outcome.from_bytes(outcome.to_bytes()[: data.draw(st.integers(0, len(piece) - 1))])


def test_absurd_lengths_are_refused_before_anything_is_read():
    with pytest.raises(FormatError, match="claims"):
        piece_size(b"\xff" * HEADER_BYTES)


def test_names_with_any_bytes_and_settings_survive():
    task = SourceTask(3, "x", "/tmp/\udcff\n.mp4", "k", 5, 1.5, None, 4.0)
    header, blobs = unpack(pack(asdict(task)))
    assert parse_record(header, SourceTask, "a task") == task
    assert not blobs
    settings = Settings(PROFILES["vp9"], find_ffmpeg(), Limits(max_pixels=5), 600.0)
    assert parse_record(unpack(pack(asdict(settings)))[0], Settings, "settings") == settings


def test_a_piece_of_another_kind_is_refused():
    with pytest.raises(FormatError, match="does not parse"):
        Outcome.from_bytes(pack({"phase": "probe"}))
    header, _ = unpack(Outcome(1).to_bytes())
    with pytest.raises(FormatError, match="claims 0 bytes of streams and has 3"):
        Outcome.from_parts(header, memoryview(b"abc"))
