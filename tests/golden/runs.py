"""Losses of real runs, from the recipe to metrics.jsonl: 50 steps in float64, and the evaluations afterwards.

Results do not depend on a decoder's rounding: films have ten grey levels, and the model rounds to them. The model adds
and multiplies in a fixed order, so that results do not depend on the CPU's vector width. Only softmax and optimiser use
torch's kernels, which may differ in the last bit between builds: all bits are compared with the recorded torch and
kernels, and twelve digits otherwise.
"""

import json

import torch
from torch import nn

from tests import forks
from tests.golden.films import GREY_LEVELS, GREYS, film
from tests.golden.seams import RECIPE_IMPORTS, command, losses, pack

NAME = "runs"

CLASSES, TRAIN, HELD_OUT = 3, 40, 14
STEPS = 50
# Runs with two ranks, and their overrides of the recipe.
TOGETHER = {"ddp, two ranks": (), "kavg, two ranks": ("sync=kavg", "sync_options.period=3", "run.epochs=3")}
EVALUATED = ("1x1", "3x3", "2x10", "twice")
DIGITS = 1e-12
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the loader

RECIPE = f"""
import fastvid
{RECIPE_IMPORTS}

def recipe():
    return Config(
        data=DataConfig(
            path={{data!r}}, frames=fastvid.Segments(2), eval_frames=fastvid.Segments(2, jitter=False),
            spatial=(fastvid.RandomCrop(8), fastvid.HorizontalFlip()), eval_spatial=(fastvid.CenterCrop(8),),
            global_batch_size=8, eval_batch_size=5, num_threads=1,
        ),
        model=ModelConfig(name="{__name__}:counting"),
        optim=OptimConfig(
            base_lr=0.05, base_batch_size=8, warmup_epochs=1.5, decay="cosine", weight_decay=0.01,
        ),
        task=Classification(label_smoothing=0.1),
        run=RunConfig(
            out={{out!r}}, epochs={STEPS * 8 // TRAIN}, log_every_steps=1, eval_every_epochs=99, keep_checkpoints=1,
            timeout_s=240.0,
        ),
    )
"""


class Counting(nn.Module):
    """Two layers with a square and a dropout between them, and every sum in a fixed order."""

    HIDDEN = 4

    def __init__(self, num_classes, num_frames):
        super().__init__()
        self.first = nn.Parameter(_spread(self.HIDDEN, 3 * num_frames * 8 * 8))
        self.second = nn.Parameter(_spread(num_classes, self.HIDDEN))

    def forward(self, video):
        mean, std = (torch.tensor(three, dtype=torch.float64).view(3, 1, 1, 1) for three in (MEAN, STD))
        greys = ((video.double() * std + mean) * 255 / GREY_LEVELS).round()
        return torch.stack([self._logits(clip.flatten() / GREYS - 0.5) for clip in greys])

    def _logits(self, clip):
        hidden = _sum(clip * self.first)
        hidden = hidden + hidden * hidden
        if self.training:
            # Integers: floating-point draws may come from other generators in other builds.
            hidden = hidden * torch.randint(0, 4, (self.HIDDEN,)).clamp_max(1).double()
        return _sum(hidden * self.second)


def counting(num_classes, num_frames):
    """Return the model of the recipe."""
    return Counting(num_classes, num_frames)


def _spread(rows, columns):
    return ((torch.arange(rows * columns) * 37 % 101 - 50).double() / 500).view(rows, columns)


def _sum(values):
    """Return the sum over the last axis by recursive halving."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        rest = values[..., 2 * half :]
        values = values[..., :half] + values[..., half : 2 * half]
        if rest.shape[-1]:
            values = torch.cat([values, rest], -1)
    return values[..., 0]


def kernels():
    """Return the facts that determine the last bit of torch's functions."""
    found = torch.backends.cpu.get_cpu_capability()
    # These two produced the same bits (torch 2.13); kernels without fused multiply-add do not.
    return f"torch {torch.__version__}, {'AVX2 or AVX512' if found in ('AVX2', 'AVX512') else found}"


def text(numbers):
    """Format numbers with all their bits, readable enough to see which one changed."""
    return " ".join(number.hex() for number in numbers)


def first_difference(found, recorded, *, bits):
    """Return where two texts of numbers differ, in any bit or in the first twelve digits; empty if they do not."""
    mine, theirs = ([float.fromhex(word) for word in one.split()] for one in (found, recorded))
    if len(mine) != len(theirs):
        return f"{len(mine)} numbers, {len(theirs)} were recorded"
    for place, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if not (a == b if bits else abs(a - b) <= DIGITS * abs(b)):
            return f"number {place} is {a!r}, {b!r} was recorded: {abs(a - b) / abs(b):.1e} of it"
    return ""


def prepare(folder):
    """Write the recipe and its dataset; return the recipe's file."""
    films = [film(6 + n, 48, 32, seed=n, kind="grey") for n in range(9)]
    samples = [(f"c{n:02d}", films[n % 9], n % CLASSES) for n in range(TRAIN + HELD_OUT)]
    split = ["train"] * TRAIN + ["val"] * HELD_OUT
    pack(folder / "data", [samples[:30], samples[30:]], tuple("abc"), split=split)
    recipe = folder / "recipe.py"
    recipe.write_text(RECIPE.format(data=str(folder / "data"), out=str(folder / "ddp on 1")))
    return recipe


def alone(recipe):
    """Return the losses of a run in this process."""
    out = recipe.parent / "ddp on 1"
    if not out.exists():
        command("train", recipe)
    return text(losses(out))


def together(recipe, which):
    """Return the losses of a run with two ranks."""
    words = (recipe, f"run.out={recipe.parent / which}", *TOGETHER[which])
    done = forks.ranks(2, "fastvid.train", *words, folder=recipe.parent)
    assert [rank.returncode for rank in done] == [0, 0], done
    return text(losses(recipe.parent / which))


def evaluation(recipe, protocol):
    """Return the result of an evaluation of the run."""
    alone(recipe)
    found = json.loads(command("eval", recipe, "--protocol", protocol, "--json"))
    counts = f"{found['scored']} of {found['total']} by {found['views']} views, confusion {found['confusion']}"
    return {"loss": text([found["loss"]]), "counts": counts}


def cases(folder):
    """Return a function for each record by name."""
    recipe = prepare(folder)
    return {
        "losses / ddp, one rank": lambda: alone(recipe),
        **{f"losses / {name}": lambda name=name: together(recipe, name) for name in TOGETHER},
        **{f"evaluation / {name}": lambda name=name: evaluation(recipe, name) for name in EVALUATED},
    }
