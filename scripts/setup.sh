#!/usr/bin/env bash
# Brings .venv to exactly what requirements/cpu.lock says, with this checkout installed editable on top.
#
# A stamp in the environment holds a digest of all that it depends on: where it matches, nothing is done. Needs Python 3.11
# with pip; packages come from whatever index pip is configured for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV="${VENV:-.venv}"
LOCK=requirements/cpu.lock
STAMP="$VENV/continuum-setup.stamp"

# Two `make` runs at once share one environment; the second waits for the first.
exec 9<scripts/setup.sh
flock 9

fail() {
  echo "setup: $*" >&2
  exit 1
}

is_python_311() {
  command -v "$1" >/dev/null && "$1" -c 'import sys; raise SystemExit(sys.version_info[:2] != (3, 11))' 2>/dev/null
}

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3 python; do
    if is_python_311 "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  fail "Python 3.11 is needed: the lock names the wheels of that version. Put python3.11 on PATH, or set PYTHON=/path/to/it."
}

# The path is part of it: neither a virtual environment nor an editable install survives a move.
digest() {
  { pwd && cat "$LOCK" pyproject.toml scripts/setup.sh; } | sha256sum | cut -d' ' -f1
}

normalised_names() {
  sed -E 's/[=@ ].*//' | tr 'A-Z_.' 'a-z--' | sort -u
}

pip_install() {
  # No compilation to bytecode: most modules are never imported, and those that are get theirs at first use.
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-compile "$@"
}

install_torch() {
  local requirement
  requirement="$(grep '^torch==' "$LOCK")"
  if ! pip_install --only-binary :all: "$requirement"; then
    echo "setup: the configured index has no $requirement; taking it from PyTorch's own CPU index"
    pip_install --only-binary :all: --index-url https://download.pytorch.org/whl/cpu "$requirement"
  fi
}

remove_what_the_lock_does_not_name() {
  local stale
  stale="$(comm -23 \
    <("$VENV/bin/python" -m pip list --disable-pip-version-check --format=freeze | normalised_names) \
    <({ grep -v '^#' "$LOCK" && printf '%s\n' pip continuum-agents; } | normalised_names))"
  if [[ -n "$stale" ]]; then
    # shellcheck disable=SC2086  # one word a package
    "$VENV/bin/python" -m pip uninstall --quiet --disable-pip-version-check --yes $stale
  fi
}

want="$(digest)"
if [[ -f "$STAMP" && "$(cat "$STAMP")" == "$want" ]] && is_python_311 "$VENV/bin/python"; then
  exit 0
fi

started_s=$SECONDS
if ! is_python_311 "$VENV/bin/python"; then
  python="$(find_python)"
  echo "setup: creating $VENV with $("$python" --version)"
  "$python" -m venv --clear "$VENV" || fail "could not create $VENV (on Debian and Ubuntu, install python3.11-venv)"
fi
rm -f "$STAMP"
echo "setup: installing $(grep -vc '^#' "$LOCK") packages into $VENV"
# Only wheels: nothing is compiled here, and no package's setup script runs.
pip_install --only-binary :all: -r <(grep -v -e '^torch==' "$LOCK")
install_torch
remove_what_the_lock_does_not_name
pip_install --no-build-isolation --editable .
echo "$want" >"$STAMP"
echo "setup: done in $((SECONDS - started_s)) s"
