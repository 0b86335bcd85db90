"""Whatever is retained, reordered, held back or reclaimed: greedy answers of a real engine are the same tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.checkout import ROOT
from support.same_tokens import PROGRAMS, ROUNDS, TURNS

pytestmark = pytest.mark.integration

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT / "tests"),
}


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every scheduler's round on one engine."""
    directory: Path = tmp_path_factory.mktemp("same-tokens")
    done = subprocess.run(
        [sys.executable, "-m", "support.same_tokens", str(directory)],
        cwd=directory,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.parametrize("name", [name for name in ROUNDS if name != "stock"])
def test_the_answers_are_those_of_stock_vllm(rounds: dict[str, Any], name: str) -> None:
    answers = rounds[name]["answers"]
    assert len(answers) == PROGRAMS * TURNS
    assert answers == rounds["stock"]["answers"]


def test_the_rounds_did_retain_reuse_and_reclaim(rounds: dict[str, Any]) -> None:
    for name in ("continuum", "adaptive", "forever"):
        leases = rounds[name]["stats"]["leases"]
        assert leases["reused"] > 0, name
        assert rounds[name]["stats"]["reused_tokens"] > 0, name
    assert rounds["forever"]["stats"]["leases"]["reclaimed"] > 0
