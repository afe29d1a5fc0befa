"""torchcodec with PyAV's FFmpeg: it decodes without another FFmpeg, or its error names the cause.

Modified copies of its package imitate other builds, so that the results do not depend on the machine's own FFmpeg.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import av
import pytest
import torch

# torchcodec's number for PyAV's version of FFmpeg: the one with libavutil 60 is version 8.
AVUTIL = av.library_versions["libavutil"][0]
FFMPEG = AVUTIL - 52

# Runs each case in a child forked from a process that has done the slow imports, and prints the results.
CODE = """
import json, os, re, sys, tempfile, threading
from pathlib import Path

import av, torch, torch._dynamo  # which torchcodec imports
from fastvid.decode import engines as libraries
from fastvid.decode.backends import backend
from fastvid.decode.request import Rgb
from fastvid.errors import MissingDependency
from tests.conformance.outputs import numbers
from tests.makers import Video

# A child cannot use the threads that torch had started before the fork.
torch.set_num_threads(1)
video, packages = sys.argv[1:]
clip = Video(Path(video)).clip([60, 7, 7, 33])

def decode():
    decoder = backend("torchcodec-cpu").open()
    return numbers(decoder, clip, Rgb)

def loaded():
    maps = Path("/proc/self/maps").read_text()
    return sorted(set(re.findall(r"/\\S*/lib(?:avcodec|avutil|swscale)[-.]\\S+", maps)))

def in_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(decode()))
    thread.start()
    thread.join()
    return found[0]

def in_a_child():
    decode()
    return forked(decode)

def over_pyav():
    use("fits")
    before = loaded()
    libraries.expose_ffmpeg()
    left = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("fastvid")]
    return {"frames": decode(), "loaded before": before, "loaded": loaded(), "left": left}

def imported_before():
    use("fits")
    try:
        import torchcodec
    except RuntimeError:
        pass
    return decode()

def by_itself():
    libraries.expose_ffmpeg()
    import torchcodec.decoders as before
    libraries.expose_ffmpeg = None
    decode()
    import torchcodec.decoders
    return torchcodec.decoders is before

def refused(package):
    if package is None:
        sys.modules["torchcodec"] = None
    else:
        use(package)
    return backend("torchcodec-cpu").why_unavailable()

def use(package):
    sys.path.insert(0, str(Path(packages, package)))

def forked(case, *arguments):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            result = case(*arguments)
        except BaseException as error:
            result = repr(error)
        os.write(write, json.dumps(result).encode())
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        return json.load(pipe)

print(json.dumps({
    "in a thread": forked(in_a_thread),
    "in a child": forked(in_a_child),
    "over PyAV": forked(over_pyav),
    "imported before": forked(imported_before),
    "by itself": forked(by_itself),
    "other FFmpeg": forked(refused, "other-ffmpeg"),
    "other torch": forked(refused, "other-torch"),
    "not installed": forked(refused, None),
}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory, videos):
    """The result of each case of `CODE`."""
    packages = tmp_path_factory.mktemp("packages")
    changed(packages / "fits")
    # Names of the same length that do not exist.
    changed(packages / "other-ffmpeg", b"libavutil.so.%d" % AVUTIL, b"libavutil.so.00")
    changed(packages / "other-torch", b"libc10.so", b"libc1x.so")
    temporary = tmp_path_factory.mktemp("temporary")
    run = subprocess.run(
        [sys.executable, "-c", CODE, str(videos.painted("compact").path), str(packages)],
        capture_output=True,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
        timeout=600,  # importing torch from a busy disk
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def changed(folder: Path, old: bytes = b"", new: bytes = b"") -> None:
    """Copy torchcodec's library for PyAV's version of FFmpeg only, with `old` replaced in it."""
    spec = find_spec("torchcodec")
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parent
    core = f"libtorchcodec_core{FFMPEG}.so"
    others = [f"libtorchcodec_*{number}.so" for number in range(4, 20) if number != FFMPEG]
    shutil.copytree(installed, folder / "torchcodec", copy_function=os.symlink, ignore=shutil.ignore_patterns(*others))
    # The image libraries that some versions contain.
    (folder / "torchcodec.libs").symlink_to(installed.with_name("torchcodec.libs"))
    if old:
        data = (installed / core).read_bytes()
        assert old in data
        (folder / "torchcodec" / core).unlink()
        (folder / "torchcodec" / core).write_bytes(data.replace(old, new))


@pytest.mark.parametrize("case", ["in a thread", "in a child", "imported before"])
def test_fresh_process_decodes(found, case):
    assert found[case] == [60, 7, 7, 33]


def test_torchcodec_uses_the_libraries_loaded_by_pyav(found):
    case = found["over PyAV"]
    assert case["frames"] == [60, 7, 7, 33]
    assert case["loaded"] == case["loaded before"]
    assert len(case["loaded"]) == 3
    assert case["left"] == []


def test_libraries_are_not_exposed_when_torchcodec_loads_by_itself(found):
    assert found["by itself"] is True


def test_build_for_another_ffmpeg_is_named(found):
    message = found["other FFmpeg"]
    assert f"not built for FFmpeg {av.ffmpeg_version_info}" in message
    assert f"install the shared libraries of one of these FFmpeg versions: {FFMPEG}" in message
    assert "pip install" not in message


def test_build_for_another_torch_is_named(found):
    message = found["other torch"]
    assert "libc1x.so: cannot open shared object file" in message
    assert f"install the one for torch {torch.__version__}" in message


def test_install_hint_appears_only_when_torchcodec_is_missing(found):
    message = found["not installed"]
    assert "torchcodec is not installed" in message
    assert "hint: pip install 'torchcodec'" in message
