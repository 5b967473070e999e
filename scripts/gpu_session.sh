#!/usr/bin/env bash
# One visit to a machine with a GPU: the GPU tests, then what the arguments ask of the sweep. Results go to $OUT.
#   OUT=results scripts/gpu_session.sh [--only quantize experts dispatch] [--seconds 200]
set -uo pipefail
cd "$(dirname "$0")/.."
OUT="${OUT:-gpu_results}"
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1
PYTHON="${PYTHON:-python3}"

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv 2>/dev/null
"$PYTHON" -m pytest -m gpu tests/gpu -n 8 -q -p no:cacheprovider 2>&1 | tee "$OUT/tests.log" | tail -60
"$PYTHON" -m atom.benchmarks.sweep_gpu --json "$OUT/sweep.json" "$@" 2>&1 | tee "$OUT/sweep.log"
