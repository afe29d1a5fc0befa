"""The diffusion example trains on batches of several shapes, and a stopped run continues with the next batch."""

import re

import pytest

from tests.datasets import make_clip, pack
from tests.examples import kit


@pytest.fixture(scope="module")
def films(tmp_path_factory):
    folder = tmp_path_factory.mktemp("films")
    kinds = [(4, 80, 48), (20, 80, 48), (20, 48, 80), (40, 80, 48)]
    clips = [make_clip(folder / f"{n}.mp4", frames=f, size=f"{w}x{h}") for n, (f, w, h) in enumerate(kinds)]
    facts = [kinds[n % 4] for n in range(260)]
    columns = {"fps": [25.0] * 260, "width": [one[1] for one in facts], "height": [one[2] for one in facts]}
    pack(folder / "set", [[(f"clip{n:03d}", clips[n % 4], 0) for n in range(260)]], columns=columns)
    return str(folder / "set")


def shapes(printed):
    return re.findall(r"clips (\(.*?\))", printed)


def test_a_stopped_run_continues_with_the_next_batch(films, tmp_path, capsys, monkeypatch):
    example = kit.load("buckets_diffusion")
    example.train(films, tmp_path / "whole.pt", epochs=1)
    whole = shapes(capsys.readouterr().out)
    assert len(set(whole)) >= 3
    assert len(whole) > 20

    def save_and_stop(*arguments):
        save(*arguments)
        raise KeyboardInterrupt

    save = example.torch.save
    monkeypatch.setattr(example.torch, "save", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        example.train(films, tmp_path / "last.pt", epochs=1)
    first = shapes(capsys.readouterr().out)
    monkeypatch.undo()
    example.train(films, tmp_path / "last.pt", epochs=1)
    assert first == whole[:10]
    assert first + shapes(capsys.readouterr().out) == whole
