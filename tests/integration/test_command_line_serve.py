"""`continuum serve` as a user has it: it comes up, a program runs by `continuum run`, and a signal leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from support.waiting import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

CLI = [sys.executable, "-m", "deployments.cli"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def settings_file(tmp_path: Path) -> Path:
    settings = {
        "store": {"embedded_port": free_port(), "data_dir": str(tmp_path / "store")},
        "engine": {"kv_cache_gib": 0.25},
    }
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


@pytest.fixture
def served(settings_file: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The process, and the addresses that it prints once it is ready."""
    log = tmp_path / "serve.log"
    environment = {**os.environ, "RAY_ADDRESS": "", "OMP_NUM_THREADS": "1"}
    command = [*CLI, "serve", "--config", str(settings_file), "--port", "0", "--json"]
    with (
        log.open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, log.read_text()
            yield process, json.loads(line)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            process.wait()


def test_it_serves_a_program_and_a_signal_leaves_no_process(served: tuple[subprocess.Popen[str], Any]) -> None:
    process, addresses = served
    run = [*CLI, "run", "1. Run date", "--tool", "shell", "--tool-choice", "required", "--max-turns", "2"]
    result = subprocess.run(
        [*run, "--max-tokens", "96", "--url", addresses["url"], "--json"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert lines[0]["event"] == "program.queued"
    assert [line["event"] for line in lines if "event" in line].count("turn.finished") == 2
    assert (lines[-1]["state"], lines[-1]["turns"]) == ("completed", 2)

    descendants = psutil.Process(process.pid).children(recursive=True)
    assert len(descendants) > 5, "Ray, the replicas, the engine and the store are below it"
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    # What outlived its parent is a zombie for as long as init takes to notice.
    wait_for(lambda: not any(one.is_running() for one in descendants), what="every descendant is gone")
    assert process.stdout is not None
    assert process.stdout.read() == "", "nothing but the addresses goes to stdout"
