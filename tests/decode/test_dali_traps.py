"""The faults that the DALI back-end prevents."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("nvidia.dali")

from fastvid.decode import dali
from fastvid.decode.dali import DaliCpuDecoder
from fastvid.decode.request import Box, Rgb
from fastvid.errors import DecodeError, UsageError
from fastvid.format.schema import Range
from tests.conformance.outputs import empty, numbers, read


@pytest.fixture
def decoder():
    decoder = DaliCpuDecoder(max_clips=3)
    yield decoder
    decoder.close()


def test_batch_of_mixed_streams_sizes_and_shapes_decodes(decoder, videos):
    vp9, jpeg, other = videos.painted("vp9"), videos.painted("mjpeg"), videos.painted("vp9", size=(128, 320))
    clips = [
        vp9.clip([3, 60]),
        jpeg.clip([9, 1, 1]),
        other.clip([7]),
        vp9.clip([12, 2], size=(48, 80)),
        other.clip([5, 6], size=(64, 160)),
        jpeg.clip([33]),
        vp9.clip([50, 40, 30, 20], size=(192, 320)),
    ]
    outputs = [empty(clip, Rgb) for clip in clips]
    assert decoder.decode(clips, outputs) == [None] * len(clips)
    assert [read(out) for out in outputs] == [clip.request.frames.tolist() for clip in clips]


def test_streams_with_unsupported_colour_are_rejected(decoder, videos):
    clip = videos.painted("vp9").clip([0])
    full = replace(clip, info=replace(clip.info, range=Range.FULL))
    (error,) = decoder.decode([full], [empty(full, Rgb)])
    assert isinstance(error, DecodeError)
    assert "use pyav" in str(error)
    h264 = videos.painted("compact").clip([0])
    (error,) = decoder.decode([h264], [empty(h264, Rgb)])
    assert "not h264" in str(error)


def test_repeated_frame_is_decoded_once(decoder, videos, monkeypatch):
    fed = []
    run = dali._Graph.run

    def spy(graph, samples, targets):
        fed.extend(sample.positions.tolist() for sample in samples)
        return run(graph, samples, targets)

    monkeypatch.setattr(dali._Graph, "run", spy)
    clip = videos.painted("vp9-intra").clip([9, 4, 9, 9, 4])
    assert numbers(decoder, clip, Rgb) == [9, 4, 9, 9, 4]
    assert fed == [[0, 1]]


def test_invalid_settings_are_rejected():
    for options in ({"max_clips": 0}, {"num_threads": 0}):
        with pytest.raises(UsageError):
            DaliCpuDecoder(**options)


_TOO_LARGE = """
import sys
from dataclasses import replace
from pathlib import Path
import numpy as np
from fastvid.decode import dali
from fastvid.decode.request import Box, Rgb
from tests.makers import Video

video = Video(Path(sys.argv[1]))
decoder = dali.DaliCpuDecoder()
info = replace(video.info, width=video.info.width // 2)
clip = video.clip(list(range(40)), box=Box(0, 0, 16, 16), info=info)
(error,) = decoder.decode([clip], [Rgb(np.zeros((3, 40, 16, 16), np.uint8))])
print(type(error).__name__, flush=True)
"""


def test_pictures_larger_than_the_stream_size_are_rejected(videos):
    # DALI writes them past the end of its buffer: the process dies or, worse, continues.
    path = videos.textured("vp9", size=(256, 336)).path
    run = subprocess.run([sys.executable, "-c", _TOO_LARGE, str(path)], capture_output=True, text=True)
    assert run.stdout.strip() == "DecodeError", run.stderr


def test_box_positions_are_exact(decoder, videos):
    video = videos.textured("vp9-intra")
    whole, part = video.clip([7]), video.clip([7], box=Box(10, 22, 40, 66))
    outputs = [empty(whole, Rgb), empty(part, Rgb)]
    assert decoder.decode([whole, part], outputs) == [None, None]
    assert np.array_equal(outputs[1].data, outputs[0].data[:, :, 10:50, 22:88])
