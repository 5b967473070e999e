#!/usr/bin/env bash
# Serve with one rank in each of two network namespaces, joined by a veth pair whose speed tc limits, once per wire.
#
# Usage: sudo scripts/bench_slow_link.sh [--gbits 10 2.5 1 0.5] [--wires bf16 fp4] [--repeats 3] [--out DIR] [...]
#        (scripts/bench_slow_link.sh --help lists the rest)
#
# Needs root (for the namespaces), iproute2, and the kernel's veth and tbf. The host's own network is not touched, and the
# namespaces, with all that runs in them, are gone when this ends, however it ends.
set -euo pipefail

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
refuse() { printf 'bench_slow_link.sh: %s\n' "$*" >&2; exit 1; }

wants_help=0
for argument in "$@"; do case "$argument" in -h | --help) wants_help=1 ;; esac; done
if [ "$wants_help" = 0 ]; then
    [ "$(id -u)" = 0 ] || refuse "network namespaces need root. Run it with sudo."
    for tool in ip tc; do
        command -v "$tool" >/dev/null || refuse "$tool is missing. Install iproute2 (apt-get install iproute2)."
    done
fi
python="$("$root/scripts/setup_venv.sh")"
"$python" -c 'import matplotlib' 2>/dev/null || refuse "plots need matplotlib: $python -m pip install -e '$root[bench]'"

cd -- "$root"
if [ "$wants_help" = 1 ]; then
    exec "$python" -m atom.benchmarks.slow_link --interfaces a:a b:b --address 10.0.0.1 --help
fi

first="atom-a-$$" second="atom-b-$$"
clean_up() {
    local namespace pid
    for namespace in "$first" "$second"; do
        for pid in $(ip netns pids "$namespace" 2>/dev/null); do kill -KILL "$pid" 2>/dev/null || true; done
        # The veth pair goes with the namespace of either end.
        ip netns del "$namespace" 2>/dev/null || true
    done
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

ip netns add "$first"
ip netns add "$second"
ip link add "ata$$" type veth peer name "atb$$" || refuse "this kernel has no veth."
ip link set "ata$$" netns "$first"
ip link set "atb$$" netns "$second"
ip -n "$first" addr add 10.77.0.1/24 dev "ata$$"
ip -n "$second" addr add 10.77.0.2/24 dev "atb$$"
for end in "$first:ata$$" "$second:atb$$"; do
    ip -n "${end%%:*}" link set lo up
    ip -n "${end%%:*}" link set "${end#*:}" up
done
ip netns exec "$first" tc qdisc replace dev "ata$$" root tbf rate 1gbit burst 128kb latency 50ms 2>/dev/null ||
    refuse "this kernel has no tbf (the module sch_tbf)."

ip netns exec "$first" "$python" -m atom.benchmarks.slow_link \
    --interfaces "$first:ata$$" "$second:atb$$" --address 10.77.0.1 "$@"
