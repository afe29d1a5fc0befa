#!/bin/sh
# Prove and measure fastvid on this machine's NVIDIA GPU, and write results/gpu.json. Everything stays in this folder.
#
#   ./run.sh           meant to take ten minutes after the download of packages; no card has timed it yet
#   ./run.sh --fake    a rehearsal on a machine without a GPU
#
# Needs Linux, Python 3.11 or newer (PYTHON=... names another), a driver of version 580 or newer, a C compiler for
# Triton, 15 GB of disk, and a package index for PyTorch, PyNvVideoCodec, DALI and torchcodec.
set -eu
cd "$(dirname "$0")"
unset PYTHONPATH

stop() {
    echo "run.sh: $1" >&2
    exit 2
}

python=${PYTHON:-python3}
"$python" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' ||
    stop "$python is no Python 3.11 or newer with the module venv; name one with PYTHON=/path/to/python"
extras=torch rivals=
if [ "${1:-}" != --fake ]; then
    extras=torch,nvdec,dali-cuda13 rivals=torchcodec
    nvidia-smi -L ||
        stop "no NVIDIA GPU: \`nvidia-smi -L\` lists none; install its driver, start the container with --gpus all, or rehearse with --fake"
    "$python" -c 'import ctypes; ctypes.CDLL("libnvcuvid.so.1")' 2>/dev/null ||
        stop "no NVDEC library: libnvcuvid.so.1 cannot be loaded; start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility,video, or install the driver's decode package"
    command -v cc gcc clang >/dev/null || stop "no C compiler, which Triton needs: install gcc"
fi
[ -x venv/bin/python ] || "$python" -m venv venv
# shellcheck disable=SC2086
venv/bin/pip install --quiet --disable-pip-version-check --find-links wheels -c constraints.txt \
    "$(echo wheels/fastvid_toolkit-*.whl)[$extras]" $rivals ||
    stop "the packages cannot be installed: see above; PIP_INDEX_URL names another index"
failed=0
venv/bin/fastvid bench gpu --all --data pack --out results --seconds 1 "$@" || failed=$?
[ -f results/gpu.json ] || stop "the benchmark has not started: see above"
echo "Please send results/gpu.json, and results/gpu.log if a proof failed, to the project ($failed failed)."
exit "$failed"
