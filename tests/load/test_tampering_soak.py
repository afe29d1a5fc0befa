"""Random damage to every file of a dataset: each clip and label that a loader delivers is right, or there is an error.

A short slice always runs; `make soak` runs 1,000 and writes bench/results/tampering.json.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import fastvid
from bench.common.harness import RESULTS, machine_facts, write_json
from fastvid.errors import FastvidError
from tests.datasets import make_clip, pack
from tests.load.loaders import clip_loader

TAMPERS = 1000


def flip_bit(draws, data, _others):
    at = draws.integers(len(data))
    data[at] ^= 1 << draws.integers(8)


def overwrite(draws, data, _others):
    at, length = draws.integers(len(data)), draws.integers(1, 200)
    data[at : at + length] = draws.bytes(len(data[at : at + length]))


def clear(draws, data, _others):
    at, length = draws.integers(len(data)), draws.integers(1, 5000)
    data[at : at + length] = bytes(len(data[at : at + length]))


def cut(draws, data, _others):
    del data[draws.integers(len(data)) :]


def cut_from_the_middle(draws, data, _others):
    at = draws.integers(len(data))
    del data[at : at + draws.integers(1, 600)]


def append(draws, data, _others):
    data += draws.bytes(draws.integers(1, 2000))


def exchange_bytes(draws, data, _others):
    one, two = draws.integers(0, max(1, len(data) - 64), 2)
    data[one : one + 64], data[two : two + 64] = data[two : two + 64], data[one : one + 64]


def take_another_file(draws, data, others):
    data[:] = others[draws.integers(len(others))] if others else b""


MUTATORS = [flip_bit, flip_bit, overwrite, clear, cut, cut_from_the_middle, append, exchange_bytes, take_another_file]


class Tamperer:
    """Damages copies of a dataset and compares what loaders deliver with what the intact one delivers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        clips = [make_clip(folder / f"{n}.mp4", frames=10 + n) for n in range(12)]
        self.good, self.other = folder / "good", folder / "other"
        for target, order in ((self.good, range(6)), (self.other, range(6, 12))):
            samples = [(f"c/{n % 6}", clips[n], n % 2) for n in order]
            columns = {"caption": [f"caption {n}" for n in order]}
            pack(target, [samples[:3], samples[3:]], columns=columns)
        self.files = sorted(str(path.relative_to(self.good)) for path in self.good.rglob("*") if path.is_file())
        self.expected = self.deliver(fastvid.open(self.good), "thread", "raise")[0]
        assert len(set(self.expected.values())) == 6

    def deliver(self, dataset, workers, on_error):
        """Return what a user sees of each clip by its key, and the number of clips that were masked."""
        options = {"frames": fastvid.Uniform(3), "spatial": fastvid.CenterCrop(32), "fields": ("caption",)}
        options |= {"global_batch_size": 3, "shuffle": False, "dtype": torch.uint8, "num_threads": 1}
        loader = clip_loader(dataset, workers=workers, on_error=on_error, max_skip_rate=1.0, **options)
        seen, masked = {}, 0
        try:
            for batch in loader:
                names = [dataset.classes[label] if label >= 0 else None for label in batch.label.tolist()]
                for row, key in enumerate(batch.key):
                    if batch.valid[row]:
                        caption, pixels = batch.fields["caption"][row], batch.video[row].numpy().tobytes()
                        assert key not in seen
                        seen[key] = (int(batch.label[row]), names[row], caption, pixels)
                    else:
                        masked += 1
        finally:
            loader.close()
        return seen, masked

    def run(self, number: int, workers: str, *, mutators=MUTATORS, file: str | None = None) -> tuple[str, str]:
        """Damage one file of a copy, before or after it is opened; return the kind of file and what came of it."""
        draws = np.random.default_rng(number)
        copy = self.folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.good, copy)
        name = file or self.files[draws.integers(len(self.files))]
        path, kind = copy / name, os.path.splitext(name)[1]
        kind = name if kind == ".json" else "annotations" if "annotations" in name else kind
        others = [f for f in self.files if f != name and f.endswith(kind)]
        stock = [(self.good / f).read_bytes() for f in others] + [(self.other / name).read_bytes()]
        data = bytearray(path.read_bytes())
        mutators[draws.integers(len(mutators))](draws, data, stock)
        opened_before, in_place, deleted = draws.random(3) < (0.5, 0.5, 0.03)
        try:
            dataset = fastvid.open(copy) if opened_before else None
            if deleted:
                path.unlink()
            elif in_place:  # under open handles and maps, as rsync --inplace does
                with path.open("r+b") as target:
                    target.write(data)
                    target.truncate()
            else:
                path.with_name("new").write_bytes(data)
                path.with_name("new").replace(path)
            on_error = "skip" if draws.random() < 0.5 else "raise"
            seen, masked = self.deliver(dataset or fastvid.open(copy), workers, on_error)
        except FastvidError as error:
            return kind, "error" if error.hint and len(str(error)) < 1000 else f"unclear: {error!r}"
        if any(self.expected.get(key) != shown for key, shown in seen.items()) or len(seen) + masked != 6:
            return kind, "wrong"
        return kind, "masked" if masked else "same"


@pytest.fixture(scope="module")
def tamperer(tmp_path_factory):
    return Tamperer(tmp_path_factory.mktemp("tampering"))


@pytest.mark.parametrize(("workers", "tampers"), [("thread", 60), ("process", 6)])
def test_damage_is_an_error_or_changes_nothing(tamperer, workers, tampers):
    came = Counter(tamperer.run(number, workers)[1] for number in range(tampers))
    assert set(came) <= {"error", "masked", "same"}, came
    assert came["error"] + came["masked"] > tampers / 4, came
    assert came["same"], came


def test_without_the_hash_of_the_annotations_damage_delivers_wrong_labels(tamperer, monkeypatch):
    """Positive control: the comparison detects what the checks prevent."""
    name = "annotations-000001.parquet"

    def without_hash(storage, generation):
        from fastvid.format.schema import from_parquet

        return from_parquet(storage.read(name), file=name)

    monkeypatch.setattr("fastvid.format.annotations.read_annotations", without_hash)
    assert tamperer.run(0, "thread", mutators=[take_another_file], file=name)[1] == "wrong"


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_1000_tampers_deliver_no_wrong_clip_or_label(tamperer):
    came: dict[str, Counter[str]] = {}
    for number in range(TAMPERS):
        # Worker processes take seconds to start.
        workers = "thread" if number % 8 else "process"
        kind, outcome = tamperer.run(number, workers)
        came.setdefault(f"{kind} {workers}", Counter())[outcome] += 1
    total = sum(came.values(), Counter())
    assert set(total) <= {"error", "masked", "same"}, came
    record = {"schema": "fastvid-soak-tampering/1", "machine": machine_facts(), "tampers": TAMPERS, "wrong": 0}
    write_json(RESULTS / "tampering.json", record | {"outcomes": {kind: dict(came[kind]) for kind in sorted(came)}})
