"""Value objects reject invalid values; the registry lists back-ends and names what they lack."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from fastvid.decode.backends import Backend, backend
from fastvid.decode.pyav import PyAvDecoder
from fastvid.decode.request import Box, ClipRequest, DevicePlanes, Planes, Rgb
from fastvid.errors import MissingDependency, UsageError
from fastvid.format.schema import Codec

ABSENT = Backend("absent", "fastvid_absent.module:Decoder", "cpu", frozenset({Codec.H264}), "absent-package")


@pytest.mark.parametrize("box", [(1, 0, 2, 2), (0, 3, 2, 2), (0, 0, 5, 2), (0, 0, 2, 7), (-2, 0, 2, 2), (0, 0, 0, 2)])
def test_invalid_box_is_rejected(box):
    with pytest.raises(UsageError):
        Box(*box)


def test_invalid_request_is_rejected(videos):
    frames = np.array([1, 2])
    for wrong in (frames[:0], frames[None], frames.astype(np.int32), frames.astype(float)):
        with pytest.raises(UsageError, match="frames"):
            ClipRequest(0, wrong, Box(0, 0, 2, 2), (2, 2))
    with pytest.raises(UsageError, match="size"):
        ClipRequest(0, frames, Box(0, 0, 2, 2), (0, 2))
    clip = videos.painted("intra").clip(frames)
    with pytest.raises(UsageError, match="exceeds"):
        replace(clip, request=replace(clip.request, box=Box(0, 2, 96, 160)))
    with pytest.raises(UsageError, match="one entry"):
        replace(clip, shows=clip.shows[:1])


def test_packed_planes_are_views_of_one_buffer():
    box = Box(0, 0, 4, 6)
    buffer = np.zeros(Planes.nbytes(2, box), np.uint8)
    planes = Planes.packed(buffer, 2, box)
    planes.y[...], planes.u[...], planes.v[...] = 1, 2, 3
    assert buffer.tolist() == [1] * 48 + [2] * 12 + [3] * 12
    with pytest.raises(UsageError, match="chroma"):
        Planes(planes.y, planes.y, planes.v)
    with pytest.raises(UsageError, match="RGB"):
        Rgb(np.zeros((4, 2, 4, 6), np.uint8))


def test_built_in_backends_are_listed():
    assert backend("pyav").load() is PyAvDecoder
    assert backend("pyav").why_unavailable() is None
    decoder = backend("pyav").open(max_contexts=3)
    decoder.close()
    with pytest.raises(UsageError, match="use one of dali-cpu, dali-gpu, nvdec, pyav, or module:name"):
        backend("nvenc")


def test_missing_package_is_named_with_its_install_hint():
    why = ABSENT.why_unavailable()
    assert "is not available: No module named 'fastvid_absent'" in why
    assert "installed" not in why
    assert "pip install 'absent-package'" in why
    with pytest.raises(MissingDependency):
        ABSENT.open()


LOADS_WITH = """
def fails():
    {statement}
class Decoder:
    check = staticmethod(fails)
{call}
"""


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """Create back-ends whose module or check executes a statement."""

    def failing(statement, install, *, on_import):
        name = f"fastvid_failing_{len(list(tmp_path.iterdir()))}"
        text = LOADS_WITH.format(statement=statement, call="fails()" if on_import else "")
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        return Backend("failing", f"{name}:Decoder", "cpu", frozenset({Codec.H264}), install)

    return failing


@pytest.mark.parametrize(
    ("statement", "cause", "advised"),
    [
        ("raise OSError('libcuda.so.1: cannot open shared object file')", "OSError: libcuda.so.1: cannot open", False),
        ("raise RuntimeError('No FFmpeg\\nTried 4, 5, 6')", "RuntimeError: No FFmpeg", False),
        ("from os import what_old_versions_lack", "cannot import name 'what_old_versions_lack'", False),
        ("import fastvid_absent", "No module named 'fastvid_absent'", True),
    ],
)
def test_decoder_whose_import_fails_names_the_cause(failing, statement, cause, advised):
    why = failing(statement, "absent-package", on_import=True).why_unavailable()
    assert f"decoder 'failing' is not available: {cause}" in why
    assert ("pip install 'absent-package'" in why) is advised
    assert "\n" not in why


def test_backend_is_unavailable_when_its_check_raises_any_exception(failing):
    one = failing("raise RuntimeError('CUDA error: out of memory')", "absent-package", on_import=False)
    assert one.why_unavailable() == "check of decoder 'failing' failed: RuntimeError: CUDA error: out of memory"


class OnDevice:
    outputs = frozenset({DevicePlanes})
    seen: ClassVar[list] = []

    @staticmethod
    def check(device_id):
        OnDevice.seen.append(("check", device_id))

    @staticmethod
    def lanes(device_id):
        OnDevice.seen.append(("lanes", device_id))
        return 7


def test_backend_of_a_device_is_told_the_device_and_one_of_the_cpu_is_not(failing):
    one = Backend("on-device", f"{__name__}:OnDevice", "cuda", frozenset(Codec), "nothing")
    assert one.why_unavailable(3) is None
    assert one.lanes(16, 2) == 7
    assert one.lanes(16) == 7
    assert OnDevice.seen == [("check", 3), ("lanes", 2), ("lanes", None)]
    assert backend("pyav").why_unavailable(3) is None
    assert backend("pyav").lanes(16, 2) == 16


OWN = """
from fastvid.decode.backends import Backend
from fastvid.decode.pyav import PyAvDecoder
from fastvid.format.schema import Codec

class Decoder(PyAvDecoder):
    pass

BACKEND = Backend("own", "fastvid_own:Decoder", "cpu", frozenset(Codec), "fastvid-own")
"""


def test_a_decoder_of_ones_own_is_named_by_its_module(tmp_path, monkeypatch):
    (tmp_path / "fastvid_own.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    own = backend("fastvid_own:BACKEND")
    assert own.why_unavailable() is None
    assert issubclass(own.load(), PyAvDecoder)
    with pytest.raises(UsageError, match="a class, not a Backend"):
        backend("fastvid_own:Decoder")
    with pytest.raises(UsageError, match="no 'BACKEN'"):
        backend("fastvid_own:BACKEN")
