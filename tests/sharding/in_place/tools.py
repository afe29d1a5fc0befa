"""Compare datasets of videos in place with what FFmpeg makes of the files."""

import functools

import numpy as np

from fastvid.decode.clips import read_clip
from fastvid.decode.pyav import open_context
from fastvid.decode.request import Box, ClipRequest
from fastvid.media.ffmpeg import Limits
from fastvid.media.probe import HEAD_BYTES, sniff
from fastvid.media.prove import frame_digest, play


def played(path):
    return _played(path, path.stat().st_mtime_ns)


@functools.cache
def _played(path, _changed):
    data = path.read_bytes()
    return play(data, sniff(data[:HEAD_BYTES]), Limits()).digests


def planned(dataset, sample, frames):
    (index,), (row,) = dataset.locate([sample])
    shard = dataset.shard(int(index))
    return digests_by_plan(shard.info(int(row)), shard.table(int(row)), shard.reader(int(row)), frames)


def digests_by_plan(info, table, reader, frames):
    """Return the digest of each frame of a stream, decoded from its own planned packets."""
    box = Box(0, 0, info.height & ~1, info.width & ~1)
    found = []
    for frame in frames:
        request = ClipRequest(0, np.array([frame]), box, (box.height, box.width))
        clip = read_clip(request, info, table, reader)
        context, digest = open_context(info.codec, info.extradata), None
        packets = zip(clip.starts.tolist(), clip.sizes.tolist(), clip.shows.tolist(), strict=True)
        for number, (start, size, _) in enumerate(packets):
            digest = _last(context, clip.data[start : start + size], number, clip.shows, frame) or digest
        found.append(_last(context, None, 0, clip.shows, frame) or digest)
    return found


def _last(context, data, number, shows, frame):
    import av

    packet = None
    if data is not None:
        padded = memoryview(bytes(data) + bytes(64))[: len(data)]
        packet = av.Packet(padded)
        packet.pts = number
    digests = [frame_digest(one) for one in context.decode(packet) if shows[one.pts] == frame]
    return digests[0] if digests else None


def wrong_frames(dataset, sample, path, *, most=None, first=0):
    """Return the frames of a sample that differ from those of its file from `first` on."""
    expected = played(path)
    count = int(dataset.num_frames[sample])
    assert first + count <= len(expected)
    frames = range(count) if most is None or count <= most else np.linspace(0, count - 1, most).astype(int).tolist()
    found = planned(dataset, sample, frames)
    return [frame for frame, digest in zip(frames, found, strict=True) if digest != expected[first + frame]]
