#!/bin/sh
# Creates .venv with exactly what the two locks name, torch, and this project. Idempotent: a second run with
# the same locks does nothing. Needs python3 >= 3.11; everything else is installed.
#
#   deploy/setup.sh [VENV]          PYTHON=python3.12 deploy/setup.sh
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
venv=${1:-$root/.venv}
torch=$(sed -n 's/^  "\(torch==[^"]*\)",$/\1/p' "$root/pyproject.toml")

say() { printf 'lamella setup: %s\n' "$*"; }
fail() { printf 'lamella setup: %s\n' "$*" >&2; exit 1; }

fingerprint() {
    (cd "$root" && cat requirements.lock requirements-dev.lock pyproject.toml deploy/setup.sh \
        deploy/libibverbs.sh) |
        cksum | tr ' ' -
}

find_python() {
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "needs Python 3.11 or newer; ${PYTHON:-python3} is $(${PYTHON:-python3} --version 2>&1 || true)"
}

make_venv() {
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"
    say "virtual environment in $venv"
    "$python" -m venv --clear "$venv"
}

install() {
    "$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --no-input --no-compile "$@"
}

can_import_torch() { "$venv/bin/python" -c 'import torch' 2>/dev/null; }

# torch is installed by version, not by hash: machines without and with CUDA get other files of one version.
install_torch() {
    if command -v nvidia-smi >/dev/null 2>&1; then
        install "$torch"
    else
        install --no-deps "$torch"
    fi
}

# On a GPU machine Mooncake must know device memory. Both builds are the package `mooncake`: one replaces the
# other.
install_mooncake_for_cuda() {
    mooncake=$(sed -n 's/^cuda = \["\(.*\)"\]$/\1/p' "$root/pyproject.toml")
    "$venv/bin/python" -m pip uninstall --quiet --yes mooncake-transfer-engine-non-cuda
    install --no-deps "$mooncake"
}

stamp=$venv/.lamella-setup
[ -x "$venv/bin/lamella" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$(fingerprint)" ] && exit 0

[ -x "$venv/bin/python" ] && "$venv/bin/python" -c 'import pip' 2>/dev/null || make_venv
rm -f "$stamp"
say "packages of the locks and $torch (a minute or two the first time)"
# Side by side, as unpacking is what takes long; they have no file in common.
install_torch & torch_job=$!
install --require-hashes --no-deps -r "$root/requirements.lock" -r "$root/requirements-dev.lock"
wait "$torch_job" || fail "$torch could not be installed"
if ! can_import_torch; then
    say "the package index has only the CUDA build of torch: its libraries are needed too (large)"
    install "$torch"
fi
if command -v nvidia-smi >/dev/null 2>&1; then
    install_mooncake_for_cuda
fi
say "lamella itself"
install --no-deps --no-build-isolation --editable "$root"
"$root/deploy/libibverbs.sh" "$venv"
fingerprint >"$stamp"
say "done"
