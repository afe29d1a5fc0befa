"""Loader states as readable text, part by part: states that users have saved must still load."""

from functools import partial

import fastvid
from tests.golden.films import film
from tests.golden.orders import loader
from tests.golden.seams import pack, pack_flow

NAME = "states"

STILL = {"frames": fastvid.Segments(4, jitter=False), "spatial": fastvid.CenterCrop(16)}
SAMPLERS = {
    "segments": {"frames": fastvid.Segments(8)},
    "segments for evaluation": {"frames": fastvid.Segments(8, jitter=False, length=2)},
    "dense": {"frames": fastvid.Dense(16, 4)},
    "dense, clamped": {"frames": fastvid.Dense(16, 4, jitter=False, short="clamp")},
    "uniform": {"frames": fastvid.Uniform(5)},
    "views": {**STILL, "views": fastvid.Views(10, 3)},
}
CROPS = {
    "center": fastvid.CenterCrop(16),
    "center of a short side": fastvid.CenterCrop((16, 32), short_side=40),
    "random": fastvid.RandomCrop(16, short_side=40),
    "resized": fastvid.RandomResizedCrop(16),
    "resized, with bounds": fastvid.RandomResizedCrop(16, scale=(0.2, 0.9), ratio=(0.5, 2.0)),
    "scales": fastvid.MultiScaleCrop(16),
    "two scales": fastvid.MultiScaleCrop(16, scales=(1, 0.875), max_distort=0, more_fix_crop=False),
    "flip": (fastvid.RandomCrop(16), fastvid.HorizontalFlip()),
}


def cases(folder):
    """Return a function for each text by name."""
    films = [film(3 + n, 64, 48, seed=n, kind="still") for n in range(4)]
    samples = [(f"s{n}", films[n % 4], n % 2) for n in range(12)]
    split = ["train" if n % 4 else "val" for n in range(12)]
    data = pack(folder / "one", [samples[:8], samples[8:]], ("a", "b"), split=split)
    some = fastvid.open(folder / "one", split="train", where="num_frames > 4")
    both = fastvid.Mixture([data, some])
    flow = pack_flow(folder / "flow", [("s", films[0], film(3, 64, 96, kind="still"))])
    orders = {
        "shuffled": (data, {}),
        "as they lie": (data, {"shuffle": False}),
        "blocks": (data, {"shuffle": fastvid.BlockShuffle(64)}),
        "balanced": (data, {"balance": fastvid.ClassBalanced(0.5, num_samples=40)}),
        "mixture": (both, {}),
        "weighted mixture": (fastvid.Mixture([data, some], weights=(3, 1), num_samples=20), {}),
        "clips per video": (data, {"clips_per_video": 3, "global_batch_size": 3}),
    }

    def names():
        return " ".join(loader(data, global_batch_size=1).state_dict()["fingerprint"])

    def part(which, data, **options):
        text = loader(data, **{"global_batch_size": 1, "decoder": "pyav"} | options).state_dict()["fingerprint"][which]
        assert isinstance(text, str)
        return text

    def state():
        made = loader(data, global_batch_size=4, seed=2**64 - 1)
        made.set_epoch(3)
        for number, _ in enumerate(made):
            if number == 1:
                break
        return {name: value for name, value in made.state_dict().items() if name != "fingerprint"}

    def decoder():
        made = loader(data, global_batch_size=4, decoder="auto")
        next(iter(made))
        return str(made.state_dict()["decoder"])

    parts = {
        "streams / flow": lambda: part("streams", flow, streams="flow", flow_stack=5),
        "streams / rgb and flow": lambda: part("streams", flow, streams=("rgb", "flow")),
    }
    for which in ("dataset", "generation", "split", "filter", "selection"):
        for name, chosen in (("whole", data), ("selection", some), ("mixture", both)):
            parts[f"{which} / {name}"] = partial(part, which, chosen)
    for name, (chosen, options) in orders.items():
        parts[f"order / {name}"] = partial(part, "order", chosen, **options)
    for name, options in SAMPLERS.items():
        parts[f"sampler / {name}"] = partial(part, "sampler", data, **options)
    for name, crop in CROPS.items():
        parts[f"augmentation / {name}"] = partial(part, "augmentation", data, spatial=crop)
    return {"state": state, "decoder, chosen": decoder, "parts": names, **parts}
