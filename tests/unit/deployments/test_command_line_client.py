"""`continuum run`, `programs` and `tools` against a server over HTTP: what they send, print and exit with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from deployments.cli import app
from deployments.cli_support import ExitCode
from support.tiny_platform import TinyPlatform, program_object, running

TURN = {
    "turn": 1,
    "message": {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "shell"}}]},
    "prompt_tokens": 200,
    "cached_tokens": 150,
    "output_tokens": 20,
    "seconds": 0.5,
}
EVENTS = [
    ("1", "program.queued", {"model": "small", "tools": ["shell"]}),
    ("2", "turn.finished", TURN),
    ("3", "tool.finished", {"tool": "shell", "outcome": "ok", "output": "[red]hi[/red]\nthere"}),
    ("4", "program.ended", {"state": "completed", "end_reason": "answer", "error": None}),
]


@dataclass
class Terminal:
    """Runs commands against one platform."""

    platform: TinyPlatform
    url: str

    def __call__(self, *arguments: str, stdin: str | None = None) -> Result:
        return CliRunner().invoke(app, [*arguments, "--url", self.url], input=stdin)

    def json(self, *arguments: str) -> Any:
        result = self(*arguments, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    platform = TinyPlatform(events={"prog_1": EVENTS})
    with running(platform) as url:
        yield Terminal(platform, url)


def test_run_sends_what_was_given_and_nothing_else(terminal: Terminal) -> None:
    result = terminal("run", "look around", "--tool", "shell", "--tool", "python", "--max-turns", "3", "--seed", "7")
    assert result.exit_code == ExitCode.OK, result.output
    assert terminal.platform.submitted == [
        {"input": "look around", "tools": ["shell", "python"], "limits": {"max_turns": 3}, "sampling": {"seed": 7}}
    ]


def test_run_reads_a_task_from_standard_input(terminal: Terminal) -> None:
    terminal("run", "-", stdin="a long task\n")
    assert terminal.platform.submitted == [{"input": "a long task\n"}]


def test_run_follows_the_program_to_its_end(terminal: Terminal) -> None:
    result = terminal("run", "look around")
    assert "turn 1: 200 prompt tokens, 150 from cached KV, 20 output, 0.50 s; calls shell" in result.stdout
    assert "completed (answer)" in result.stdout


def test_what_models_and_tools_say_is_printed_as_it_is(terminal: Terminal) -> None:
    result = terminal("run", "look around")
    assert "[red]hi[/red] there" in result.stdout
    assert "done [bold]not markup[/bold]" in result.stdout


def test_run_as_json_prints_each_event_and_then_the_program(terminal: Terminal) -> None:
    result = terminal("run", "look around", "--json")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line.get("event") for line in lines] == [*(name for _, name, _ in EVENTS), None]
    assert lines[-1]["state"] == "completed"


def test_run_detached_prints_the_id_only(terminal: Terminal) -> None:
    result = terminal("run", "look around", "--detach")
    assert result.stdout == "prog_1\n"
    assert terminal.platform.last_event_ids == []


@pytest.mark.parametrize("state", ["failed", "cancelled", "expired"])
def test_a_program_that_did_not_complete_is_exit_code_1(terminal: Terminal, state: str) -> None:
    terminal.platform.programs["prog_1"] = program_object(
        "prog_1", state=state, error={"code": "turn_failed", "message": "the engine said no"}
    )
    result = terminal("run", "look around")
    assert result.exit_code == ExitCode.FAILED
    assert "the engine said no" in result.stdout


def test_where_no_server_is_the_exit_code_is_3() -> None:
    result = CliRunner().invoke(app, ["programs", "ls", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == ExitCode.UNREACHABLE
    assert "continuum serve" in result.stderr


def test_a_refusal_is_exit_code_4_with_the_servers_words(terminal: Terminal) -> None:
    result = terminal("programs", "show", "nobody")
    assert result.exit_code == ExitCode.REFUSED
    assert "no program nobody (program_not_found 404)" in result.stderr


def test_overload_says_when_to_try_again(terminal: Terminal) -> None:
    terminal.platform.refusal = (429, {"retry-after": "7"}, '{"error": {"message": "busy", "code": "overloaded"}}')
    result = terminal("run", "look around")
    assert result.exit_code == ExitCode.REFUSED
    assert "Try again in 7 s." in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["run"],
        ["run", "task", "--max-turns", "0"],
        ["run", "task", "--max-turns", "many"],
        ["programs", "ls", "--state", "sleeping"],
        ["programs", "nonsense"],
        ["programs", "ls", "--url", "localhost:8000"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_exit_code_2_and_sends_nothing(terminal: Terminal, arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments, env={"CONTINUUM_URL": terminal.url})
    assert result.exit_code == ExitCode.USAGE
    assert terminal.platform.authorizations == []


def test_the_address_and_the_key_come_from_the_environment_too(terminal: Terminal) -> None:
    environment = {"CONTINUUM_URL": terminal.url, "CONTINUUM_API_KEY": "k-1"}
    result = CliRunner().invoke(app, ["programs", "ls"], env=environment)
    assert result.exit_code == ExitCode.OK
    assert terminal.platform.authorizations == ["Bearer k-1"]


def test_programs_are_listed(terminal: Terminal) -> None:
    terminal.platform.programs = {"a": program_object("a"), "b": program_object("b", state="failed")}
    result = terminal("programs", "ls")
    assert "75%" in result.stdout  # 300 of 400 prompt tokens
    assert [one["id"] for one in terminal.json("programs", "ls", "--state", "failed")["data"]] == ["b"]


def test_a_full_page_says_how_to_go_on(terminal: Terminal) -> None:
    terminal.platform.programs = {name: program_object(name) for name in "abc"}
    assert "--after b" in terminal("programs", "ls", "--limit", "2").stderr


def test_a_program_is_shown(terminal: Terminal) -> None:
    terminal.platform.programs["a"] = program_object("a")
    assert "400 (300 from cached KV)" in terminal("programs", "show", "a").stdout
    assert terminal.json("programs", "show", "a") == program_object("a")


def test_an_explanation_is_an_account_for_people_and_json_for_programs(terminal: Terminal) -> None:
    terminal.platform.programs["a"] = program_object("a")
    assert "no replica knows it" in terminal("programs", "show", "a", "--explain").stdout
    assert terminal.json("programs", "show", "a", "--explain")["object"] == "program.explanation"


def test_a_program_is_cancelled(terminal: Terminal) -> None:
    terminal.platform.programs["a"] = program_object("a", state="running")
    assert terminal("programs", "cancel", "a").exit_code == ExitCode.OK
    assert terminal.platform.cancelled == ["a"]


def test_events_can_begin_after_one(terminal: Terminal) -> None:
    terminal.platform.programs["prog_1"] = program_object("prog_1")
    result = terminal("programs", "events", "prog_1", "--after", "3", "--json")
    assert [json.loads(line).get("event") for line in result.stdout.splitlines()] == ["program.ended", None]


def test_tools_and_their_latency_are_listed(terminal: Terminal) -> None:
    assert "Run a command." in terminal("tools", "ls").stdout
    assert "0.50 s" in terminal("tools", "latency").stdout
    assert terminal.json("tools", "latency", "shell")["count"] == 3


def test_version(terminal: Terminal) -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == ExitCode.OK
    assert result.stdout.strip()[0].isdigit()
