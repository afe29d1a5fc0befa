"""10,000 random windows of sound. Started by ``make soak``; results in bench/results/audio_windows.json."""

from fractions import Fraction

import numpy as np
import pytest

from bench.common.harness import RESULTS, machine_facts, write_json
from tests.audio.footage import CLICKS, FPS, FRAMES, TRACKS, clicks_off
from tests.makers import read_numbers

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

RATES = (8_000, 16_000, 22_050, 48_000)
WINDOWS = 10_000


def test_every_click_of_10_000_windows_is_at_its_sample(clicks):
    draws, results = np.random.default_rng(11), []
    each = WINDOWS // (len(TRACKS) * len(RATES))
    for key in TRACKS:
        video = clicks[key]
        assert read_numbers(video.frames(range(FRAMES)).data[..., 0]) == list(range(FRAMES))
        for rate in RATES:
            whole, off, differing, heard = video.audio(rate=rate), 0, 0, 0
            for _ in range(each):
                start, stop = sorted(draws.choice(FRAMES + 1, 2, replace=False).tolist())
                clip = video.audio(Fraction(start, FPS), Fraction(stop, FPS), rate)
                part = whole.data[:, start * rate // FPS : stop * rate // FPS]
                differing += clip.data.tobytes() != part.tobytes() or not clip.mask.all()
                off = max(off, clicks_off(clip, start))
                heard += int(np.count_nonzero((start <= CLICKS) & (stop > CLICKS)))
            results.append({"track": key, "rate": rate, "windows": each, "clicks": heard, "samples_off": off})
            results[-1]["differing"] = differing
    record = {"schema": "fastvid-soak-audio/1", "machine": machine_facts(), "results": results}
    write_json(RESULTS / "audio_windows.json", record)
    assert not any(row["samples_off"] or row["differing"] for row in results)
