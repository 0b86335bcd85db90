"""The benchmark of tool calls runs, and reports what its reader is told it reports."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration


def test_it_reports_every_figure_as_json() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.tools", "--json", "--calls", "8"], capture_output=True, text=True, check=True
    )
    report = json.loads(done.stdout)
    for name in ("call_ms", "bash_ms", "cold_first_call_ms", "claim_ms", "warm_first_call_ms", "asleep_call_ms"):
        assert report[name]["p50"] > 0
        assert report[name]["p95"] >= report[name]["p50"]
    assert set(report["calls_per_s"]) == {"1", "8", "32"}
    assert report["call_over_bash_ms_p50"] == pytest.approx(
        report["call_ms"]["p50"] - report["bash_ms"]["p50"], abs=0.01
    )
    assert 0 < report["idle_sandbox_mib"] < report["awake_sandbox_mib"]
    assert report["claim_ms_p50"] == report["claim_ms"]["p50"]
