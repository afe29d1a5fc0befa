"""``decoder="auto"``: measures the decoder back-ends for about a second and chooses the fastest.

Rank 0 measures, on this dataset's clips, and broadcasts the choice. Each GPU back-end is measured alone and together
with the default CPU back-end.
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
from fastvid.decode.request import DecoderOutput, DevicePlanes, DeviceRgb, EncodedClip, Planes, Rgb, packed, packed_size
from fastvid.errors import FastvidError
from fastvid.load.clips.clip import Clip
from fastvid.load.device import LoaderStream
from fastvid.load.workers.clip_worker import fetch_clip
from fastvid.load.workers.lanes import choose_backends, merge, on_device, open_decoder, split_lanes
from fastvid.runtime.processes import World

_log = logging.getLogger(__name__)

DEFAULT: Final = "pyav"
"""Decodes every codec on every machine."""

SLOWER: Final = frozenset({"torchcodec-cpu"})
"""Not tried: they wrap each clip in an MP4 and use the same libavcodec as the default, so they are slower; see
``python -m bench decode``. Loading one would cost a second."""

_CLIPS: Final = 32
_NAME_BYTES: Final = 256
_SECONDS: Final = 1.0
# Back-ends differ by a level of colour in places, so the default is replaced only for a clear gain, larger than the
# noise of such a short measurement.
_MARGIN: Final = 1.5


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The chosen back-end and the reason."""

    name: str
    rates: dict[str, float]  # clips per second of each measured back-end; 0 if it failed
    reason: str


def agree(
    clips: Sequence[Clip], world: World, stream: LoaderStream, num_threads: int, kinds: frozenset[type]
) -> BackendChoice:
    """Return rank 0's choice on every rank. Collective if torch's process group has the size of `world`."""
    if world.size == 1:
        return choose(clips, stream, num_threads, kinds)
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() == world.size):
        return BackendChoice(DEFAULT, {}, "ranks cannot agree on a measured choice without a process group")
    verdict = (
        choose(clips, stream, num_threads, kinds) if world.rank == 0 else BackendChoice("", {}, "chosen by rank 0")
    )
    # Broadcast the name as bytes: nothing is unpickled, not even from another rank.
    name = np.zeros(_NAME_BYTES, np.uint8)
    encoded = verdict.name.encode()
    name[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    told = torch.from_numpy(name).to(_collective_device())
    dist.broadcast(told, src=0)
    return replace(verdict, name=told.cpu().numpy().tobytes().rstrip(b"\0").decode())


def _collective_device() -> torch.device:
    """Return a device whose tensors the process group can send: a group of NCCL alone has none for the CPU."""
    import torch.distributed as dist

    # For example "cpu:gloo,cuda:nccl"; torch.distributed names a device for each of its back-ends.
    if "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def choose(
    clips: Sequence[Clip], stream: LoaderStream, num_threads: int, kinds: frozenset[type] = frozenset()
) -> BackendChoice:
    """Measure the back-ends that can decode the clips and return the fastest."""
    able = candidates(clips, stream.device, kinds)
    if len(able) < 2:
        return BackendChoice(able[0][0].name if able else DEFAULT, {}, "no other back-end to measure on this machine")
    fetched = _fetch(clips[:_CLIPS])
    if not fetched:
        return BackendChoice(DEFAULT, {}, "no clip could be read to measure other back-ends")
    rates = {}
    for group in able:
        name = merge(group).name
        rates[name] = measure(group, fetched, stream, num_threads, _SECONDS / len(able))
    best = max(rates, key=lambda name: rates[name])
    if rates.get(DEFAULT) and rates[best] < _MARGIN * rates[DEFAULT]:
        best = DEFAULT
    if not rates[best]:
        return BackendChoice(DEFAULT, rates, "every back-end failed on the measured clips")
    tried = ", ".join(f"{name} {rate:.0f}" for name, rate in sorted(rates.items(), key=lambda item: -item[1]))
    return BackendChoice(best, rates, f"clips/s with {num_threads} threads: {tried}")


def candidates(
    clips: Sequence[Clip], device: torch.device, kinds: frozenset[type] = frozenset()
) -> list[tuple[Backend, ...]]:
    """Return the groups to measure: every available back-end that decodes the clips and may be faster than the default,
    and each GPU back-end together with the default."""
    codecs = {clip.info.codec for clip in clips}
    able = []
    for one in backends().values():
        if one.name in SLOWER or not codecs <= one.codecs or (one.device != "cpu" and one.device != device.type):
            continue
        try:
            why = one.why_unavailable(device.index)
            if why is None and kinds <= one.load().outputs:
                able.append((one, on_device(one)))
        except Exception as error:  # noqa: BLE001 - a back-end that cannot be asked is not measured
            why = f"{type(error).__name__}: {error}"
        if why is not None:
            _log.debug("%s is not measured: %s", one.name, why)
    default = next((one for one, _ in able if one.name == DEFAULT), None)
    pairs = [(default, one) for one, stays in able if default is not None and stays]
    return [*((one,) for one, _ in able), *pairs]


def measure(
    chosen: Sequence[Backend], clips: Sequence[EncodedClip], stream: LoaderStream, num_threads: int, seconds: float
) -> float:
    """Return the clips per second of back-ends that share one queue; 0 if one of them fails.

    For batches on the CPU the rate is per CPU time, so that other load on the machine hardly changes it.
    """
    try:
        lanes = split_lanes(chosen, num_threads, None, stream.device)
    except Exception as error:  # noqa: BLE001 - a back-end that fails in any way is not chosen
        _log.warning("decoder %s is not used: %s", merge(chosen).name, error)
        return 0.0
    counts = [0] * len(lanes)
    failures: list[Exception] = []
    barrier = threading.Barrier(len(lanes))
    times = [0.0] * len(lanes)
    cpu: list[float] = []

    def work(number: int) -> None:
        try:
            stream.enter_thread()
            decoder = open_decoder(lanes[number], stream.device)
            group = max(1, decoder.max_clips)
            place = number % len(clips)
            for turn in range(1 << 30):
                if turn == 1:
                    # The first turn opens contexts and pipelines, which happens once per epoch, so it is not timed.
                    barrier.wait()
                    begun = time.perf_counter()
                    cpu.append(time.process_time())
                batch = [clips[(place + step) % len(clips)] for step in range(group)]
                place += group
                errors = decoder.decode(batch, [_output(decoder.outputs, clip, stream) for clip in batch])
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
        _log.warning("decoder %s is not used: %s", merge(chosen).name, failures[0])
        return 0.0
    if stream.device.type == "cpu":
        return sum(counts) / max(max(cpu) - min(cpu), 1e-9) * len(lanes)
    return sum(count / spent for count, spent in zip(counts, times, strict=True) if spent)


def check(name: str, device: torch.device) -> bool:
    """Return whether the named back-ends are available here, for batches on a device."""
    try:
        choose_backends(name, device)
    except FastvidError as error:
        _log.warning("decoder %s, chosen in an earlier run, is not available here: %s", name, error)
        return False
    return True


def _fetch(clips: Sequence[Clip]) -> list[EncodedClip]:
    fetched = []
    for clip in clips:
        try:
            fetched.append(fetch_clip(clip)[0])
        except FastvidError as error:
            _log.debug("clip not measured: %s", error)
    return fetched


def _output(kinds: frozenset[type], clip: EncodedClip, stream: LoaderStream) -> DecoderOutput:
    """Return memory for a clip as a batch would have it, see `fastvid.load.batch`."""
    request, device = clip.request, stream.device
    count, box, shape = len(request.frames), request.box, (3, len(request.frames), *request.size)
    with stream.use():
        if DevicePlanes in kinds:
            y = torch.empty((count, box.height, box.width), dtype=torch.uint8, device=device)
            uv = torch.empty((count, box.height // 2, box.width // 2, 2), dtype=torch.uint8, device=device)
            return DevicePlanes(y, uv, stream.mark())
        if DeviceRgb in kinds:
            return DeviceRgb(torch.empty(shape, dtype=torch.uint8, device=device), stream.mark())
    if request.levels:
        return packed(np.empty(packed_size(request), np.uint8), request)
    if Planes in kinds and (device.type != "cpu" or Rgb not in kinds):
        return Planes.packed(np.empty(Planes.nbytes(count, box), np.uint8), count, box)
    return Rgb(np.empty(shape, np.uint8))
