#!/usr/bin/env bash
# Make this checkout's virtual environment, or find it as it should be, and print the path of its python.
#
# Usage: scripts/setup_venv.sh        progress goes to stderr; stdout holds the path alone
#
# Variables:
#   ATOM_VENV    the environment's folder (default: .venv in the checkout); it serves one checkout
#   ATOM_TORCH   the torch requirement, installed before everything else (default: torch==2.13.0). Set but empty:
#                take the torch that the machine's python has (a ROCm or CUDA image, with aiter and mori beside it)
#   PYTHON       the interpreter to make it with, 3.11 or later (default: the first of python3.12, python3.11, python3)
#
# pip's own variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, ...) hold. pip is not run while pyproject.toml, the torch
# requirement, the interpreter and the checkout's place are those of the last set-up.
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="${ATOM_VENV:-$root/.venv}"
case "$venv" in /*) ;; *) venv="$PWD/$venv" ;; esac
torch="${ATOM_TORCH-torch==2.13.0}"
venv_python="$venv/bin/python"
stamp="$venv/.atom-setup"

say() { printf '%s\n' "$*" >&2; }
refuse() { say "setup_venv.sh: $*"; exit 1; }

# Exit status 0 when $1 runs and is new enough, 1 when it does not run, 3 when it is too old (its version on stdout).
check_python() {
    "$1" -c 'import sys
print("%d.%d" % sys.version_info[:2])
sys.exit(0 if sys.version_info >= (3, 11) else 3)' 2>/dev/null
}

find_python() {
    local candidate version status old=""
    if [ -n "${PYTHON:-}" ]; then
        version="$(check_python "$PYTHON")" && { printf '%s\n' "$PYTHON"; return; }
        status=$?
        [ "$status" -ne 3 ] || refuse "PYTHON=$PYTHON is Python $version, but 3.11 or later is needed. Name a newer one."
        refuse "PYTHON=$PYTHON does not run. Name a Python interpreter, 3.11 or later, or unset PYTHON."
    fi
    for candidate in python3.12 python3.11 python3; do
        version="$(check_python "$candidate")" && { printf '%s\n' "$candidate"; return; }
        status=$?
        [ "$status" -ne 3 ] || old=" ($candidate is Python $version)"
    done
    refuse "none of python3.12, python3.11 and python3 is Python 3.11 or later$old. Install one, or name it: PYTHON=/path/to/python $0"
}

make_venv() {
    local python options=()
    python="$(find_python)"
    if [ -e "$venv" ]; then
        # --clear empties the folder, so it must be an environment and not whatever ATOM_VENV happens to name.
        if [ -e "$venv/pyvenv.cfg" ]; then
            say "The environment in $venv does not run; making it anew."
            options+=(--clear)
        elif [ ! -d "$venv" ] || [ -n "$(ls -A -- "$venv")" ]; then
            refuse "$venv exists and is not a virtual environment. Remove it, or set ATOM_VENV to another folder."
        fi
    fi
    [ -n "$torch" ] || options+=(--system-site-packages)
    say "Making a virtual environment in $venv"
    "$python" -m venv ${options[@]+"${options[@]}"} -- "$venv" >&2 ||
        refuse "$python -m venv failed. On Debian and Ubuntu, install python3-venv."
}

fingerprint() {
    "$venv_python" - "$root" "$torch" <<'PY'
import hashlib, pathlib, sys

root, torch = sys.argv[1:]
parts = (root, torch, sys.version, (pathlib.Path(root) / "pyproject.toml").read_text(encoding="utf-8"))
print(hashlib.sha256("\0".join(parts).encode()).hexdigest())
PY
}

# An environment imports atom from one checkout. One that lies in this checkout is ours, whatever it says: a copied or
# moved checkout still holds the path it was made in.
refuse_shared() {
    local other
    other="$("$venv_python" - "$root" "$venv" <<'PY'
import json, sys, sysconfig
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import unquote, urlparse

root, venv = (Path(path).resolve() for path in sys.argv[1:])
for found in distributions(name="atom", path=[sysconfig.get_path("purelib")]):
    url = urlparse(json.loads(found.read_text("direct_url.json") or "{}").get("url", ""))
    other = Path(unquote(url.path))
    if url.scheme == "file" and other != root and (other / "pyproject.toml").exists() and root not in venv.parents:
        print(other)
PY
    )"
    [ -z "$other" ] || refuse "the environment $venv runs the checkout $other, and would run $root instead of it." \
        "Give each checkout its own: unset ATOM_VENV, or set it to another folder." \
        "If $other needs its environment no more, remove $venv and start again."
}

# Two scripts started together must not run pip in the same environment.
if command -v flock >/dev/null; then
    exec 9<"$root"
    flock -n 9 || { say "Waiting for another set-up of this checkout"; flock 9; }
fi

if version="$(check_python "$venv_python")"; then
    :
elif [ $? -eq 3 ]; then
    refuse "$venv holds Python $version, but 3.11 or later is needed. Remove it, or set ATOM_VENV to another folder."
else
    make_venv
fi

wanted="$(fingerprint)"
if [ ! -f "$stamp" ] || [ "$(cat -- "$stamp")" != "$wanted" ]; then
    refuse_shared
    rm -f -- "$stamp"
    "$venv_python" -m pip --version >/dev/null 2>&1 || "$venv_python" -m ensurepip --upgrade >&2
    # An editable install from pyproject.toml alone needs pip 21.3.
    if ! "$venv_python" -c 'import pip, sys; sys.exit(tuple(map(int, pip.__version__.split(".")[:2])) < (21, 3))'; then
        "$venv_python" -m pip install --disable-pip-version-check --upgrade pip >&2
    fi
    if [ -n "$torch" ]; then
        say "Installing $torch"
        "$venv_python" -m pip install --disable-pip-version-check "$torch" >&2
    fi
    say "Installing atom and its dependencies"
    (cd -- "$root" && "$venv_python" -m pip install --disable-pip-version-check -e '.[test]' >&2)
    printf '%s\n' "$wanted" >"$stamp"
fi

printf '%s\n' "$venv_python"
