"""Everything that the golden digests use from inside fastvid; if a module moves, only this file changes."""

import contextlib
import hashlib
import io
import subprocess
from dataclasses import replace

import numpy as np

import fastvid
from fastvid.cli.main import main
from fastvid.decode.backends import Backend
from fastvid.decode.request import Rgb
from fastvid.format.generations import read_generation
from fastvid.format.schema import Codec
from fastvid.format.writing import sample_members, write_shard
from fastvid.media.ffmpeg import find_ffmpeg
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.train.records.records import curve, read
from tests import datasets

__all__ = ["PROFILES"]

# y, x, height and width of the crop, height and width of the output, flip.
REQUEST = np.dtype("<u2")
REQUEST_VALUES = 7
FLOW_BOUND = 127.0  # one pixel per level


class Recorder:
    """A decoder that decodes nothing and stores its requests in the first pixels of the first row."""

    max_clips = 1
    outputs = frozenset({Rgb})

    def decode(self, clips, outputs):
        for clip, output in zip(clips, outputs, strict=True):
            request, box = clip.request, clip.request.box
            asked = np.array([box.y, box.x, box.height, box.width, *request.size, request.flip], REQUEST)
            output.data[0, 0, 0, : asked.nbytes] = asked.view(np.uint8)
        return [None] * len(clips)

    def close(self):
        pass


RECORDER = Backend("recorder", f"{__name__}:Recorder", "cpu", frozenset(Codec), "nothing")


def pack(folder, shards, classes, **columns):
    """Create a dataset with the id "made" from keys, MP4s and labels for each shard."""
    datasets.pack(folder, shards, classes=classes, columns=columns)
    return fastvid.open(folder)


def pack_flow(folder, samples):
    """Create a dataset of samples with RGB and flow with the bound `FLOW_BOUND`."""
    storage = datasets.pack(folder, [[(key, picture, 0) for key, picture, _ in samples]])
    meta = {"conforms": True, "flow": {"bound": FLOW_BOUND}}
    both = [
        (key, sample_members({"source_id": key, **meta}, {"rgb": picture, "flow": flow}))
        for key, picture, flow in samples
    ]
    tar = write_shard(storage, "data-000000", both, streams=("rgb", "flow"))
    (record,) = read_generation(storage)[1].shards
    record = replace(record, bytes=tar.bytes, sha256=tar.sha256)
    datasets.recommit(storage, streams=("rgb", "flow"), shards=(record,))
    return fastvid.open(folder)


def command(*words):
    """Run a ``fastvid`` command and return its stdout.

    Raises:
        AssertionError: It failed.
    """
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = main([str(word) for word in words])
    assert code == 0, f"fastvid {' '.join(map(str, words))} exits with {code}: {said.getvalue()}"
    return said.getvalue()


def encoder(profile):
    """Return the build that encodes a profile as a digest of what determines its bytes, and as a readable name."""
    build = PROFILES[profile].completed(find_ffmpeg())
    # Use only ffmpeg's own output, so that the digest does not depend on what fastvid records about a build.
    says = subprocess.run([build.path, "-version"], capture_output=True, check=True).stdout
    word = hashlib.sha256(says + build.x264.encode() + build.jpeg.encode()).hexdigest()[:16]
    return word, f"ffmpeg {build.version}, x264 {build.x264 or 'absent'}" + (build.jpeg and f", {build.jpeg}")


def losses(run):
    """Return the training losses of a run, step by step."""
    return [row["loss"] for row in curve(read(run / "metrics.jsonl"))]


RECIPE_IMPORTS = "from fastvid.train import Classification, Config, DataConfig, ModelConfig, OptimConfig, RunConfig"
