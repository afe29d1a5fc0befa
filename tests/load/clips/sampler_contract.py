"""Contract of samplers: a class of tests to inherit."""

import pickle
from collections import Counter

import numpy as np
import pytest

from fastvid.errors import UsageError
from fastvid.load.clips.sampling import clip_length, clip_lengths, with_length
from fastvid.load.order.draws import Draws
from tests.load.tools import video

LENGTHS = (*range(1, 40), 64, 65, 100, 1_000, 100_003)


def lengths_of(sampler, num_frames, fps=25.0):
    facts = np.asarray(num_frames), np.broadcast_to(np.float64(fps), np.shape(num_frames))
    return clip_lengths(sampler, *facts)


class SamplerContract:
    """Inherit from it, name the class `Test...`, and list samplers to check, one for each kind of setting."""

    samplers = ()

    def test_there_is_something_to_check(self):
        assert self.samplers

    @pytest.mark.parametrize("length", LENGTHS)
    def test_frames_are_inside_the_video(self, length):
        for sampler in self.samplers:
            for position in range(20):
                frames = np.asarray(sampler.draw(video(length), Draws(3, 1, position)))
                assert frames.dtype == np.int64, sampler
                assert frames.shape == (lengths_of(sampler, [length])[0],), sampler
                assert 0 <= frames.min() <= frames.max() < length, sampler

    def test_lengths_of_many_videos_are_those_of_each(self):
        for sampler in self.samplers:
            rates = np.resize([25.0, 30_000 / 1001, 5.0, 59.94, 12.5], len(LENGTHS))
            together = lengths_of(sampler, LENGTHS, rates)
            for length, rate, expected in zip(LENGTHS, rates.tolist(), together.tolist(), strict=True):
                assert len(sampler.draw(video(length, rate), Draws(3, 1, 0))) == expected, sampler

    def test_a_sampler_of_another_length_makes_clips_of_that_length(self):
        for sampler in self.samplers:
            for length in (1, 2, 6, 30):
                try:
                    other = with_length(sampler, length)
                except UsageError:
                    continue
                assert clip_length(other) == length, sampler
                for num_frames in (1, 7, 100):
                    assert len(other.draw(video(num_frames), Draws(3, 1, 0))) == length, sampler

    def test_frames_depend_on_the_arguments_alone(self):
        for sampler in self.samplers:
            again = pickle.loads(pickle.dumps(sampler))  # a worker process draws with a copy
            first = {position: sampler.draw(video(77), Draws(3, 1, position)).tolist() for position in (5, 2, 9)}
            assert {position: again.draw(video(77), Draws(3, 1, position)).tolist() for position in (9, 5, 2)} == first

    def test_random_frames_change_with_seed_epoch_and_position(self):
        for sampler in self.samplers:
            base = [tuple(sampler.draw(video(10_000), Draws(3, 1, position))) for position in range(50)]
            if len(Counter(base)) == 1:  # not random: then nothing else may change it
                assert tuple(sampler.draw(video(10_000), Draws(4, 2, 0))) == base[0], sampler
                continue
            assert base != [tuple(sampler.draw(video(10_000), Draws(4, 1, position))) for position in range(50)], (
                sampler
            )
            assert base != [tuple(sampler.draw(video(10_000), Draws(3, 2, position))) for position in range(50)], (
                sampler
            )

    def test_repr_distinguishes_settings(self):
        # The repr is part of a loader's state, so a state with other settings is refused.
        texts = [repr(sampler) for sampler in self.samplers]
        assert len(set(texts)) == len(texts)
        assert not any(" at 0x" in text for text in texts), "the text differs between processes"
