"""Callables of other libraries in `after=`: called clip by clip, seeded, and checked."""

import functools
import random

import numpy as np
import pytest
import torch
from torch import nn

from fastvid.errors import UsageError
from fastvid.load.after.augment import Grayscale
from fastvid.load.after.chain import CallableTransform, TransformChain
from fastvid.load.order.draws import Draws


class Jitter(nn.Module):
    """A transform in the style of torchvision v2: one random factor for all leading dimensions."""

    def __init__(self, low=0.5):
        super().__init__()
        self.low = low
        self.calls = []

    def extra_repr(self):
        return f"low={self.low}"

    def forward(self, clip):
        self.calls.append((tuple(clip.shape), clip.dtype, clip.is_contiguous(), self.training))
        return clip * (self.low + (1 - self.low) * torch.rand(()))


def add_noise(clip):
    return clip + 0.1 * torch.randn_like(clip) + 0.01 * random.random() + 0.01 * float(np.random.rand())


def chain(*after):
    return TransformChain.of(after, ("rgb",))


def clips(count=5, height=8):
    return torch.rand(count, 3, 4, height, 6, generator=torch.Generator().manual_seed(2))


def places(first, count=5):
    return [(Draws(3, 1, position), 0) for position in range(first, first + count)]


def test_a_callable_gets_one_clip_of_frames_at_a_time():
    jitter = Jitter().eval()
    source = clips()
    made = chain(jitter).apply(source.clone(), places(0))
    assert jitter.calls == [((4, 3, 8, 6), torch.float32, True, False)] * 5
    factors = [float(one) for one in (made / source)[:, 0, 0, 0, 0]]
    assert len(set(factors)) == 5
    for clip, before, factor in zip(made, source, factors, strict=True):
        torch.testing.assert_close(clip, before * factor)


@pytest.mark.parametrize("function", [Jitter(), add_noise], ids=["torch", "torch, numpy and random"])
def test_results_depend_on_the_place_of_the_clip_alone(function):
    together = chain(function).apply(clips(), places(0))
    torch.manual_seed(8)
    random.seed(8)
    np.random.seed(8)
    for row in reversed(range(5)):
        alone = chain(function).apply(clips()[row : row + 1], places(row, 1))
        assert torch.equal(alone[0], together[row])
    # Another place in the list is another stream of numbers.
    assert not torch.equal(chain(Grayscale(0), function).apply(clips(), places(0)), together)


def test_global_generators_stay_as_they_are_even_after_an_error():
    def broken(clip):
        add_noise(clip)
        raise ValueError("no")

    def numbers():
        return torch.rand(3).tolist(), random.random(), np.random.rand(2).tolist()

    def seed():
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)

    seed()
    expected = numbers()
    seed()
    chain(add_noise).apply(clips(), places(0))
    with pytest.raises(ValueError, match="no") as caught:
        chain(broken).apply(clips(), places(0))
    assert numbers() == expected
    assert any("broken" in note and "[4, 3, 8, 6]" in note for note in caught.value.__notes__)


def test_a_callable_may_resize_all_clips_alike_and_reuse_its_memory():
    memory = torch.empty(4, 3, 4, 3, dtype=torch.float64)

    def halve(clip):
        return memory.copy_(clip[..., ::2, ::2])

    made = chain(halve).apply(clips(), places(0))
    assert made.dtype is torch.float32
    assert torch.equal(made, clips()[..., ::2, ::2])


def test_results_carry_no_gradients():
    layer = nn.Conv2d(3, 3, 3, padding=1)
    assert not chain(layer).apply(clips(), places(0)).requires_grad


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda clip: None, "returned NoneType, expected a tensor"),
        (lambda clip: (clip, 0), "returned tuple"),
        (lambda clip: (clip * 255).to(torch.uint8), r"returned torch.uint8 \[4, 3, 8, 6\]"),
        (lambda clip: clip[:2], r"returned torch.float32 \[2, 3, 8, 6\]"),
        (lambda clip: clip[:, :1], r"\[4, 1, 8, 6\]"),
        (lambda clip: clip[None], r"\[1, 4, 3, 8, 6\]"),
        (lambda clip: clip[..., :0], r"\[4, 3, 8, 0\]"),
        (lambda clip: clip[..., : 2 + int(3 * torch.rand(()))], "returned clips of .x8 pixels and .x8 pixels"),
    ],
)
def test_a_wrong_result_is_an_error_that_names_the_transform(function, message):
    with pytest.raises(UsageError, match=message) as caught:
        chain(function).apply(clips(), places(0))
    assert f"the transform {__name__}.<lambda>" in str(caught.value)
    assert caught.value.hint


def test_the_fingerprint_of_a_callable_has_its_name_and_settings_but_no_address():
    assert repr(CallableTransform(add_noise)) == f"{__name__}.add_noise: <function add_noise>"
    assert repr(CallableTransform(Jitter(0.25))) == f"{__name__}.Jitter: Jitter(low=0.25)"
    both = CallableTransform(nn.Sequential(Jitter(0.25), Jitter(0.5)))
    assert "\n" not in repr(both)
    partial = CallableTransform(functools.partial(add_noise, scale=2))
    assert repr(partial) == "functools.partial: functools.partial(<function add_noise>, scale=2)"
    assert (
        repr(CallableTransform(Jitter().forward))
        == f"{__name__}.Jitter.forward: <bound method Jitter.forward of Jitter(low=0.5)>"
    )


def test_the_fingerprint_stays_when_calls_change_the_repr():
    class Counting:
        calls = 0

        def __call__(self, clip):
            self.calls += 1
            return clip

        def __repr__(self):
            return f"Counting({self.calls})"

    one = chain(Counting())
    before = repr(one)
    one.apply(clips(), places(0))
    assert repr(one) == before
    assert "Counting(0)" in before
