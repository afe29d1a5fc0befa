"""``fastvid doctor``: which decoders and encoders work on this machine, and why others do not."""

from __future__ import annotations

import ctypes
import platform
import tempfile
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from fastvid import __version__
from fastvid.decode.backends import BACKENDS, Backend
from fastvid.decode.parity import REFERENCE, SampleClip, compare
from fastvid.errors import FastvidError, MissingDependency, WorkerError
from fastvid.media.ffmpeg import find_ffmpeg
from fastvid.runtime.processes import available_cores
from fastvid.runtime.values import json_text

_PACKAGES: Final = (
    *("torch", "triton", "av", "numpy", "pyarrow", "nvidia-dali-cuda120", "nvidia-dali-cuda130"),
    *("pynvvideocodec", "opencv-contrib-python-headless", "pillow"),
)
_DECODED: Final = f"decode {REFERENCE}"
_NEEDED_ENCODERS: Final = {"libx264": "compact, intra", "libvpx-vp9": "vp9"}
# Libraries of the NVIDIA driver, and the entry of NVIDIA_DRIVER_CAPABILITIES that adds each to a container.
_DRIVER: Final = {
    "libcuda.so.1": "compute",
    "libnvcuvid.so.1": "video",
    "libnvidia-encode.so.1": "video",
    "libnvidia-ml.so.1": "utility",
}
_DRIVER_VERSION: Final = Path("/proc/driver/nvidia/version")


def doctor(*, json: bool = False, no_parity: bool = False) -> int:
    """Check which decoders and encoders work here, why others do not, and whether decoders agree.

    Prints versions, the ffmpeg that sharding uses, GPUs with their video engines and driver libraries, whether the
    kernel that converts planes compiles on them, and for every decoder whether it can be loaded. Then it tests the
    default pipeline: a tiny video is sharded, planned and decoded by every decoder that works. Finally all of these
    decode the same clips, to compare frames, colours and the speed of one decoder. The exit code is 1 if a step of the
    test fails or decoders disagree.

    Args:
        json: Print the findings as one JSON object.
        no_parity: Do not compare decoders on test clips.
    """
    found = examine(parity=not no_parity)
    print(json_text(found, indent=1) if json else text(found))
    return 1 if found["problems"] else 0


def examine(*, parity: bool = True) -> dict[str, Any]:
    """Return the findings: versions, ffmpeg, GPUs, decoders, a test that they work, and their comparison."""
    found: dict[str, Any] = {
        "fastvid": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {available_cores()} cores",
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "gpus": _gpus(),
        "driver": _driver(),
        "ffmpeg": _ffmpeg(),
        "decoders": {
            name: {
                "device": backend.device,
                "codecs": sorted(codec.label for codec in backend.codecs),
                "missing": backend.why_unavailable(),
            }
            for name, backend in BACKENDS.items()
        },
    }
    runs = [one for name, one in BACKENDS.items() if found["decoders"][name]["missing"] is None]
    proof = _proof(runs)
    found |= {"proof": proof, "parity": [], "problems": [_line(step) for step in proof if step["problem"]]}
    if parity and any(step["name"] == _DECODED and not step["problem"] for step in proof):
        try:
            found["parity"] = _parity(runs)
        except FastvidError as error:
            found["problems"].append(f"test clips: {error.message}")
    for row in found["parity"]:
        if not row["frames"]:
            found["problems"].append(f"clip {row['clip']!r} by {row['backend']}: {row['problem']}")
    return found


def _proof(runs: list[Backend]) -> list[dict[str, Any]]:
    """Run users' first steps on a tiny video; test the default decoder even if it cannot be loaded."""
    try:
        from fastvid.sharding.verify.self_test import self_test
    except ImportError as error:  # importing PyAV may fail
        return [{"name": "shard", "seconds": 0.0, "found": "", "problem": f"import failed: {error}", "hint": None}]
    rest = [one for one in runs if one.name != REFERENCE]
    return [asdict(step) for step in self_test([BACKENDS[REFERENCE], *rest])]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> list[dict[str, Any]]:
    try:
        import torch
    except (ImportError, OSError):  # an installed torch may lack a library
        return []
    return [_gpu(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]


def _gpu(device: Any) -> dict[str, Any]:
    import torch

    from fastvid.decode.engines import capabilities
    from fastvid.decode.pixels import kernel_problem

    found: dict[str, Any] = {"name": str(device), "nvdec": {}, "problem": None}
    try:
        found["name"] = torch.cuda.get_device_name(device)
        found["nvdec"] = {codec.label: count for codec, count in capabilities(device.index).items()}
    except Exception as error:  # noqa: BLE001 - a GPU may be full, in use or broken
        found["problem"] = str(error).strip().replace("\n", ";")
    else:
        found["problem"] = None if found["nvdec"] else "it has no NVDEC engine"
    return found | {"kernel": kernel_problem(device)}


def _driver() -> dict[str, Any]:
    """Return the version of the NVIDIA driver and which of its libraries this process can load."""
    version = _DRIVER_VERSION.read_text().splitlines()[0] if _DRIVER_VERSION.exists() else None
    libraries = {name: _loads(name) for name in _DRIVER}
    problem = None
    missing = sorted({capability for name, capability in _DRIVER.items() if not libraries[name]})
    if any(libraries.values()) and missing:
        problem = (
            f"driver libraries of the capabilities {', '.join(missing)} are missing: start the container with"
            " NVIDIA_DRIVER_CAPABILITIES=compute,utility,video"
        )
    return {"version": version, "libraries": libraries, "problem": problem}


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _ffmpeg() -> dict[str, Any]:
    try:
        build = find_ffmpeg()
    except (MissingDependency, WorkerError) as error:
        return {"missing": str(error)}
    return {"missing": None, "program": str(build), "encoders": list(build.encoders), "tone_mapping": build.zscale}


def _parity(runs: list[Backend]) -> list[dict[str, Any]]:
    """Decode test clips with every decoder that works here."""
    from fastvid.media.ffmpeg import make_sample_clips

    with tempfile.TemporaryDirectory(prefix="fastvid-doctor-") as folder:
        clips = []
        for name, data in make_sample_clips(Path(folder)).items():
            try:
                clips.append(SampleClip(name, data))
            except FastvidError as error:
                raise error.at(clip=name) from error
    return [asdict(row) for row in compare(clips, runs)]


def text(found: dict[str, Any]) -> str:
    """Render the findings as text."""
    ffmpeg, encode = found["ffmpeg"], [f"NO   {found['ffmpeg']['missing']}"]
    if not ffmpeg["missing"]:
        encode = [f"yes  {ffmpeg['program']}"]
        for encoder, profiles in _NEEDED_ENCODERS.items():
            encode.append(f"{'yes' if encoder in ffmpeg['encoders'] else 'NO '}  {encoder} (profiles {profiles})")
    decode = [
        f"NO   {name}: {one['missing']}"
        if one["missing"]
        else f"yes  {name} ({', '.join(one['codecs'])} on {one['device']})"
        for name, one in found["decoders"].items()
    ]
    proof = []
    for step in found["proof"]:
        proof.append(f"{'NO ' if step['problem'] else 'yes'}  {_line(step)} ({step['seconds']:.1f} s)")
        proof += [f"     hint: {step['hint']}"] if step["hint"] else []
    packages = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    lines = [f"fastvid {found['fastvid']}, Python {found['python']}, {found['machine']}"]
    lines += _named("packages", [packages]) + _named("GPUs", _gpu_rows(found["gpus"]) or ["none"])
    lines += _named("driver", _driver_rows(**found["driver"])) + _named("encode", encode) + _named("decode", decode)
    lines += _named("proof", proof) + _parity_lines(found["parity"]) + _named("FAILED", found["problems"])
    return "\n".join(lines)


def _named(name: str, rows: list[str]) -> list[str]:
    """Return the rows of a section, indented, with the section's name before the first row."""
    return [f"{'' if number else name:9} {row}" for number, row in enumerate(rows)]


def _line(step: dict[str, Any]) -> str:
    return f"{step['name']}: {step['problem'] or step['found']}"


def _gpu_rows(gpus: list[dict[str, Any]]) -> list[str]:
    rows = []
    for gpu in gpus:
        engines = ", ".join(f"{count} for {codec}" for codec, count in gpu["nvdec"].items())
        rows.append(f"{gpu['name']}: NVDEC {gpu['problem'] or engines}")
        rows.append(gpu["kernel"] or "the fused kernel that converts planes compiles and is right")
    return rows


def _driver_rows(version: str | None, libraries: dict[str, bool], problem: str | None) -> list[str]:
    loaded = ", ".join(f"{name} {'yes' if found else 'NO'}" for name, found in libraries.items())
    rows = [f"{version or 'version unknown'}; {loaded}"] if version or any(libraries.values()) else []
    return [*rows, *([problem] if problem else [])]


def _parity_lines(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["agreement with pyav, in levels of 255; speed of one decoder on clips of 8 frames"]
    lines.append(f"{'':10}{'clip':16} {'range':8} {'decoder':16} {'frames':7} {'mean':>5} {'max':>4} {'clips/s':>8}")
    for row in rows:
        head, frames = f"{'':10}{row['clip']:16} {row['range']:8} {row['backend']:16}", row["frames"]
        scores = f"{'agree' if frames else 'DIFFER':7} {row['mean']:5.2f} {row['most']:4d} {row['rate']:8.0f}"
        lines.append(f"{head} FAILED  {row['problem']}" if frames is None else f"{head} {scores}")
    return lines if rows else []
