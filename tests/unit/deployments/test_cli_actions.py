"""`continuum programs outputs`, `approve` and `deny`: what a waiting program is answered from a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from deployments.cli import app
from deployments.cli_support import ExitCode
from support.tiny_platform import TinyPlatform, program_object, running


def call(call_id: str, kind: str, tool: str) -> dict[str, Any]:
    return {"call_id": call_id, "kind": kind, "tool": tool, "arguments": '{"city": "Rome"}'}


@pytest.fixture
def platform() -> TinyPlatform:
    asked = [call("w1", "output", "weather"), call("s1", "approval", "shell"), call("s2", "approval", "shell")]
    action = {"expires_at": 1_700_000_600.0, "calls": asked}
    waiting = program_object("p", state="requires_action", required_action=action, finished_at=None)
    return TinyPlatform(programs={"p": waiting, "idle": program_object("idle", required_action=None)})


@pytest.fixture
def url(platform: TinyPlatform) -> Iterator[str]:
    with running(platform) as address:
        yield address


def programs(url: str, *arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["programs", *arguments, "--url", url], input=stdin)


def test_what_a_program_waits_for_is_listed(url: str) -> None:
    for command in (["outputs", "p"], ["show", "p"]):
        shown = programs(url, *command).stdout
        assert "w1  output of weather" in shown
        assert "s1  consent to shell" in shown


def test_outputs_come_from_the_command_line_a_file_or_standard_input(
    platform: TinyPlatform, url: str, tmp_path: Path
) -> None:
    (tmp_path / "out.txt").write_text("from a file")
    file = f"@{tmp_path / 'out.txt'}"
    calls = ["--call", "a", "--output", "text", "--call", "b", "--output", file, "--call", "c", "--output", "-"]
    assert programs(url, "outputs", "p", *calls, "--error", stdin="typed").exit_code == ExitCode.OK
    assert platform.answered == [
        {
            "tool_outputs": [
                {"call_id": call_id, "output": text, "is_error": True}
                for call_id, text in [("a", "text"), ("b", "from a file"), ("c", "typed")]
            ]
        }
    ]


@pytest.mark.parametrize("arguments", [["--call", "a"], ["--output", "x"], ["--call", "a", "--output", "@/nowhere/x"]])
def test_an_output_without_its_call_sends_nothing(platform: TinyPlatform, url: str, arguments: list[str]) -> None:
    assert programs(url, "outputs", "p", *arguments).exit_code == ExitCode.USAGE
    assert platform.answered == []


def test_all_that_need_consent_are_approved_or_those_that_are_named(platform: TinyPlatform, url: str) -> None:
    programs(url, "approve", "p")
    programs(url, "deny", "p", "--call", "s2", "--reason", "no")
    assert [body["tool_outputs"] for body in platform.answered] == [
        [{"call_id": "s1", "approve": True}, {"call_id": "s2", "approve": True}],
        [{"call_id": "s2", "approve": False, "reason": "no"}],
    ]


def test_where_nobody_is_asked_there_is_nothing_to_approve(platform: TinyPlatform, url: str) -> None:
    result = programs(url, "approve", "idle", "--json")
    assert result.exit_code == ExitCode.FAILED
    assert "waits for nobody's consent" in json.loads(result.stderr)["error"]["message"]


def test_tools_of_the_clients_own_come_from_a_file(platform: TinyPlatform, url: str, tmp_path: Path) -> None:
    entries = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": {}}}]
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(entries))
    run = ["run", "x", "--tool", "shell", "--tools-file", str(file), "--detach", "--url", url]
    assert CliRunner().invoke(app, run).exit_code == ExitCode.OK
    assert platform.submitted[-1]["tools"] == ["shell", *entries]
    file.write_text("{}")
    assert CliRunner().invoke(app, run).exit_code == ExitCode.USAGE
