"""What `/metrics` exports follows Prometheus' conventions, whichever part it comes from."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path

import pytest

from support.metrics import exported_page, families, needs_promtool

#: Labels whose values come from a bounded list, or are bounded where they are made.
LABELS = {
    "state", "reason", "outcome", "part", "replica", "code", "target", "tool", "server", "kind", "continuity", "call", "le", "held_by", "policy",
}  # fmt: skip
NOT_BASE_UNITS = ("_ms", "_millis", "_milliseconds", "_minutes", "_kb", "_mib", "_percent", "_s")


@pytest.fixture
async def page(tmp_path: Path) -> str:
    return await exported_page(tmp_path)


async def test_names_are_plain_and_in_base_units(page: str) -> None:
    for name, family in families(page).items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name), name
        assert not name.endswith(NOT_BASE_UNITS), name
        assert family.type in {"counter", "gauge", "histogram"}, name
        if family.type != "counter":
            assert not name.endswith("_total"), name


async def test_every_family_says_what_it_is_in_a_sentence(page: str) -> None:
    for name, family in families(page).items():
        assert family.documentation.endswith("."), name


async def test_no_label_can_grow_without_bound(page: str) -> None:
    for name, family in families(page).items():
        for sample in family.samples:
            assert set(sample.labels) <= LABELS, name


async def test_a_finished_program_is_in_every_distribution(page: str) -> None:
    found = families(page)
    for name in (
        "continuum_program_duration_seconds",
        "continuum_program_start_delay_seconds",
        "continuum_program_length_turns",
        "continuum_program_turn_seconds",
        "continuum_program_tool_wait_seconds",
    ):
        counts = {sample.name: sample.value for sample in found[name].samples if sample.name.endswith("_count")}
        assert counts[f"{name}_count"] >= 1, name


async def test_deadlines_are_scored_against_what_happened(page: str) -> None:
    (outcomes,) = (family for name, family in families(page).items() if name == "continuum_engine_ttl_outcomes")
    assert {sample.labels["outcome"]: sample.value for sample in outcomes.samples} == {"returned": 1, "late": 1}


async def test_prometheus_own_checker_finds_nothing(page: str) -> None:
    ours = "".join(f"{line}\n" for line in page.splitlines() if re.match(r"(# \w+ )?continuum_", line))
    command = [needs_promtool(), "check", "metrics"]
    result = await asyncio.to_thread(subprocess.run, command, input=ours, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")
