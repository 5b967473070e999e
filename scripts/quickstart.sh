#!/usr/bin/env bash
# Make the environment, start a server on the bundled model, send it one completion, and serve until Ctrl-C.
#
# Usage: scripts/quickstart.sh [--once] [--port N] [--tp RANKS]
#   --once       stop the server after the completion and exit 0
#   --port N     where it listens on 127.0.0.1 (default 8000)
#   --tp RANKS   expert-parallel ranks (default 2)
#
# The wire is fp4 unless MEGA_WIRE or MEGA_DISPATCH_WIRE says otherwise; every variable of the server holds. The
# server's log goes to logs/quickstart-PORT.log. When the server ends by itself, its status is the exit status:
# 2 for a launch that it refused. Variables of the set-up: see scripts/setup_venv.sh.
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"

for argument in "$@"; do
    case "$argument" in
        -h | --help)
            sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
    esac
done

python="$("$root/scripts/setup_venv.sh")"
[ -n "${MEGA_DISPATCH_WIRE:-}" ] || export MEGA_WIRE="${MEGA_WIRE:-fp4}"
exec "$python" "$root/scripts/quickstart.py" "$@"
