"""vLLM's own scheduler tests pass on our classes as they do on vLLM's; all of them and every preset with `make conformance`."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from support.checkout import ROOT

PRESETS = ["continuum", "adaptive"]
NO_TESTS = 3


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """The fast files of vLLM's suite, on stock and on two presets. Skipped where its sources cannot be had, except in CI."""
    done = subprocess.run(
        [sys.executable, "scripts/conformance.py", "--quick", "--json", "--presets", ",".join(PRESETS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == NO_TESTS:
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(done.stderr)
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_stock_passes_its_own_tests_here(report: dict[str, Any]) -> None:
    assert report["not_passed_on_stock"] == {}
    assert len(report["passed_on_stock"]) >= 250


@pytest.mark.parametrize("preset", PRESETS)
def test_our_scheduler_passes_what_stock_passes(report: dict[str, Any], preset: str) -> None:
    (variant,) = [one for one in report["variants"] if one["variant"] == preset]
    assert variant["unexplained"] == {}
    assert variant["passed"] + len(variant["lost"]) == len(report["passed_on_stock"])


@pytest.mark.parametrize("preset", PRESETS)
def test_a_known_difference_that_is_gone_is_known_no_more(report: dict[str, Any], preset: str) -> None:
    (variant,) = [one for one in report["variants"] if one["variant"] == preset]
    assert sorted(variant["lost"]) == sorted(report["known_differences"])
