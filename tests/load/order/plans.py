"""What every plan of batches of varying shape promises, checked over all ranks and worlds."""

import numpy as np

from fastvid.load.order.buckets import ClipSizes
from fastvid.load.order.draws import Permutation
from fastvid.load.order.epoch import MASKED
from fastvid.runtime.processes import World

WORLDS = (1, 2, 3, 5, 7)


def key(sample):
    return f"clip-{sample}"


def ranks(batches, sizes, world, *, last="mask", seed=0, epoch=0, order=None):
    """Return the batches of one epoch for each rank of a world."""
    order = order or Permutation(len(sizes), seed, epoch)
    return [batches.plan(sizes, World(rank, world), last, key).epoch(order) for rank in range(world)]


def steps(epochs, position=0):
    """Return the global batches from a position on: [(start, stop, shape, bins, rows of each rank)]."""
    shares = [list(one.shares(position)) for one in epochs]
    assert {len(one) for one in shares} == {epochs[0].count(position)} == {one.count(position) for one in epochs}
    assert {one.is_over(position) for one in epochs} == {not shares[0]}
    found = []
    for together in zip(*shares, strict=True):
        heads = {(share.start, share.stop, share.shape) for share in together}
        assert len(heads) == 1, heads
        assert all(len(share.positions) >= 1 for share in together)
        rows = [place for share in together for place in share.positions.tolist() if place != MASKED]
        if together[0].bins is None:
            bins = [tuple(sorted(rows))]
        else:
            assert all(share.bins[0] == 0 and share.bins[-1] == len(share.positions) for share in together)
            parts = [part for share in together for part in np.split(share.positions, share.bins[1:-1])]
            bins = sorted(tuple(sorted(part[part != MASKED].tolist())) for part in parts)
        assert len(rows) == together[0].stop - together[0].start
        found.append((*heads.pop(), bins, [len(share.positions) for share in together]))
    return found


def samples(found):
    """Return the positions of all steps in the order of delivery."""
    return [place for _, _, _, bins, _ in found for one in bins for place in one]


def without_ranks(found):
    """Return steps without what may depend on the world."""
    return [one[:-1] for one in found]


def sizes(frames, heights=224, widths=224):
    """Return clip sizes; one height or width may be given for all."""
    frames = np.asarray(frames, dtype=np.int64)
    full = [np.broadcast_to(np.asarray(side, dtype=np.int64), frames.shape).copy() for side in (heights, widths)]
    return ClipSizes(frames, *full)
