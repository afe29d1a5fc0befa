"""``decoder="auto"``: the fastest back-end here, for this dataset and these clips, by trying for about a second.

Rank 0 tries and tells the others. Back-ends that decode on a GPU are tried alone and together with the CPU's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from fastvid.decode.backends import Backend, backends
from fastvid.decode.request import DeviceRgb, EncodedClip, Output, Planes, Rgb
from fastvid.errors import FastvidError
from fastvid.load.clips.clip import Clip
from fastvid.load.workers.fetch import fetch_clip
from fastvid.load.workers.lanes import choose_backends, merge, on_device, split_lanes
from fastvid.runtime.world import World

_log = logging.getLogger(__name__)

DEFAULT: Final = "pyav"
"""Decodes every codec on every machine."""

SLOWER: Final = frozenset({"torchcodec-cpu"})
"""Not tried: it drives the libavcodec of the default, through an MP4 for each clip, and reaches 0.25 to 0.41 of its
speed (8 frames of `intra` and `compact`, 1 and 2 threads, torchcodec 0.11). Loading it would cost a second."""

_CLIPS: Final = 32
_NAME_BYTES: Final = 256
_SECONDS: Final = 1.0
# Back-ends differ by a level of colour here and there, so the default is left only for what is worth it, and never
# because of a measurement of a fraction of a second.
_MARGIN: Final = 1.5


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was chosen, and why.

    Attributes:
        name: Of the back-end, or of several joined by "+".
        rates: Clips a second of those that were tried; 0 for those that failed.
        reason: One line for people.
    """

    name: str
    rates: dict[str, float]
    reason: str


def agree(
    clips: Sequence[Clip], world: World, device: torch.device, num_threads: int, kinds: frozenset[type]
) -> Verdict:
    """The choice of rank 0, on every rank. Collective where torch's process group is that of `world`.

    Args:
        clips: Clips of this rank to try.
        world: This rank, and how many there are.
        device: Where batches lie.
        num_threads: Threads that decode on the CPU.
        kinds: What a back-end must be able to write; empty for anything.
    """
    if world.size == 1:
        return choose(clips, device, num_threads, kinds)
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() == world.size):
        return Verdict(DEFAULT, {}, "ranks cannot agree without a process group")
    verdict = choose(clips, device, num_threads, kinds) if world.rank == 0 else Verdict("", {}, "chosen by rank 0")
    # The name travels as bytes: nothing is unpickled, not even from another rank.
    name = np.zeros(_NAME_BYTES, np.uint8)
    encoded = verdict.name.encode()
    name[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    told = torch.from_numpy(name).to(device if dist.get_backend() == "nccl" else "cpu")
    dist.broadcast(told, src=0)
    return replace(verdict, name=told.cpu().numpy().tobytes().rstrip(b"\0").decode())


def choose(
    clips: Sequence[Clip], device: torch.device, num_threads: int, kinds: frozenset[type] = frozenset()
) -> Verdict:
    """Tries the back-ends that can decode the clips, and takes the fastest.

    Args:
        clips: Clips to try; a few dozen.
        device: Where batches lie.
        num_threads: Threads that decode on the CPU.
        kinds: What a back-end must be able to write; empty for anything.
    """
    able = candidates(clips, device, kinds)
    if len(able) < 2:
        return Verdict(able[0][0].name if able else DEFAULT, {}, "no other back-end here is worth a try")
    fetched = _fetch(clips[:_CLIPS])
    if not fetched:
        return Verdict(DEFAULT, {}, "no clip could be read to try others")
    rates = {}
    for group in able:
        name = merge(group).name
        rates[name] = measure(group, fetched, device, num_threads, _SECONDS / len(able))
    best = max(rates, key=lambda name: rates[name])
    if rates.get(DEFAULT) and rates[best] < _MARGIN * rates[DEFAULT]:
        best = DEFAULT
    if not rates[best]:
        return Verdict(DEFAULT, rates, "every back-end failed on the clips that were tried")
    tried = ", ".join(f"{name} {rate:.0f}" for name, rate in sorted(rates.items(), key=lambda item: -item[1]))
    return Verdict(best, rates, f"clips/s with {num_threads} threads: {tried}")


def candidates(
    clips: Sequence[Clip], device: torch.device, kinds: frozenset[type] = frozenset()
) -> list[tuple[Backend, ...]]:
    """What to try: every back-end that runs here, decodes the clips and may be faster than the default, and each of a
    GPU together with the default."""
    codecs = {clip.info.codec for clip in clips}
    able = []
    for one in backends().values():
        if one.name in SLOWER or not codecs <= one.codecs or (one.device != "cpu" and one.device != device.type):
            continue
        why = one.why_unavailable()
        if why is not None:
            _log.debug("%s is not tried: %s", one.name, why)
        elif kinds <= one.load().outputs:
            able.append(one)
    default = next((one for one in able if one.name == DEFAULT), None)
    pairs = [(default, one) for one in able if default is not None and on_device(one)]
    return [*((one,) for one in able), *pairs]


def measure(
    chosen: Sequence[Backend], clips: Sequence[EncodedClip], device: torch.device, num_threads: int, seconds: float
) -> float:
    """Clips a second of some back-ends that serve one queue; 0 when one of them fails.

    For batches on the CPU it is the speed that their CPU time allows, which other work on the machine hardly changes.
    """
    lanes = split_lanes(chosen, num_threads, None)
    counts = [0] * len(lanes)
    failures: list[Exception] = []
    barrier = threading.Barrier(len(lanes))
    times = [0.0] * len(lanes)
    cpu: list[float] = []

    def work(number: int) -> None:
        try:
            decoder = lanes[number].open()
            group = max(1, decoder.max_clips)
            place = number % len(clips)
            for turn in range(1 << 30):
                if turn == 1:
                    # The first turn opens contexts and pipelines, which an epoch does once.
                    barrier.wait()
                    begun = time.perf_counter()
                    cpu.append(time.process_time())
                batch = [clips[(place + step) % len(clips)] for step in range(group)]
                place += group
                errors = decoder.decode(batch, [_output(decoder.outputs, clip, device) for clip in batch])
                failures.extend(error for error in errors if error is not None)
                if turn:
                    counts[number] += group
                    times[number] = time.perf_counter() - begun
                if failures or times[number] > seconds:
                    break
            cpu.append(time.process_time())
            decoder.close()
        except Exception as error:  # noqa: BLE001 - a back-end that fails in any way is not chosen
            failures.append(error)
        if failures:
            barrier.abort()

    threads = [threading.Thread(target=work, args=(number,), name="fastvid-try") for number in range(len(lanes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        _log.warning("decoder %s is left out: %s", merge(chosen).name, failures[0])
        return 0.0
    if device.type == "cpu":
        return sum(counts) / max(max(cpu) - min(cpu), 1e-9) * len(lanes)
    return sum(count / spent for count, spent in zip(counts, times, strict=True) if spent)


def check(name: str) -> bool:
    """Whether the back-ends of a name run here."""
    try:
        choose_backends(name)
    except FastvidError as error:
        _log.warning("decoder %s, which was chosen before, does not run here: %s", name, error)
        return False
    return True


def _fetch(clips: Sequence[Clip]) -> list[EncodedClip]:
    fetched = []
    for clip in clips:
        try:
            fetched.append(fetch_clip(clip)[0])
        except FastvidError as error:
            _log.debug("a clip is not tried: %s", error)
    return fetched


def _output(kinds: frozenset[type], clip: EncodedClip, device: torch.device) -> Output:
    request = clip.request
    count, shape = len(request.frames), (3, len(request.frames), *request.size)
    if DeviceRgb in kinds:
        return DeviceRgb(torch.empty(shape, dtype=torch.uint8, device=device))
    if Planes in kinds and (device.type != "cpu" or Rgb not in kinds):
        return Planes.packed(np.empty(Planes.nbytes(count, request.box), np.uint8), count, request.box)
    return Rgb(np.empty(shape, np.uint8))
