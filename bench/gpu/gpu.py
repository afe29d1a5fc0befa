"""Everything about one GPU in one run of under 8 minutes: who decodes how fast, on how many engines, and how rightly.

    doctor      versions, NVDEC engines, driver libraries, agreement of CPU and GPU decoders
    lanes       dali-gpu clips a second with 1, 2, 4 and 7 pipelines, and how busy NVDEC was
    decoders    dali-gpu, torchcodec-cuda, the CPU path and both together, through a loader; by profile and size
    pixels      the planes-to-batch kernel's bandwidth beside the device's own copy
    step        a TSM-R50 training step in bfloat16, fed by the loader and by a batch that never changes

Sections that a machine cannot run are recorded with the reason. ``--device cpu`` runs all of it that needs no GPU, with
the CPU's back-ends in the places of the GPU's.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import fastvid
from bench.common.corpus import shard
from bench.common.harness import RESULTS, machine_facts, write_json
from fastvid.cli import doctor
from fastvid.decode.colours import ClipPlanes, Pixels
from fastvid.decode.pixels import finish_planes
from fastvid.errors import FastvidError, UsageError
from fastvid.models.zoo import build

SCHEMA: Final = "fastvid-bench-gpu/1"

_CROP: Final = {256: 224, 720: 640}
_NUM_FRAMES: Final = 8

_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``python -m bench gpu``."""
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="(default: %(default)s)")
    parser.add_argument("--footage", type=Path, metavar="FOLDER", help="videos to shard; by default made by ffmpeg")
    parser.add_argument("--videos", type=int, default=24, help="how many are made (default: %(default)s)")
    parser.add_argument("--cache", type=Path, default=Path("runs/bench-gpu"), help="where datasets are (%(default)s)")
    parser.add_argument("--sides", type=int, nargs="+", default=[256, 720], help="short sides (256 720)")
    parser.add_argument("--profiles", nargs="+", help="(compact intra; on a CPU also vp9, which DALI decodes there)")
    parser.add_argument("--seconds", type=float, default=6.0, help="each measurement takes (default: %(default)s)")
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 2, 4, 7], help="pipelines (1 2 4 7)")
    parser.add_argument("--batch", type=int, default=32, help="clips of a batch (default: %(default)s)")
    parser.add_argument("--model", default="tsm-r50", help="of the training step (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=RESULTS / "gpu.json", help="result file (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Runs all sections."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("torch sees no CUDA device", hint="--device cpu runs what needs none")
    profiles = args.profiles or (["compact", "intra"] if args.device == "cuda" else ["compact", "intra", "vp9"])
    record: dict[str, Any] = {"schema": SCHEMA, "machine": machine_facts(), "device": args.device, "seconds": {}}
    folders: dict[tuple[str, int], Path] = {}

    def datasets() -> list[dict[str, Any]]:
        made = []
        for side in args.sides:
            footage = args.footage or make_footage(args.cache / f"footage-{side}", args.videos, side)
            for profile in profiles:
                folders[profile, side] = shard(
                    footage, profile, args.cache, options=("--short-side", str(side)), name=f"{profile}-{side}"
                )
                size = sum(path.stat().st_size for path in folders[profile, side].glob("*.tar"))
                made.append({"profile": profile, "short_side": side, "megabytes": round(size / 1e6, 1)})
        return made

    sections: dict[str, Callable[[], Any]] = {
        "doctor": doctor.examine,
        "datasets": datasets,
        "lanes": lambda: lanes(args, folders),
        "decoders": lambda: decoders(args, folders),
        "pixels": lambda: pixels(args),
        "step": lambda: step(args, folders),
    }
    for name, section in sections.items():
        begun = time.perf_counter()
        try:
            record[name] = section()
        except (FastvidError, RuntimeError, OSError) as error:
            record[name] = {"failed": f"{type(error).__name__}: {error}"}
        record["seconds"][name] = round(time.perf_counter() - begun, 1)
        print(f"{name}: {_line(record[name])}", flush=True)
        write_json(args.json, record)
    return 0


def lanes(args: argparse.Namespace, folders: dict[tuple[str, int], Path]) -> list[dict[str, Any]]:
    """Clips a second of one GPU back-end by the number of its lanes; on a CPU, of DALI's own threads."""
    name, profiles = ("dali-gpu", ("intra", "compact")) if args.device == "cuda" else ("dali-cpu", ("vp9",))
    rows = []
    for (profile, side), folder in folders.items():
        if profile not in profiles:
            continue
        for count in args.lanes:
            options = {"device_lanes": count} if args.device == "cuda" else {"num_threads": count}
            with Busy() as busy:
                found = throughput(folder, name, side, args, **options)
            rows.append({"profile": profile, "short_side": side, "lanes": count, **found, **busy.summary()})
    return rows


def decoders(args: argparse.Namespace, folders: dict[tuple[str, int], Path]) -> list[dict[str, Any]]:
    """Clips a second of every way to decode, batches ready on the device."""
    if args.device == "cuda":
        names = ["pyav", "dali-gpu", "torchcodec-cuda", "pyav+dali-gpu"]
    else:
        names = ["pyav", "torchcodec-cpu", "dali-cpu", "pyav+dali-cpu"]
    rows = []
    for (profile, side), folder in folders.items():
        for name in names:
            row: dict[str, Any] = {"profile": profile, "short_side": side, "decoder": name}
            try:
                with Busy() as busy:
                    row |= throughput(folder, name, side, args)
                row |= busy.summary()
            except FastvidError as error:
                row["failed"] = error.message
            rows.append(row)
    return rows


def throughput(folder: Path, decoder: str, side: int, args: argparse.Namespace, **options: Any) -> dict[str, Any]:
    """Clips a second that a loader delivers on the device, after its first two batches.

    Raises:
        FastvidError: The decoder does not run here, or does not decode the dataset.
    """
    loader = make_loader(folder, decoder, side, args, **options)
    clips, begun, spent = 0, 0.0, 0.0
    number = -1
    while spent < args.seconds:
        for batch in loader:
            number += 1
            if number < 2:
                synchronize(args.device)
                begun = time.perf_counter()
                continue
            clips += len(batch.key)
            synchronize(args.device)
            spent = time.perf_counter() - begun
            if spent >= args.seconds:
                break
    loader.close()
    return {"clips_per_s": round(clips / spent, 1), "clips": clips}


def make_loader(folder: Path, decoder: str, side: int, args: argparse.Namespace, **options: Any) -> fastvid.ClipLoader:
    """Eight frames a clip, cropped at random and mirrored, in bfloat16 on the device."""
    crop = min(_CROP.get(side, side * 7 // 8 // 16 * 16), side)
    return fastvid.ClipLoader(
        fastvid.open(folder),
        frames=fastvid.Segments(_NUM_FRAMES),
        spatial=[fastvid.RandomCrop(crop), fastvid.HorizontalFlip(0.5)],
        global_batch_size=args.batch,
        repeats=max(1, -(-4 * args.batch // len(fastvid.open(folder)))),
        device=args.device,
        decoder=decoder,
        dtype=torch.bfloat16,
        **options,
    )


def pixels(args: argparse.Namespace) -> dict[str, Any]:
    """Bytes a second that go through `finish_planes`, read and written, beside a plain copy on the device."""
    clips, (height, width) = args.batch, (224, 224)
    size = _NUM_FRAMES * height * width * 3 // 2
    buffer = torch.randint(0, 256, (clips * size,), dtype=torch.uint8).to(args.device)
    planes = [ClipPlanes.packed(buffer[n * size :], _NUM_FRAMES, height, width, flip=bool(n % 2)) for n in range(clips)]
    wanted = Pixels(dtype=torch.bfloat16)
    out = wanted.empty(clips, _NUM_FRAMES, (height, width), args.device)
    moved = buffer.nbytes + out.nbytes
    copy = torch.empty(moved // 2, dtype=torch.uint8, device=args.device)
    other = torch.empty_like(copy)
    rates = {
        "finish_planes": moved / timed(lambda: finish_planes(planes, (height, width), wanted, out=out), args),
        "copy": 2 * copy.nbytes / timed(lambda: other.copy_(copy), args),
    }
    found = {f"{name}_gb_per_s": round(rate / 1e9, 2) for name, rate in rates.items()}
    return found | {"share_of_copy": round(rates["finish_planes"] / rates["copy"], 3)}


def step(args: argparse.Namespace, folders: dict[tuple[str, int], Path]) -> dict[str, Any]:
    """Milliseconds of a training step with the loader's batches, and with one batch again and again."""
    (profile, side), folder = next(iter(folders.items()))
    model = build(args.model, num_classes=400, num_frames=_NUM_FRAMES).to(args.device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def train(batch: Any) -> None:
        with torch.autocast(args.device, torch.bfloat16):
            scores = model(batch.video)
        loss = torch.nn.functional.cross_entropy(scores.float(), batch.label.clamp(0))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    found: dict[str, Any] = {"model": args.model, "profile": profile, "short_side": side, "batch": args.batch}
    names = ["pyav", "dali-gpu", "pyav+dali-gpu"] if args.device == "cuda" else ["pyav"]
    cached = next(iter(make_loader(folder, "pyav", side, args)))
    found["cached_ms"] = round(1e3 * timed(lambda: train(cached), args), 2)
    for name in names:
        try:
            loader = make_loader(folder, name, side, args)
            found[f"{name}_ms"] = round(1e3 * timed(_trainer(loader, train), args), 2)
            found[f"{name}_of_cached"] = round(found["cached_ms"] / found[f"{name}_ms"], 3)
            loader.close()
        except FastvidError as error:
            found[f"{name}_failed"] = error.message
    return found


def _trainer(loader: fastvid.ClipLoader, train: Callable[[Any], None]) -> Callable[[], None]:
    batches = iter(loader)

    def one() -> None:
        nonlocal batches
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            batch = next(batches)
        train(batch)

    return one


def timed(work: Callable[[], object], args: argparse.Namespace) -> float:
    """Seconds of one call: the mean over a while, after three calls."""
    for _ in range(3):
        work()
    synchronize(args.device)
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < args.seconds / 2:
        work()
        count += 1
        if not count % 8:
            synchronize(args.device)
    synchronize(args.device)
    return (time.perf_counter() - begun) / count


def synchronize(device: str) -> None:
    """Waits for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


class Busy:
    """How busy NVDEC and the GPU are while the block runs, by nvidia-smi five times a second."""

    def __init__(self) -> None:
        self._decoder: list[float] = []
        self._gpu: list[float] = []
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Busy:
        if torch.cuda.is_available():
            self._thread = threading.Thread(target=self._watch)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def summary(self) -> dict[str, float]:
        """Medians in percent, where they could be read."""
        columns = {"nvdec_percent": self._decoder, "gpu_percent": self._gpu}
        return {name: float(np.median(values)) for name, values in columns.items() if values}

    def _watch(self) -> None:
        query = ["nvidia-smi", "--query-gpu=utilization.decoder,utilization.gpu", "--format=csv,noheader,nounits"]
        while not self._end.wait(0.2):
            done = subprocess.run(query, capture_output=True, text=True, check=False)
            try:
                decoder, gpu = done.stdout.splitlines()[torch.cuda.current_device()].split(",")
                self._decoder.append(float(decoder))
                self._gpu.append(float(gpu))
            except (ValueError, IndexError):
                return


def make_footage(folder: Path, count: int, side: int) -> Path:
    """Videos of moving patterns with noise, so that they cost about as many bits as real ones."""
    from fastvid.media.ffmpeg import find_ffmpeg

    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        path = folder / f"made-{number:03d}.mp4"
        if path.exists():
            continue
        source = f"testsrc2=s={side * 4 // 3 // 16 * 16}x{side}:r=25:d=4"
        filters = f"hue=h={number * 37 % 360},rotate=a=t/{3 + number % 5}:fillcolor=gray,noise=alls=8:allf=t"
        command = [find_ffmpeg().path, "-v", "error", "-f", "lavfi", "-i", source, "-vf", filters]
        command += ["-c:v", "libx264", "-preset", "ultrafast", "-crf", "16", "-pix_fmt", "yuv420p", "-y", str(path)]
        subprocess.run(command, check=True)
    return folder


def _line(found: Any) -> str:
    if isinstance(found, dict):
        if "failed" in found:
            return f"FAILED {found['failed']}"
        if "parity" in found:
            return "\n" + doctor.text(found)
        return ", ".join(f"{key} {value}" for key, value in found.items())
    return "".join(f"\n  {_line(row)}" for row in found)
