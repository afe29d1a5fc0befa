"""Contract of samplers: a class of tests to inherit."""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest

from fastvid.load.order.random_draws import Draws
from tests.load.tools import video

LENGTHS = (*range(1, 40), 64, 65, 100, 1_000, 100_003)


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
                assert frames.shape == (sampler.num_frames,), sampler
                assert 0 <= frames.min() <= frames.max() < length, sampler

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
