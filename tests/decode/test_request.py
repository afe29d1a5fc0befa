"""Value objects refuse what cannot be; the registry finds back-ends and says what is missing."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata

import numpy as np
import pytest

from fastvid.decode import backends
from fastvid.decode.backends import ENTRY_POINTS, Backend, backend
from fastvid.decode.pyav import PyAvDecoder
from fastvid.decode.request import Box, ClipRequest, Planes, Rgb
from fastvid.errors import MissingDependency, UsageError
from fastvid.format.schema import Codec

ABSENT = Backend("absent", "fastvid_absent.module:Decoder", "cpu", frozenset({Codec.H264}), "absent-package")


@pytest.mark.parametrize("box", [(1, 0, 2, 2), (0, 3, 2, 2), (0, 0, 5, 2), (0, 0, 2, 7), (-2, 0, 2, 2), (0, 0, 0, 2)])
def test_boxes(box):
    with pytest.raises(UsageError):
        Box(*box)


def test_requests(videos):
    frames = np.array([1, 2])
    for wrong in (frames[:0], frames[None], frames.astype(np.int32), frames.astype(float)):
        with pytest.raises(UsageError, match="frames"):
            ClipRequest(0, wrong, Box(0, 0, 2, 2), (2, 2))
    with pytest.raises(UsageError, match="size"):
        ClipRequest(0, frames, Box(0, 0, 2, 2), (0, 2))
    clip = videos.painted("intra").clip(frames)
    with pytest.raises(UsageError, match="leaves"):
        replace(clip, request=replace(clip.request, box=Box(0, 2, 96, 160)))
    with pytest.raises(UsageError, match="one entry"):
        replace(clip, shows=clip.shows[:1])


def test_planes_are_views_of_one_buffer():
    box = Box(0, 0, 4, 6)
    buffer = np.zeros(Planes.nbytes(2, box), np.uint8)
    planes = Planes.packed(buffer, 2, box)
    planes.y[...], planes.u[...], planes.v[...] = 1, 2, 3
    assert buffer.tolist() == [1] * 48 + [2] * 12 + [3] * 12
    with pytest.raises(UsageError, match="chroma"):
        Planes(planes.y, planes.y, planes.v)
    with pytest.raises(UsageError, match="RGB"):
        Rgb(np.zeros((4, 2, 4, 6), np.uint8))


def test_known_backends():
    assert list(backends.backends()) == sorted(backends.backends())
    assert backend("pyav").load() is PyAvDecoder
    assert backend("pyav").why_unavailable() is None
    decoder = backend("pyav").open(max_contexts=3)
    decoder.close()
    with pytest.raises(UsageError, match="known are dali-cpu, dali-gpu, pyav, torchcodec-cpu, torchcodec-cuda"):
        backend("nvdec")


def test_a_missing_package_is_named_with_its_remedy():
    why = ABSENT.why_unavailable()
    assert "does not load: No module named 'fastvid_absent'" in why
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
    """A back-end whose module, or whose check, executes a statement."""

    def failing(statement, install, *, on_import):
        name = f"fastvid_failing_{len(list(tmp_path.iterdir()))}"
        text = LOADS_WITH.format(statement=statement, call="fails()" if on_import else "")
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        return Backend("failing", f"{name}:Decoder", "cpu", frozenset({Codec.H264}), install)

    return failing


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("raise OSError('libcuda.so.1: cannot open shared object file')", "OSError: libcuda.so.1: cannot open"),
        ("raise RuntimeError('No FFmpeg\\nTried 4, 5, 6')", "RuntimeError: No FFmpeg"),
        ("from os import what_old_versions_lack", "cannot import name 'what_old_versions_lack'"),
    ],
)
def test_what_is_installed_and_does_not_load_says_why(failing, statement, said):
    why = failing(statement, "absent-package", on_import=True).why_unavailable()
    assert f"decoder 'failing' is installed but does not load: {said}" in why
    assert "pip install" not in why
    assert "\n" not in why


@pytest.mark.parametrize(("install", "advised"), [("numpy>=1", False), ("absent-package", True), ("absent[x]", True)])
def test_nobody_is_told_to_install_what_is_installed(failing, install, advised):
    why = failing("import fastvid_absent", install, on_import=True).why_unavailable()
    assert "fastvid_absent" in why
    assert ("pip install" in why) is advised
    assert ("installed but does not load" in why) is not advised


def test_an_extra_is_installed_when_one_of_its_distributions_is(failing, monkeypatch):
    monkeypatch.setattr(metadata, "requires", lambda name: ["numpy>=1.26", "absent>=2; extra == 'all'"])
    assert "pip install" in failing("import fastvid_absent", "fastvid-toolkit[all]", on_import=True).why_unavailable()
    monkeypatch.setattr(metadata, "requires", lambda name: ["absent>=2; extra == 'all'", "numpy; extra == 'all'"])
    why = failing("import fastvid_absent", "fastvid-toolkit[all]", on_import=True).why_unavailable()
    assert "is installed but does not load: No module named 'fastvid_absent'" in why


def test_a_check_may_raise_anything(failing):
    one = failing("raise RuntimeError('CUDA error: out of memory')", "absent-package", on_import=False)
    assert one.why_unavailable() == "decoder 'failing' cannot be checked: RuntimeError: CUDA error: out of memory"


class Point:
    """An entry point of a third party's package."""

    value = "package:thing"

    def __init__(self, thing):
        self.thing = thing

    def load(self):
        return self.thing


@pytest.fixture
def registered(monkeypatch):
    def register(*things):
        monkeypatch.setattr(metadata, "entry_points", lambda group: [Point(thing) for thing in things])
        backends.backends.cache_clear()

    yield register
    backends.backends.cache_clear()


def test_third_parties_register_by_entry_point(registered):
    registered(ABSENT)
    assert backend("absent") is ABSENT
    assert backend("pyav").load() is PyAvDecoder


@pytest.mark.parametrize(
    ("thing", "why"),
    [(PyAvDecoder, "it is a type, no Backend"), (replace(ABSENT, name="pyav"), "decoder 'pyav' is registered twice")],
)
def test_wrong_registrations_are_refused_and_take_nothing_along(registered, thing, why):
    registered(thing)
    assert backend("pyav").load() is PyAvDecoder
    assert why in backend("package:thing").why_unavailable()
    with pytest.raises(MissingDependency, match=ENTRY_POINTS):
        backend("package:thing").open()
