#!/bin/sh
# scale.sh ROLE N|+N|-N [OPTION...]: what every other script here calls.
#
# Returns when there are as many of ROLE: what is new is ready, what is gone has drained. It then says what
# changed; where it fails it says why, with another status than 0. Options are those of `lamella scale`:
# --target local|compose|kubernetes, --state-dir DIR, --namespace NAME.
set -eu
case "${1:-}" in
    '' | -*) script='scale.sh ROLE' ;;
    *) script=$1.sh ;;
esac
usage="usage: $script N|+N|-N [--target auto|local|compose|kubernetes] [OPTION...]"
for argument; do
    case "$argument" in
        -h | --help) echo "$usage" && exit ;;
    esac
done
if [ "$#" -lt 2 ]; then
    echo "$usage" >&2
    exit 2
fi
role=$1
count=$2
shift 2
# `make setup` puts it beside the checkout; elsewhere it is installed.
lamella=$(cd "$(dirname "$0")/../.." && pwd)/.venv/bin/lamella
if [ -n "${LAMELLA:-}" ] || [ ! -x "$lamella" ]; then
    lamella=${LAMELLA:-lamella}
fi
exec "$lamella" scale "$role=$count" "$@"
