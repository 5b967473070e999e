#!/usr/bin/env bash
# Set up the environment, then run black --check, ruff check and pytest.
#
# Usage: scripts/test.sh [pytest arguments]        variables: see scripts/setup_venv.sh
#
# All three run whatever the others found. The exit status is pytest's, or 1 when only black or ruff complained.
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
python="$("$root/scripts/setup_venv.sh")"
cd -- "$root"

# What this shell has set for a server must not reach the tests.
for name in $(compgen -e); do
    case "$name" in
        MEGA_* | AITER_* | ATOM_* | RANK | WORLD_SIZE | LOCAL_RANK | LOCAL_WORLD_SIZE | MASTER_ADDR | MASTER_PORT)
            unset "$name"
            ;;
    esac
done

style=0
"$python" -m black --check atom scripts tests || style=1
"$python" -m ruff check atom scripts tests || style=1

tests=0
"$python" -m pytest "$@" || tests=$?

if [ "$tests" -ne 0 ]; then exit "$tests"; fi
if [ "$style" -ne 0 ]; then
    echo "test.sh: the tests passed, but black or ruff complained: see above" >&2
    exit 1
fi
