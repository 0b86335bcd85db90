#!/usr/bin/env bash
# Resolves requirements/cpu.in into requirements/cpu.lock for Python 3.11 on Linux. Run by `make lock`.
#
# Versions that the lock has already stay as they are where cpu.in allows them; `scripts/lock.sh --upgrade` takes the newest.
# The resolver (uv) lives in a throw-away environment: nothing else here needs it, and its version is no part of the lock.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
"${PYTHON:-python3.11}" -m venv "$scratch/venv"
"$scratch/venv/bin/python" -m pip install --quiet --disable-pip-version-check uv

# The resolver prefers what its output file says already.
cp requirements/cpu.lock "$scratch/cpu.lock"
# UV_FIND_LINKS and UV_INDEX, where set, say where the +cpu build of torch is; no address may end up in the lock.
"$scratch/venv/bin/uv" pip compile requirements/cpu.in \
  --override requirements/cpu-overrides.txt \
  --python-version 3.11 --python-platform x86_64-manylinux_2_31 \
  --only-binary :all: --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
  --quiet --output-file "$scratch/cpu.lock" "$@"
{
  echo "# Every package of the CPU environment. Made from cpu.in by \`make lock\`; not edited by hand."
  grep -v '^#' "$scratch/cpu.lock"
} >requirements/cpu.lock
echo "lock: $(grep -vc '^#' requirements/cpu.lock) packages in requirements/cpu.lock"
