"""Samplers compared with literal transcriptions of the formulas they cite."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastvid.errors import UsageError
from fastvid.load.clips.sampling import Dense, Segments, Uniform, clip_lengths, with_length
from fastvid.load.order.draws import Draws, Purpose
from tests.load.clips.sampler_contract import SamplerContract
from tests.load.fakes import FakeDataset
from tests.load.tools import Own, make, video

DRAWS = st.builds(Draws, st.integers(0, 9), st.integers(0, 9), st.integers(0, 10**6))
LENGTHS = st.integers(1, 400)


class TestContract(SamplerContract):
    samplers = (
        Segments(8),
        Segments(9),
        Segments(8, jitter=False),
        Segments(3, length=5),
        Dense(8, 3),
        Dense(8, 4),
        Dense(8, 4, short="clamp"),
        Dense(8, 4, jitter=False),
        Uniform(1),
        Uniform(8),
    )


class Counting:  # frames outside the video, not a function of its arguments, without a repr
    num_frames = 2

    def __init__(self, shift):
        self.calls, self.shift = 0, shift

    def draw(self, video, draws):
        self.calls += 1
        return np.array([self.calls, video.num_frames + self.shift])


def test_contract_detects_a_broken_sampler():
    contract = SamplerContract()
    contract.samplers = (Counting(0), Counting(1))
    for check in (
        lambda: contract.test_frames_are_inside_the_video(1),
        contract.test_frames_depend_on_the_arguments_alone,
        contract.test_repr_distinguishes_settings,
    ):
        with pytest.raises(AssertionError):
            check()


def tsn_train(num_frames, num_segments, new_length, randint):
    """Return TSN's training indices, from 0, as the TSM repository computes them."""
    average_duration = (num_frames - new_length + 1) // num_segments
    if average_duration > 0:
        return np.multiply(list(range(num_segments)), average_duration) + randint(average_duration, num_segments)
    if num_frames > num_segments:
        return np.sort(randint(num_frames - new_length + 1, num_segments))
    return np.zeros((num_segments,))


def tsn_test(num_frames, num_segments, new_length):
    """Return TSN's test indices, from 0."""
    tick = (num_frames - new_length + 1) / float(num_segments)
    return np.array([int(tick / 2.0 + tick * x) for x in range(num_segments)])


def with_consecutive(starts, length, num_frames):
    """Return each place with the frames after it; the last frame of the video is repeated."""
    indices = []
    for start in starts:
        p = int(start)
        for _ in range(length):
            indices.append(p)
            if p < num_frames - 1:
                p += 1
    return indices


@given(LENGTHS, st.integers(1, 20), st.integers(1, 6), DRAWS)
def test_training_segments_match_tsn(num_frames, segments, length, draws):
    sampler = Segments(segments, length=length)
    frames = sampler.draw(video(num_frames), draws)
    assert frames.shape == (sampler.num_frames,) == (segments * length,)
    assert 0 <= frames.min() <= frames.max() < num_frames
    if num_frames >= length:  # the formulas do not cover shorter videos
        starts = tsn_train(
            num_frames, segments, length, lambda high, size: np.array(draws.integers(Purpose.FRAMES, high, size))
        )
        assert frames.tolist() == with_consecutive(starts, length, num_frames)


@given(LENGTHS, st.integers(1, 20), st.integers(1, 6), DRAWS)
def test_evaluation_segments_match_tsn(num_frames, segments, length, draws):
    frames = Segments(segments, jitter=False, length=length).draw(video(num_frames), draws)
    assert 0 <= frames.min() <= frames.max() < num_frames
    if num_frames >= length:
        assert frames.tolist() == with_consecutive(tsn_test(num_frames, segments, length), length, num_frames)


@given(LENGTHS, st.integers(1, 20), st.integers(1, 9), st.booleans(), st.sampled_from(["loop", "clamp"]), DRAWS)
def test_dense_takes_every_stride_th_frame(num_frames, length, stride, jitter, short, draws):
    frames = Dense(length, stride, jitter=jitter, short=short).draw(video(num_frames), draws)
    assert frames.dtype == np.int64
    assert frames.shape == (length,)
    span = (length - 1) * stride + 1
    start = int(frames[0])
    if num_frames >= span:
        assert frames.tolist() == list(range(start, start + span, stride))
        assert start + span <= num_frames
        if not jitter:
            assert start == (num_frames - span) // 2
    else:
        assert start == 0
        plain = [i * stride for i in range(length)]
        expected = [f % num_frames for f in plain] if short == "loop" else [min(f, num_frames - 1) for f in plain]
        assert frames.tolist() == expected


def test_dense_starts_uniformly_where_the_clip_fits():
    starts = [int(Dense(4, 3).draw(video(16), Draws(0, 0, position))[0]) for position in range(600)]
    assert set(starts) == set(range(7))
    counts = np.bincount(starts)
    # 6 degrees of freedom: mean 6, deviation 3.5.
    assert ((counts - 600 / 7) ** 2 / (600 / 7)).sum() < 6 + 4 * 3.5


@given(LENGTHS, st.integers(1, 40), DRAWS)
def test_uniform_spans_the_video(num_frames, length, draws):
    frames = Uniform(length).draw(video(num_frames), draws)
    assert frames.dtype == np.int64
    if length == 1:
        assert frames.tolist() == [(num_frames - 1) // 2]
        return
    assert (frames[0], frames[-1]) == (0, num_frames - 1)
    exact = np.linspace(0, num_frames - 1, length)
    assert np.abs(frames - exact).max() <= 0.5 + 1e-9


def test_settings_out_of_range_are_refused():
    wrong = (lambda: Segments(0), lambda: Segments(8, length=0), lambda: Dense(0, 1), lambda: Dense(8, 0))
    for make_one in (*wrong, lambda: Uniform(0)):
        with pytest.raises(UsageError, match="expected at least 1"):
            make_one()
    with pytest.raises(UsageError, match=r"short is 'wrap'\n.*use one of loop, clamp"):
        Dense(8, 2, short="wrap")


def three(returns):
    """Return a sampler of a user whose clips have three frames, the given ones."""
    return Own(lambda *_: returns, num_frames=3)


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, lambda frames: np.array(frames, dtype=np.uint16)])
def test_an_own_sampler_may_return_any_number_of_frames(kind):
    sampler = Own(lambda video, _: kind(list(range(0, video.num_frames, 2))))
    (batch,) = make(FakeDataset(8), frames=sampler, collate="list")
    lengths = [FakeDataset(8).lengths[sample] for sample in batch.sample.tolist()]
    for frames, length in zip(batch.frame_index.tolist(), lengths, strict=True):
        assert [frame for frame in frames if frame >= 0] == list(range(0, length, 2))
    (batch,) = make(FakeDataset(8, classes=()), frames=three(kind([0, 0, 0])))
    assert batch.frame_index.tolist() == [[0, 0, 0]] * 8


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (three([0.0, 1.0, 2.0]), r"returned float64 \[3\], expected integers \[3\] from 0 to"),
        (three([0, 1]), r"returned int64 \[2\], expected integers \[3\]"),
        (three([[0, 0, 0]]), r"returned int64 \[1, 3\]"),
        (three(None), "returned object"),
        (three([]), r"returned float64 \[0\]"),
        (three([[0], [0, 0]]), "returned"),
        (three([True, False, True]), r"returned bool \[3\]"),
        (three([0, 0, 99]), "returned frame 99"),
        (three([0, 0, -1]), "returned frame -1"),
        (Own(lambda video, _: []), r"returned float64 \[0\], expected at least one integer from 0 to"),
        (Own(lambda video, _: np.zeros(0, dtype=np.int64)), r"returned int64 \[0\]"),
        (Own(lambda video, _: [0.5]), r"returned float64 \[1\], expected .*: \[0.5\]"),
        (Own(lambda video, _: [[0]]), r"returned int64 \[1, 1\]"),
        (Own(lambda video, _: [video.num_frames]), "returned frame"),
        (Own(lambda video, _: [2**63]), "returned frame 9223372036854775808"),
        (Own(lambda video, _: {}["end"]), "failed with KeyError: 'end'"),
        (Own(lambda video, _: video.missing), "failed with AttributeError"),
    ],
)
def test_a_mistake_of_an_own_sampler_is_named_with_its_key(sampler, message):
    with pytest.raises(UsageError, match=rf"sampler Own\(\) {message}") as caught:
        list(make(FakeDataset(8), frames=sampler, collate="list"))
    assert caught.value.hint
    assert caught.value.where["key"].startswith("key")


@pytest.mark.parametrize("count", [lambda frames, fps: frames[:-1], lambda frames, fps: frames * 0, lambda *_: 1.5])
def test_a_wrong_count_is_named(count):
    with pytest.raises(UsageError, match=r"sampler Own\(\) counts"):
        clip_lengths(Own(None, count=count), np.array([5, 6]), np.array([25.0, 25.0]))


def test_a_sampler_that_cannot_tell_its_lengths_is_named():
    with pytest.raises(UsageError, match=r"Own\(\) does not say how many frames") as caught:
        clip_lengths(Own(None), np.array([5]), np.array([25.0]))
    assert "count(num_frames, fps)" in caught.value.hint
    with pytest.raises(UsageError, match=r"Own\(\) cannot make clips of 4 frames"):
        with_length(Own(None), 4)
    with pytest.raises(UsageError, match="each segment has 3"):
        with_length(Segments(2, length=3), 8)
