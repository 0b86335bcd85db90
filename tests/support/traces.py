"""Recorded traces live outside the checkout; where they are missing, a laptop skips and CI fails."""

import os
from pathlib import Path

import pytest

_DEFAULT = Path(__file__).resolve().parents[3] / "shared" / "traces"


def trace_path(name: str) -> Path:
    """The file of a recorded trace, or skip the test."""
    path = Path(os.environ.get("CONTINUUM_TRACES", _DEFAULT)) / name
    if not path.exists():
        message = f"no recorded trace {name}; set CONTINUUM_TRACES to the directory that holds it"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return path
