"""Wheel and sdist install and work in clean environments, without extras and with each extra.

Started by ``make release-check`` (and ``make soak``). Needs a package index, and torch for CPUs from a folder or index
named in PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL. Packages are installed at the versions of constraints.txt. Commands run
with only the environment's programs on PATH. The environments have the Python that FASTVID_PYTHON names, by default
this one, and the torch of FASTVID_TORCH, such as ``torch==2.13.0`` where only wheels for CUDA can be had (gigabytes).
"""

import csv
import functools
import http.server
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

from bench.common.harness import machine_facts, write_json
from fastvid.sharding.job.job import run_job
from fastvid.storage import LocalStorage
from tests.datasets import make_clip
from tests.storage.faulty import FaultyServer

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"].keys()
PYTHON = os.environ.get("FASTVID_PYTHON", sys.executable)
CONSTRAINTS = (ROOT / "constraints.txt").read_text().splitlines()
# With the local version, so that pip fails instead of downloading gigabytes if it finds only wheels for CUDA.
TORCH = os.environ.get("FASTVID_TORCH") or next(line for line in CONSTRAINTS if line.startswith("torch==")) + "+cpu"
RECIPE = """
from fastvid.train import CenterCrop, Config, DataConfig, ModelConfig, OptimConfig, RandomCrop, RunConfig, Segments


def recipe():
    return Config(
        data=DataConfig(
            path="shards", split=None, eval_split=None, frames=Segments(2), eval_frames=Segments(2, jitter=False),
            spatial=(RandomCrop(32),), eval_spatial=(CenterCrop(32),), global_batch_size=2, num_threads=1,
        ),
        model=ModelConfig(name="tsm-r18", options={"width": 8}),
        optim=OptimConfig(base_lr=0.02, base_batch_size=2),
        run=RunConfig(out="run", epochs=1),
    )
"""

IMPORT_TIME = "import time; began = time.perf_counter(); import fastvid; print(time.perf_counter() - began)"
# Run in a clean environment: the bytes of each package.
SIZES = """
import importlib.metadata as metadata, json
print(json.dumps({
    one.name: sum(file.locate().stat().st_size for file in one.files or () if file.locate().is_file())
    for one in metadata.distributions() if one.name not in ("pip", "setuptools")  # which every environment has
}))
"""


def licence(about):
    """Return the licence that a package states."""
    named = [line.rpartition(" :: ")[2] for line in about.get_all("Classifier") or () if line.startswith("License ::")]
    named = [one for one in named if one != "OSI Approved"]
    return about.get("License-Expression") or "; ".join(named) or (about.get("License") or "").partition("\n")[0]


# Run in a clean environment with the extra prepare, after `licence`: what `import fastvid` loads, and licences.
FACTS = """
import fastvid, importlib.metadata as metadata, json, subprocess, sys
modules = sorted(sys.modules)
packages = [one for one in metadata.distributions() if one.name != "pip"]
import imageio_ffmpeg
from av import _core
ffmpeg = imageio_ffmpeg.get_ffmpeg_exe()
said = subprocess.run([ffmpeg, "-L"], capture_output=True, text=True, check=True).stdout
said = " ".join(said.split())
print(json.dumps({
    "modules": modules,
    "licences": {one.name: licence(one.metadata) for one in packages},
    "ffmpeg_licence": said.partition("terms of the ")[2].partition(". ")[0],
    "av_ffmpeg_licence": _core.library_meta["libavcodec"]["license"],
}))
"""


def environment(folder: Path) -> Path:
    """Make an environment in a folder, and return the folder of its programs."""
    subprocess.run([PYTHON, "-m", "venv", str(folder / "venv")], check=True)
    return folder / "venv" / "bin"


def pip_install(programs: Path, *words: str) -> None:
    command = [str(programs / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, "-c", str(ROOT / "constraints.txt"), *words], check=True)


def licences_here(extras: set[str]) -> dict[str, str]:
    """The licences of what extras install, as the packages of this environment state them, which has all of them."""
    # What is for another CUDA has the same licence.
    wanted = [line.replace("cuda120", "cuda130") for one in extras for line in PROJECT["optional-dependencies"][one]]
    found: dict[str, str] = {}
    while wanted:
        name = re.match(r"[\w.-]+", wanted.pop())[0]
        try:
            about = metadata.metadata(name)
        except metadata.PackageNotFoundError:  # for another system
            continue
        if about["Name"] not in found:
            found[about["Name"]] = licence(about)
            wanted += [line for line in about.get_all("Requires-Dist") or () if "extra ==" not in line]
    return dict(sorted(found.items()))


class Installed:
    """A clean environment, and a folder in which its commands run.

    Args:
        folder: Parent folder of both.
        videos: Videos for the checks.
    """

    def __init__(self, folder: Path, videos: Path) -> None:
        self.bin, self.work = environment(folder), folder / "work"
        self.work.mkdir()
        shutil.copytree(videos, self.work / "videos")

    def pip(self, *words: str) -> None:
        pip_install(self.bin, *words)

    def run(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment and return its output; it must exit with `code`."""
        environment = {
            "PATH": str(self.bin), "HOME": str(self.work), "OMP_NUM_THREADS": "1", "FASTVID_LOG": "WARNING",
            "NO_PROXY": "127.0.0.1", "NO_MKDOCS_2_WARNING": "1",
        }  # fmt: skip
        done = subprocess.run(
            [str(self.bin / words[0]), *words[1:]], cwd=self.work, env=environment, capture_output=True, text=True,
            check=False, timeout=900,
        )  # fmt: skip
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done

    def python(self, code: str) -> str:
        return self.run("python", "-c", code).stdout.strip()

    def shard(self) -> None:
        self.run("fastvid", "shard", "videos/", "--out", "shards")


@pytest.fixture(scope="module")
def released(tmp_path_factory) -> dict[str, Path]:
    """The sdist, and the wheel built from it in a separate environment."""
    folder = tmp_path_factory.mktemp("released")
    programs = environment(folder)
    pip_install(programs, "build", "hatchling")
    command = [str(programs / "python"), "-m", "build", "--no-isolation"]
    subprocess.run([*command, "--outdir", str(folder / "dist"), str(ROOT)], check=True)
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (wheel,) = (folder / "dist").glob("*.whl")
    return {"sdist": sdist, "wheel": wheel}


@pytest.fixture
def index(released, tmp_path) -> Iterator[str]:
    """The address of a package index that has only the release."""
    shutil.copytree(released["wheel"].parent, tmp_path / "index" / "simple" / "fastvid-toolkit")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "index"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    for name in ("juggling", "walking"):
        (folder / name).mkdir()
        for number in range(2):
            make_clip(folder / name / f"{name}{number}.mp4", frames=8 + number, size="80x80")
    return folder


@pytest.fixture
def installed(tmp_path, videos) -> Iterator[Installed]:
    """A function that creates environments; they are removed after each test, because torch takes a gigabyte."""
    yield Installed(tmp_path, videos)
    shutil.rmtree(tmp_path / "venv")


def test_version_changelog_and_contents_match_the_release(released):
    version = PROJECT["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", headings[1])
    assert released["wheel"].name == f"fastvid_toolkit-{version}-py3-none-any.whl"
    with zipfile.ZipFile(released["wheel"]) as wheel:
        inside = set(wheel.namelist())
    pipelines = {path.name for path in (ROOT / "pipelines").glob("*.py")}
    assert {f"fastvid/pipelines/{name}" for name in pipelines} <= inside
    benches = {path.relative_to(ROOT / "bench").as_posix() for path in (ROOT / "bench").rglob("*.py")}
    assert {f"fastvid/bundled/bench/{name}" for name in benches} <= inside
    assert {"fastvid/py.typed", "fastvid/report/assets/page.css", "fastvid/sharding/page/assets/inspect.js"} <= inside
    assert not [name for name in inside if name.endswith(".pyc") or name.startswith("tests/")]
    with tarfile.open(released["sdist"]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"docs/index.md", "docker/Dockerfile.cpu", "tests/test_release.py", "constraints.txt", "Makefile"} <= names


@pytest.mark.parametrize("form", ["wheel", "sdist", "index"])
def test_the_bare_install_works_and_names_the_extras_of_other_commands(form, released, index, installed, capfd):
    # The usual index, which has the other packages, has no fastvid-toolkit.
    words = ["--extra-index-url", index, "fastvid-toolkit"] if form == "index" else [str(released[form])]
    installed.pip(*words)
    assert (form == "index") == (f'{released["wheel"].name} HTTP/1.1" 200' in capfd.readouterr().err)
    assert installed.run("fastvid", "--version").stdout.strip() == PROJECT["version"]
    names = installed.python(
        "import fastvid, importlib.metadata as m, json; print(json.dumps([d.name for d in m.distributions()]))"
    )
    assert not {"torch", "nvidia-dali-cuda130", "obstore", "ray", "duckdb", "imageio-ffmpeg"} & set(json.loads(names))
    run_job(str(installed.work / "videos"), str(installed.work / "shards"), workers=1)
    assert "juggling" in installed.run("fastvid", "inspect", "shards", "--html", "shards.html").stdout
    assert (installed.work / "shards.html").stat().st_size > 10_000
    installed.run("fastvid", "verify", "shards")
    (installed.work / "tars").mkdir()
    shutil.copy(installed.work / "shards" / "data-000000.tar", installed.work / "tars" / "00000.tar")
    installed.run("fastvid", "index", "tars", "--out", "indexed")
    frames = "import fastvid; d = fastvid.open({!r}); print(d[d.key(0)].frames([0, 7]).data.shape[0], len(d))"
    assert installed.python(frames.format("shards")) == installed.python(frames.format("indexed")) == "2 4"
    with (installed.work / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["key", "split"], ["walking/walking0", "val"]])
    installed.run("fastvid", "relabel", "shards", "--from", "labels.csv")
    installed.run("fastvid", "remove", "shards", "--keys", "walking/walking1")
    listing = installed.run("fastvid", "bench", code=2)
    assert "decode" in listing.stderr
    model = next(installed.bin.parent.rglob("bundled/bench/scaling/models/template.toml"))
    predicted = installed.run("fastvid", "bench", "scale", "--model", str(model), "--json", "scale.json")
    assert "PREDICTED" in predicted.stdout
    installed.run("fastvid", "bench", "report", "scale.json", "--html", "scale.html")
    assert "<svg" in (installed.work / "scale.html").read_text()
    # Commands that need an extra name it.
    for words, extra in {
        ("train", "motion_tsm"): "torch",
        ("demo",): "torch",
        ("inspect", "http://127.0.0.1:9/x"): "object-stores",
        ("shard", "videos/", "--out", "a"): "prepare",
        ("subset", "shards", "--out", "b", "--where", "label = 1"): "prepare",
    }.items():
        said = installed.run("fastvid", *words, code=1).stderr
        assert f"[{extra}]" in said, (words, said)
        assert "Traceback" not in said, (words, said)
    loader = "import fastvid\ntry: fastvid.ClipLoader\nexcept fastvid.FastvidError as error: print(error.hint)"
    assert "[torch]" in installed.python(loader)


def test_size_import_time_and_licences_are_recorded(released, installed):
    """`bench/results/release.json`; importing fastvid loads neither torch nor a video library."""
    installed.pip(str(released["wheel"]))
    bare = json.loads(installed.python(SIZES))
    installed.pip(f"{released['wheel']}[prepare]")
    found = {"bytes_bare": bare, "bytes_installed": json.loads(installed.python(SIZES))}
    found |= json.loads(installed.python(inspect.getsource(licence) + FACTS))
    assert not {"torch", "av", "duckdb"} & set(found.pop("modules"))
    seconds = sorted(float(installed.python(IMPORT_TIME)) for _ in range(9))
    assert {"fastvid-toolkit", "av", "imageio-ffmpeg"} <= found["licences"].keys()
    assert all(found["licences"].values()), found["licences"]
    record = {
        "schema": "fastvid-release/1",
        "version": PROJECT["version"],
        "wheel_bytes": released["wheel"].stat().st_size,
        "sdist_bytes": released["sdist"].stat().st_size,
        **found,
        "licences_of_extras": licences_here(EXTRAS - {"dev", "docs", "prepare"}),
        "import_s": {"median": seconds[4], "min": seconds[0], "max": seconds[-1]},
        "machine": machine_facts(),
    }
    if sys.executable == PYTHON:  # which the facts about the machine name
        write_json(ROOT / "bench" / "results" / "release.json", record)


def check_hub(one: Installed) -> None:
    # Nothing is reached from here: the error is that of the client which the extra brings.
    said = one.run("fastvid", "inspect", "hf://datasets/nobody/nothing", code=1).stderr
    assert "[hub]" not in said
    assert "Traceback" not in said


def check_torch(one: Installed) -> None:
    (one.work / "mine.py").write_text(RECIPE)
    one.run("fastvid", "train", "mine.py")
    predicted = one.run("fastvid", "predict", "mine.py", "videos/walking/walking0.mp4", "--json")
    assert json.loads(predicted.stdout)["top"][0]["class"] in ("juggling", "walking")
    # Results of decoding are drawn by the module that measures it, which needs torch.
    shutil.copytree(ROOT / "bench" / "results", one.work / "results")
    files = [str(path) for path in sorted((one.work / "results").glob("*.json"))]
    one.run("fastvid", "bench", "report", *files, "--html", "report.html")
    assert (one.work / "report.html").read_text().count('class="bars"') > 5


def check_dali(one: Installed) -> None:
    one.run("fastvid", "shard", "videos/", "--out", "vp9", "--profile", "vp9")
    found = json.loads(one.run("fastvid", "doctor", "--json").stdout)
    assert found["decoders"]["dali-cpu"]["missing"] is None
    assert any("dali-cpu" in str(row) for row in found["parity"])


def check_object_stores(one: Installed) -> None:
    local = LocalStorage(one.work / "shards")
    with FaultyServer() as server:
        server.files.update({name: local.read(name) for name in local.list()})
        same = f"""
import fastvid
here, there = fastvid.open("shards"), fastvid.open({server.url!r})
key = here.key(0)
print((here[key].frames([0, 5]).data == there[key].frames([0, 5]).data).all())
"""
        assert one.python(same) == "True"


def check_nvdec(one: Installed) -> None:
    why = one.python("from fastvid.decode.backends import backend; print(backend('nvdec').why_unavailable())")
    assert "pip install" not in why  # the package is there; a machine without a GPU lacks the driver


def check_prepare(one: Installed) -> None:
    one.run("fastvid", "doctor", "--no-parity")
    one.run("fastvid", "subset", "shards", "--out", "one", "--where", "class = 'juggling'")
    assert one.python("import fastvid; print(len(fastvid.open('one')))") == "2"
    one.run("fastvid", "shard", "videos/", "--out", "tiles", "--profile", "tiles")
    one.run("fastvid", "verify", "tiles")


def check_flow(one: Installed) -> None:
    one.run("fastvid", "shard", "videos/", "--out", "flow", "--streams", "rgb,flow")
    names = one.python("import tarfile; print(tarfile.open('flow/data-000000.tar').getnames())")
    assert ".flow.mp4" in names


def check_ray(one: Installed) -> None:
    one.run("fastvid", "shard", "videos/", "--out", "by-ray", "--engine", "ray")
    tars = [(one.work / folder / "data-000000.tar").read_bytes() for folder in ("shards", "by-ray")]
    assert tars[0] == tars[1]


def check_tensorboard(one: Installed) -> None:
    (one.work / "mine.py").write_text(RECIPE)
    one.run("fastvid", "train", "mine.py", "run.loggers=tensorboard")
    assert list((one.work / "run" / "tensorboard").glob("events.*"))


def check_wandb(one: Installed) -> None:
    (one.work / "mine.py").write_text(RECIPE)
    words = ["train", "mine.py", "run.loggers=wandb", "run.out=logged"]
    one.python(
        f"import os, fastvid.cli.main as cli; os.environ['WANDB_MODE'] = 'offline'; assert not cli.main({words})"
    )
    assert list((one.work / "logged" / "wandb").glob("offline-run-*/*.wandb"))


def check_bench(one: Installed) -> None:
    words = ["--data", "shards", "--sampling", "tsn8", "--workers", "1", "--rounds", "1", "--sweep-rounds", "1"]
    one.run("fastvid", "bench", "decode", *words, "--repeats", "1", "--json", "decode.json")
    record = json.loads((one.work / "decode.json").read_text())
    for row in record["rows"]:
        assert {"fastvid", "torchcodec", "decord"} <= {entry["name"] for entry in row["contenders"]}, row["refused"]


def check_docs(one: Installed) -> None:
    (source,) = [path for path in one.work.glob("fastvid_toolkit-*") if path.is_dir()]
    words = ["-m", "mkdocs", "build", "--strict", "-f", str(source / "mkdocs.yml"), "-d", str(one.work / "site")]
    one.run("python", *words)
    assert (one.work / "site" / "index.html").is_file()


def check_dev(one: Installed) -> None:
    (source,) = [path for path in one.work.glob("fastvid_toolkit-*") if path.is_dir()]
    one.run(
        "python", "-m", "pytest", "-q", "--rootdir", str(source), str(source / "tests" / "format" / "test_packets.py")
    )


# For each extra: the other extras that its check needs, and the check.
CHECKS: dict[str, tuple[str, Callable[[Installed], None]]] = {
    "bench": ("torch", check_bench),
    "dali-cuda12": ("torch", check_dali),
    "dali-cuda13": ("torch", check_dali),
    "dev": ("torch", check_dev),
    "docs": ("", check_docs),
    "flow": ("", check_flow),
    "hub": ("", check_hub),
    "nvdec": ("torch", check_nvdec),
    "object-stores": ("", check_object_stores),
    "prepare": ("", check_prepare),
    "ray": ("", check_ray),
    "tensorboard": ("torch", check_tensorboard),
    "torch": ("", check_torch),
    "wandb": ("torch", check_wandb),
}


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_each_extra_enables_its_features(extra, released, installed):
    beside, check = CHECKS[extra]
    if "torch" in (extra, beside):
        installed.pip(TORCH)
    installed.pip(f"{released['wheel']}[{','.join(filter(None, [extra, beside, 'prepare']))}]")
    with tarfile.open(released["sdist"]) as sdist:
        sdist.extractall(installed.work, filter="data")
    installed.shard()
    check(installed)
