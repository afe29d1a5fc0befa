"""Digests of the samples, frames and crops that a loader visits, taken with a decoder that records its requests."""

import torch

import fastvid
from tests.golden.films import film
from tests.golden.golden import Sha
from tests.golden.seams import RECORDER, REQUEST, REQUEST_VALUES, pack
from tests.load.loaders import clip_loader

NAME = "orders"
POSITIONS = 10_000
POSITIONS_OF_ORDER = 3_000
CLASSES = tuple("abcdefg")
# Width and height.
SIZES = ((320, 240), (256, 256), (256, 320), (448, 256), (256, 144), (64, 96), (480, 256), (176, 144))
MIRRORED = fastvid.HorizontalFlip()

# Frames and crop.
SAMPLERS = {
    "segments": (fastvid.Segments(8), (fastvid.MultiScaleCrop((110, 111)), MIRRORED)),
    "consecutive segments": (fastvid.Segments(4, length=3), fastvid.RandomCrop(64)),
    "dense": (fastvid.Dense(8, 4), (fastvid.RandomResizedCrop((80, 112)), MIRRORED)),
    "dense, clamped": (
        fastvid.Dense(6, 5, short="clamp"),
        (fastvid.RandomCrop((64, 48), short_side=100), fastvid.HorizontalFlip(0.3)),
    ),
    "uniform": (fastvid.Uniform(5), fastvid.CenterCrop(112, short_side=128)),
}


def dataset(folder):
    """Create 600 samples of 1 to 301 frames in several sizes and three shards, and 50 samples of other classes."""
    films = [film(1 + n * 37 % 301, *SIZES[n % len(SIZES)], seed=n, kind="still") for n in range(120)]
    samples = [(f"s{n:04d}", films[n % 120], n * n % len(CLASSES)) for n in range(600)]
    split = ["train" if n % 5 else "val" for n in range(600)]
    main = pack(folder / "main", [samples[:250], samples[250:420], samples[420:]], CLASSES, split=split)
    others = [(f"t{n:04d}", films[n], n % 3) for n in range(50)]
    return main, pack(folder / "other", [others], ("c", "h", "a"))


def loader(data, **options):
    """Return a loader of one rank in one thread that drops no samples."""
    standard = {
        "frames": fastvid.Uniform(1), "spatial": fastvid.CenterCrop(32), "global_batch_size": 100, "seed": 11,
        "decoder": RECORDER, "dtype": torch.uint8, "num_threads": 1, "last": "keep", "rank": 0, "world_size": 1,
    }  # fmt: skip
    return clip_loader(data, **standard | options)


def batches(made, positions):
    """Yield whole batches, epoch after epoch, until this many positions were visited."""
    visited = 0
    while visited < positions:
        for batch in made:
            yield batch
            visited += batch.stop - batch.start
            if visited >= positions:
                return


def asked(batch):
    """Return the crop, size and flip of each row."""
    return batch.video[:, 0, 0, 0, : REQUEST_VALUES * REQUEST.itemsize].contiguous().numpy().view(REQUEST)


def sampler(name, data):
    """Return the digests of samples, frames and crops of 10,000 positions."""
    frames, spatial = SAMPLERS[name]
    ids, shown, boxes = Sha(), Sha(), Sha()
    for batch in batches(loader(data, frames=frames, spatial=spatial), POSITIONS):
        ids.add(batch.sample)
        shown.add(batch.frame_index)
        boxes.add(asked(batch))
    return {"ids": str(ids), "frames": str(shown), "boxes": str(boxes)}


def order(data, **options):
    """Return the digests of samples, keys and labels of several epochs."""
    ids, rows = Sha(), Sha()
    for batch in batches(loader(data, **options), POSITIONS_OF_ORDER):
        ids.add(batch.epoch, batch.position, batch.sample)
        rows.add(batch.label)
        rows.say(" ".join(batch.key))
    return {"ids": str(ids), "keys and labels": str(rows)}


def shares(data, world, **options):
    """Return the digests of each rank's rows and weights in the batches of two epochs."""
    got = Sha()
    for rank in range(world):
        made = loader(data, rank=rank, world_size=world, **options)
        for batch in (batch for _ in range(2) for batch in made):
            got.add(batch.epoch, batch.start, batch.stop, batch.position, batch.sample, batch.valid)
            got.say(" ".join(map(float.hex, batch.weight.tolist())))
    return str(got)


def cases(folder):
    """Return a function for each digest by name."""
    main, other = dataset(folder)
    few = fastvid.open(folder / "main", split="val", where="num_frames < 200")
    mixed = fastvid.Mixture([main, other], weights=(3, 1), num_samples=900)
    return {
        **{f"sampler / {name}": lambda name=name: sampler(name, main) for name in SAMPLERS},
        "order / shuffled": lambda: order(main, seed=2**64 - 1),
        "order / as they lie": lambda: order(few, shuffle=False),
        "order / blocks": lambda: order(main, shuffle=fastvid.BlockShuffle(64)),
        # More than 65,536 positions: permuted by the network, not sorted. Four equal classes do not divide 100,003.
        "order / balanced": lambda: order(main, balance=fastvid.ClassBalanced(0.5, num_samples=100_000)),
        "order / equal classes": lambda: order(main, balance=fastvid.ClassBalanced(num_samples=100_003)),
        "order / mixture": lambda: order(fastvid.Mixture([main, other])),
        "order / weighted mixture": lambda: order(mixed),
        "order / clips per video": lambda: order(few, clips_per_video=3, global_batch_size=99),
        "shares / three ranks, mask": lambda: shares(few, 3, last="mask", global_batch_size=7),
        "shares / three ranks, keep": lambda: shares(few, 3, last="keep", global_batch_size=8),
        "shares / two ranks, groups": lambda: shares(few, 2, last="drop", global_batch_size=12, group_size=4),
    }
