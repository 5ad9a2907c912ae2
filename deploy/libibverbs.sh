#!/bin/sh
# Makes the libraries loadable that Mooncake links even where only TCP is used: libibverbs, libnuma, libcurl,
# and libmlx5 on a machine with NVIDIA's driver, for which set-up takes Mooncake's build for CUDA.
#
#   deploy/libibverbs.sh VENV
#
# In this order: already loadable or unpacked earlier -> nothing; root with apt-get -> the packages; no root
# but apt-get -> the packages (not libcurl, which is on every desktop and server) are downloaded and unpacked
# into VENV/lib/lamella-native/, from where common/transfer/mooncake.py loads them. If none of it works the
# script says what that costs and still succeeds: on one host lamella hands KV over through shared memory and
# needs no Mooncake.
set -u

venv=${1:?usage: libibverbs.sh VENV (the virtual environment lamella is installed in)}
native=$venv/lib/lamella-native
libraries="libibverbs.so.1 libnuma.so.1"
packages="libibverbs1 libnuma1"
if command -v nvidia-smi >/dev/null 2>&1; then
    libraries="$libraries libmlx5.so.1"
    packages="$packages ibverbs-providers"
fi

have_python() { [ -x "$venv/bin/python" ]; }

is_loadable() {
    if have_python; then
        # shellcheck disable=SC2086  # words on purpose, here and below
        "$venv/bin/python" -c '
import ctypes, sys
for name in sys.argv[1:]:
    ctypes.CDLL(name)' $libraries libcurl.so.4 2>/dev/null
    else
        ldconfig -p 2>/dev/null | grep -q 'libibverbs\.so\.1'
    fi
}

is_unpacked() {
    for library in libnl-3.so.200 libnl-route-3.so.200 $libraries; do
        [ -e "$native/$library" ] || return 1
    done
}

install_as_root() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || return 1
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086
    apt-get install -y -q --no-install-recommends $packages libcurl4 >/dev/null 2>&1 && return 0
    # A slim image ships without package lists.
    apt-get update -q >/dev/null 2>&1
    # shellcheck disable=SC2086
    apt-get install -y -q --no-install-recommends $packages libcurl4 >/dev/null 2>&1
}

unpack_without_root() {
    command -v apt-get >/dev/null 2>&1 && command -v dpkg >/dev/null 2>&1 || return 1
    work=$(mktemp -d) || return 1
    # shellcheck disable=SC2086
    (cd "$work" && apt-get download -q libnl-3-200 libnl-route-3-200 $packages >/dev/null 2>&1) ||
        { rm -rf "$work"; return 1; }
    for package in "$work"/*.deb; do
        dpkg -x "$package" "$work/root" || { rm -rf "$work"; return 1; }
    done
    # Only the libraries themselves: the loader needs neither the plug-ins nor the documentation beside them.
    mkdir -p "$native" &&
        find "$work/root" -name 'lib*.so.*' ! -path '*/libibverbs/*' ! -path '*/libnl/*' \
            -exec cp -a {} "$native/" \;
    rm -rf "$work"
    is_unpacked
}

if is_loadable || is_unpacked; then
    exit 0
elif install_as_root && is_loadable; then
    echo "libibverbs1 installed (Mooncake's KV transfer needs it)"
elif unpack_without_root; then
    echo "libibverbs1 unpacked into $native (Mooncake's KV transfer needs it)"
else
    cat >&2 <<EOT
warning: one of $libraries libcurl.so.4 is missing and could not be installed.
  Lost: KV transfer through Mooncake: instances on different hosts cannot hand requests over, nor any on GPUs.
  Still there: everything on the CPUs of one host, where KV moves through shared memory.
  To repair: apt-get install -y $packages libcurl4
             (Fedora: dnf install libibverbs numactl-libs libcurl; then run set-up again)
EOT
fi
exit 0
