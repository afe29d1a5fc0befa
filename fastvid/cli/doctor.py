"""What this machine can decode and encode with, and why not.

Prints versions, the ffmpeg that sharding uses, and for every decoder whether it loads. The exit code is 1 when
nothing can shard or nothing can decode.
"""

from __future__ import annotations

import argparse
import json
import platform
from importlib import metadata
from typing import Any, Final

from fastvid import __version__
from fastvid.decode.backends import backends
from fastvid.errors import MissingDependency
from fastvid.load.world import available_cores
from fastvid.shard.ffmpeg import find_ffmpeg

_PACKAGES: Final = ("torch", "av", "numpy", "pyarrow", "nvidia-dali-cuda120", "nvidia-dali-cuda130", "torchcodec")
_NEEDED_ENCODERS: Final = {"libx264": "compact, intra", "libvpx-vp9": "vp9"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid doctor``."""
    parser.add_argument("--json", action="store_true", help="print the findings as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints the findings; 0 when this machine can shard and decode."""
    found = examine()
    print(json.dumps(found, indent=1) if args.json else _text(found))
    usable = any(backend["missing"] is None for backend in found["decoders"].values())
    return 0 if usable and found["ffmpeg"]["missing"] is None else 1


def examine() -> dict[str, Any]:
    """The findings: versions, ffmpeg, decoders."""
    return {
        "fastvid": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {available_cores()} cores",
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "gpus": _gpus(),
        "ffmpeg": _ffmpeg(),
        "decoders": {
            name: {
                "device": backend.device,
                "codecs": sorted(codec.label for codec in backend.codecs),
                "missing": backend.why_unavailable(),
            }
            for name, backend in backends().items()
        },
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    try:
        import torch
    except ImportError:
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _ffmpeg() -> dict[str, Any]:
    try:
        build = find_ffmpeg()
    except MissingDependency as error:
        return {"missing": str(error)}
    return {"missing": None, "program": str(build), "encoders": list(build.encoders), "tone_mapping": build.zscale}


def _text(found: dict[str, Any]) -> str:
    lines = [f"fastvid {found['fastvid']}, Python {found['python']}, {found['machine']}"]
    lines.append("packages  " + ", ".join(f"{name} {version}" for name, version in found["packages"].items()))
    lines.append("GPUs      " + (", ".join(found["gpus"]) or "none"))
    ffmpeg = found["ffmpeg"]
    if ffmpeg["missing"]:
        lines.append(f"encode    NO   {ffmpeg['missing']}")
    else:
        lines.append(f"encode    yes  {ffmpeg['program']}")
        lines += [
            f"          {'yes' if encoder in ffmpeg['encoders'] else 'NO '}  {encoder} (profiles {profiles})"
            for encoder, profiles in _NEEDED_ENCODERS.items()
        ]
    for number, (name, backend) in enumerate(found["decoders"].items()):
        head = "decode" if not number else ""
        if backend["missing"]:
            lines.append(f"{head:9} NO   {name}: {backend['missing']}")
        else:
            lines.append(f"{head:9} yes  {name} ({', '.join(backend['codecs'])} on {backend['device']})")
    return "\n".join(lines)
