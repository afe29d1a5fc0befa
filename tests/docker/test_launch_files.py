"""Images and launch files: pinned and unprivileged, valid commands, clean linters."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastvid.decode.backends import BACKENDS

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
IMAGES = ["Dockerfile.cpu", "Dockerfile.cuda"]
MANIFESTS = sorted(path.name for path in (DOCKER / "kubernetes").glob("*.yaml"))
SCRIPTS = sorted(path.name for path in (DOCKER / "slurm").glob("*.sbatch"))
UNSHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"

sys.path.insert(0, str(DOCKER))
try:
    import requirements
    import run_steps
finally:
    sys.path.remove(str(DOCKER))


def steps(name: str) -> list[run_steps.Instruction]:
    return run_steps.instructions((DOCKER / name).read_text())


def argument(image: str, name: str) -> str:
    """Return the default of an image's build argument."""
    return next(step.text for step in steps(image) if step.text.startswith(f"{name}=")).partition("=")[2]


def documents(name: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all((DOCKER / "kubernetes" / name).read_text()) if document]


def containers(node: object) -> Iterator[dict[str, Any]]:
    """Yield every container below `node`, including a TrainJob's trainer."""
    if isinstance(node, dict):
        if "image" in node:
            yield node
        for value in node.values():
            yield from containers(value)
    elif isinstance(node, list):
        for value in node:
            yield from containers(value)


def programs(folder: Path, **scripts: str) -> str:
    """Return a PATH in which these shell scripts replace the named programs."""
    for name, script in scripts.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return f"{folder}:{os.environ['PATH']}"


def torchrun_options(words: list[str]) -> Any:
    """Parse a command line as torchrun does; raises SystemExit for an unknown option."""
    run = pytest.importorskip("torch.distributed.run")
    return run.get_args_parser().parse_args(words)


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_is_pinned_unprivileged_and_has_a_health_check(name):
    found = steps(name)
    words = [step.word for step in found]
    base = argument(name, "PYTHON_IMAGE")
    assert base.count(":") == 1
    assert "latest" not in base
    assert all(step.text.startswith("${PYTHON_IMAGE}") for step in found if step.word == "FROM")
    assert [step.text for step in found if step.word == "USER"] == ["1000:1000"]
    assert words.index("USER") > max(index for index, word in enumerate(words) if word == "RUN")
    check = next(step.text for step in found if step.word == "HEALTHCHECK")
    assert check.endswith('"fastvid", "doctor", "--no-parity"]')
    labels = next(step.text for step in found if step.word == "LABEL")
    for label in ("title", "description", "licenses", "version", "revision", "base.name"):
        assert f"org.opencontainers.image.{label}=" in labels
    assert base in labels
    environment = next(step.text for step in found if step.word == "ENV")
    assert f"{UNSHARED}=1" in environment
    assert ("NVIDIA_DRIVER_CAPABILITIES=compute,utility,video" in environment) == name.endswith("cuda")


def test_the_cuda_image_can_compile_kernels_and_its_health_check_uses_no_gpu():
    found = steps("Dockerfile.cuda")
    final = found[max(index for index, step in enumerate(found) if step.word == "FROM") :]
    installs = [step.text for step in final if step.word == "RUN" and "apt-get install" in step.text]
    # Triton needs a compiler and the headers of the C library where kernels are launched, not where wheels are built.
    assert len(installs) == 1
    assert {"gcc", "libc6-dev"} <= set(installs[0].split())
    check = next(step.text for step in final if step.word == "HEALTHCHECK")
    assert json.loads(check.partition("CMD")[2])[:3] == ["env", "CUDA_VISIBLE_DEVICES=", "fastvid"]


def test_the_cuda_image_has_every_decoder_that_an_extra_installs():
    # The header says how to build it for CUDA 12, with an extra that exists.
    header = (DOCKER / "Dockerfile.cuda").read_text().partition("ARG PYTHON_IMAGE")[0]
    assert "--shm-size" in header
    for_cuda_12 = re.search(r"EXTRAS=(\S+)", header)[1].split(",")
    assert "nvidia-dali-cuda120" in " ".join(requirements.requirements(ROOT / "pyproject.toml", for_cuda_12))
    named = [re.search(r"\[(.+)\]", one.install) for one in BACKENDS.values() if one.device == "cuda"]
    wanted = {one[1] for one in named if one is not None}
    assert wanted == {"nvdec", "dali-cuda13"}
    assert wanted <= set(argument("Dockerfile.cuda", "EXTRAS").split(","))
    assert {name.replace("cuda13", "cuda12") for name in wanted} <= set(for_cuda_12)


def test_the_cuda_image_requires_the_driver_of_its_build_argument():
    found = steps("Dockerfile.cuda")
    first = max(index for index, step in enumerate(found) if step.word == "FROM")
    words = {}
    for step in found[first:]:
        if step.word == "ARG":
            name, _, value = step.text.partition("=")
            words[name] = value.strip('"')
    words["REQUIRE_CUDA"] = "cuda>=12.6"
    environment = next(step.text for step in found[first:] if step.word == "ENV")
    assert 'NVIDIA_REQUIRE_CUDA="cuda>=12.6"' in run_steps.substitute(environment, words | {"PATH": ""})


def test_images_have_the_projects_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for name in IMAGES:
        assert f"VERSION={version}" in [step.text for step in steps(name) if step.word == "ARG"]


def copied_files(name: str) -> set[str]:
    """Return what an image copies of the project."""
    copies = [step.text.split() for step in steps(name) if step.word == "COPY" and "--from" not in step.text]
    return {source for words in copies for source in words[:-1]}


def test_images_copy_the_files_of_the_wheel():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*wheel["packages"], *wheel["force-include"], settings["project"]["readme"]}
    needed |= {*settings["project"]["license-files"], "pyproject.toml"}
    for name in IMAGES:
        assert needed <= copied_files(name)


def test_the_build_context_contains_only_files_that_images_copy():
    context = list(run_steps.context_files(ROOT))
    copied = set().union(*map(copied_files, IMAGES))
    assert all(any(file == source or file.startswith(f"{source}/") for file in context) for source in copied)
    assert [file for file in context if not any(file == s or file.startswith(f"{s}/") for s in copied)] == []
    assert "fastvid/cli/main.py" in context
    assert [file for file in context if "__pycache__" in file or file.endswith(".pyc")] == []


def test_the_dependency_layer_installs_what_the_project_needs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in IMAGES:
        extras = argument(name, "EXTRAS").split(",")
        lines = requirements.requirements(ROOT / "pyproject.toml", extras)
        assert set(project["dependencies"]) < set(lines)
        assert all(set(project["optional-dependencies"][extra]) <= set(lines) for extra in extras)
    with pytest.raises(SystemExit, match="unknown extra 'nonsense'; known are"):
        requirements.requirements(ROOT / "pyproject.toml", ["nonsense"])


@pytest.mark.parametrize("name", MANIFESTS)
def test_kubernetes_files_run_pinned_images_without_privileges(name):
    for document in documents(name):
        for container in containers(document):
            image, _, tag = container["image"].rpartition(":")
            assert image
            assert tag not in ("", "latest")
            assert container.get("resources") or container.get("resourcesPerNode")
            if document["kind"] != "TrainJob":  # its runtime says this
                assert container["securityContext"] == {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                }
                assert str(document).count("'runAsNonRoot': True") >= 1
        if "torchrun" in str(document):
            (container,) = containers(document)
            assert {"name": UNSHARED, "value": "1"} in container["env"]
            assert torchrun_options(container["command"][1:]).training_script == "fastvid.train"


def test_mounted_volume_claims_exist():
    claims = {document["metadata"]["name"] for document in documents("storage.yaml")}

    def mounted(node: object) -> Iterator[str]:
        if isinstance(node, dict):
            if isinstance(node.get("claimName"), str):
                yield node["claimName"]
            for value in node.values():
                yield from mounted(value)
        elif isinstance(node, list):
            for value in node:
                yield from mounted(value)

    used = {claim for name in MANIFESTS for document in documents(name) for claim in mounted(document)}
    assert used == claims


def test_launch_files_train_existing_recipes():
    recipes = pytest.importorskip("fastvid.train.config.config").names()
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    command = compose["services"]["node0"]["command"]
    started = [command[command.index("fastvid.train") + 1].removeprefix("${RECIPE:-").removesuffix("}")]
    for name in MANIFESTS:
        for document in documents(name):
            for container in containers(document):
                words = container.get("command", [])
                started += [words[words.index("fastvid.train") + 1]] if "fastvid.train" in words else []
    assert len(started) == 3
    assert set(started) <= set(recipes)


def test_compose_starts_two_agents_of_one_elastic_job():
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    assert list(services) == ["node0", "node1"]
    for name, service in services.items():
        assert service["hostname"] == name
        assert service["environment"][UNSHARED] == "1"
        assert service["command"][0] == "torchrun"
        options = torchrun_options(service["command"][1:])
        assert (options.nnodes, options.rdzv_backend, options.rdzv_endpoint) == ("1:2", "c10d", "node0:29400")
        assert (options.module, options.training_script) == (True, "fastvid.train")


def test_slurm_training_starts_one_elastic_job_with_the_variable_exported(tmp_path):
    path = programs(
        tmp_path,
        scontrol="printf 'gpu07\\ngpu08\\n'",
        srun=f'env | grep ^{UNSHARED}; for word in "$@"; do echo "$word"; done',
    )
    slurm = {
        "SLURM_JOB_NODELIST": "gpu[07-08]",
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
    }
    script = ["bash", str(DOCKER / "slurm" / "train.sbatch")]
    out = subprocess.run(
        [*script, "my recipe", "a=b"], env={"PATH": path, **slurm}, capture_output=True, text=True, check=True
    )
    variable, *words = out.stdout.splitlines()
    assert variable == f"{UNSHARED}=1"
    options = torchrun_options(words[words.index("torchrun") + 1 :])
    assert (options.nnodes, options.nproc_per_node, options.rdzv_endpoint) == ("1:2", "8", "gpu07:24567")
    assert options.training_script_args == ["my recipe", "a=b"]
    bare = subprocess.run(script, env={"PATH": path, **slurm}, capture_output=True, text=True, check=False)
    assert bare.returncode != 0
    assert "usage: train.sbatch RECIPE" in bare.stderr


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (3, 0), (1, 1), (137, 137)])
@pytest.mark.parametrize("script", ["shard.sbatch", "merge.sbatch"])
def test_slurm_shards_fail_only_if_work_is_left(tmp_path, script, code, expected):
    path = programs(tmp_path, srun=f'echo "$@"; exit {code}')
    slurm = {"SLURM_CPUS_PER_TASK": "16", "SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "64"}
    out = subprocess.run(
        ["bash", str(DOCKER / "slurm" / script), "/data", "/out", "--crf", "20"],
        env={"PATH": path, **slurm},
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.returncode == expected
    part = " --part auto" if script == "shard.sbatch" else ""
    assert out.stdout == f"fastvid shard /data --out /out --workers 16{part} --crf 20\n"


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (3, 0), (1, 1)])
@pytest.mark.parametrize("name", ["shard-job.yaml", "merge-job.yaml"])
def test_kubernetes_shards_fail_only_if_work_is_left(tmp_path, name, code, expected):
    (document,) = documents(name)
    (container,) = containers(document)
    environment = {entry["name"]: entry.get("value", "16") for entry in container["env"]}
    path = programs(tmp_path, fastvid=f'echo "$@"; exit {code}')
    out = subprocess.run(
        container["command"],
        env={"PATH": path, "JOB_COMPLETION_INDEX": "5", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (out.returncode != 0) == (expected != 0)
    part = " --part auto/64" if name == "shard-job.yaml" else ""
    assert out.stdout == f"shard /videos --out /shards/mine --workers 16{part}\n"
    assert environment.get("PARTS", "64") == str(document["spec"].get("completions", 64))


def linter(name: str) -> str:
    """Return a linter's program, beside this interpreter or on PATH."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed; it is one of the extra dev")
    return found


@pytest.mark.parametrize(
    "command",
    [
        ["hadolint", *(str(DOCKER / name) for name in IMAGES)],
        ["shellcheck", str(DOCKER.parent / "bench/gpu/run.sh"), *(str(DOCKER / "slurm" / name) for name in SCRIPTS)],
        [
            "yamllint",
            "-d",
            "{extends: default, rules: {document-start: disable, comments: {min-spaces-from-content: 1}, "
            "line-length: {max: 120}}}",
            str(DOCKER),
        ],
        *(
            ["kubernetes-validate", "--strict", str(DOCKER / "kubernetes" / name)]
            for name in ("storage.yaml", "shard-job.yaml", "merge-job.yaml")
        ),
        ["check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(DOCKER / "compose.yaml")],
    ],
    ids=lambda command: f"{command[0]}-{Path(command[-1]).stem}",
)
def test_linters_report_nothing(command):
    out = subprocess.run([linter(command[0]), *command[1:]], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stdout + out.stderr


def test_pods_in_custom_resources_are_valid():
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is one of the extra dev")
    ray = documents("shard-rayjob.yaml")[0]["spec"]["rayClusterSpec"]
    torch = documents("train-pytorchjob.yaml")[0]["spec"]["pytorchReplicaSpecs"]
    templates = [group["template"] for group in [ray["headGroupSpec"], *ray["workerGroupSpecs"], *torch.values()]]
    assert len(templates) == 3
    for template in templates:
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
        validator.validate(pod, "1.31", strict=True)


def unknown_fields(value: Any, kind: str, models: Any, where: str = "") -> list[str]:
    """Return the fields of an object that its type lacks; types that `models` does not define may have any."""
    container = re.fullmatch(r"(?:dict\(str, |list\[)(\w+)[)\]]", kind)
    if container is not None:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [
            field for name, item in items for field in unknown_fields(item, container[1], models, f"{where}.{name}")
        ]
    model = getattr(models, kind, None)
    if model is None:
        return []
    fields = {name: model.openapi_types[attribute] for attribute, name in model.attribute_map.items()}
    found = [f"{where}.{name}" for name in value if name not in fields]
    for name in value.keys() & fields.keys():
        found += unknown_fields(value[name], fields[name], models, f"{where}.{name}")
    return found


def test_a_pytorchjob_has_the_fields_of_kubeflows_type():
    models = pytest.importorskip("kubeflow.training.models", reason="kubeflow-training is one of the extra dev")
    (job,) = documents("train-pytorchjob.yaml")
    assert unknown_fields(job, "KubeflowOrgV1PyTorchJob", models) == []


def test_a_trainjob_has_the_fields_of_kubeflows_type():
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is one of the extra dev")
    (job,) = documents("train-trainjob.yaml")
    # The type drops unknown fields.
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job


@pytest.mark.soak
def test_every_step_of_the_cpu_image_runs():
    if os.geteuid() != 0:
        pytest.skip("overlay mounts need root")
    command = [sys.executable, str(DOCKER / "run_steps.py"), str(DOCKER / "Dockerfile.cpu")]
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr[-3000:]
    assert "health check fastvid doctor --no-parity: exit 0" in out.stderr
