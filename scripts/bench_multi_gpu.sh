#!/usr/bin/env bash
# Check and measure ranks on all GPUs of this host in one call: correctness, the layer, the server. Needs at most 9 minutes.
#
# Usage: scripts/bench_multi_gpu.sh [--ranks N] [--stages correctness layer server] [--seconds 540] [--out DIR] [...]
#        (scripts/bench_multi_gpu.sh --help lists the rest)
#
# Variables:
#   PYTHON   an interpreter that has what the package needs, Triton too (default: that of our environment, set up if need be)
#
# NVLink multicast stays off. DIR gets results.json, report.md and the stages' logs.
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
python="${PYTHON:-$("$root/scripts/setup_venv.sh")}"
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m atom.benchmarks.bench_multi_gpu "$@"
