"""Warnings in the ledger about frames that a constant rate drops."""

from __future__ import annotations

import pytest

from tests.sharding.encode.test_parts import pack
from tests.sharding.shardtools import ffmpeg

# Milliseconds of frame N, on average about 40: a constant rate drops about 28 of 70 frames, or 4.
LONG_BURST = "if(lt(N,35),N*7,245+(N-35)*73)"
SHORT_BURST = "if(lt(N,6),N*7,42+(N-6)*43)"


@pytest.mark.parametrize(("clock", "warned"), [(LONG_BURST, True), (SHORT_BURST, False)])
def test_frames_dropped_is_warned_of_above_a_tenth(clock, warned, videos, tmp_path):
    path = tmp_path / "a.mkv"
    times = ("-vf", f"setpts='({clock})/(1000*TB)'", "-fps_mode", "passthrough", "-enc_time_base", "1:1000")
    ffmpeg("-i", str(videos.painted("intra").path), *times, "-c:v", "libx264", "-bf", "0", str(path))
    outcome = pack(path)
    assert "timing-variable" in outcome.warnings
    assert ("frames-dropped" in outcome.warnings) == warned
