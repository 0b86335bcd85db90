"""The command line starts at once, and tells what it can do."""

from __future__ import annotations

import subprocess
import sys

import pytest

COMMANDS = [
    [],
    ["serve"],
    ["run"],
    ["programs"],
    ["programs", "ls"],
    ["programs", "show"],
    ["programs", "cancel"],
    ["programs", "events"],
    ["programs", "outputs"],
    ["programs", "approve"],
    ["programs", "deny"],
    ["programs", "export"],
    ["tools"],
    ["tools", "ls"],
    ["tools", "latency"],
    ["replay"],
    ["model"],
    ["model", "prepare"],
    ["doctor"],
    ["keys"],
    ["keys", "new"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help(command: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "deployments.cli", *command, "--help"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "Usage: " in result.stdout


def test_a_client_command_imports_no_engine() -> None:
    code = "import sys, deployments.cli; print(sorted({'ray', 'vllm', 'torch'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
