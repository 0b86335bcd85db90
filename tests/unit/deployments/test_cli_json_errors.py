"""With `--json` an error is one JSON object on stderr; stdout holds results only, and exit codes are what they always are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from deployments.cli import app
from deployments.cli_support import ExitCode
from support.tiny_platform import TinyPlatform, program_object, running


@pytest.fixture
def platform() -> TinyPlatform:
    return TinyPlatform()


@pytest.fixture
def url(platform: TinyPlatform) -> Iterator[str]:
    with running(platform) as address:
        yield address


def error_of(result: Result) -> dict[str, Any]:
    """The error that a command ended with; nothing else may be on either stream."""
    assert result.stdout == ""
    document = json.loads(result.stderr)
    assert document["exit_code"] == result.exit_code
    return document["error"]


def test_a_refusal_carries_the_servers_code_and_status(url: str) -> None:
    result = CliRunner().invoke(app, ["programs", "show", "nobody", "--json", "--url", url])
    assert result.exit_code == ExitCode.REFUSED
    assert error_of(result) == {"message": "no program nobody", "code": "program_not_found", "status": 404}


def test_overload_says_when_to_try_again(platform: TinyPlatform, url: str) -> None:
    platform.refusal = (429, {"retry-after": "7"}, '{"error": {"message": "busy", "code": "overloaded"}}')
    error = error_of(CliRunner().invoke(app, ["run", "x", "--json", "--url", url]))
    assert error == {"message": "busy", "code": "overloaded", "status": 429, "retry_after_s": 7.0}


def test_no_answer_is_said_too() -> None:
    result = CliRunner().invoke(app, ["programs", "ls", "--json", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == ExitCode.UNREACHABLE
    assert error_of(result)["code"] == "unreachable"


@pytest.mark.parametrize(
    "arguments",
    [
        ["programs", "show", "--json"],
        ["programs", "ls", "--state", "sleeping", "--json"],
        ["run", "task", "--max-turns", "0", "--json"],
        ["nonsense", "--json"],
        ["programs", "ls", "--url", "localhost:8000", "--json"],
        ["serve", "--preset", "fastest", "--json"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_a_json_error_with_exit_code_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == ExitCode.USAGE
    assert error_of(result)["code"] == "usage"


def test_what_succeeds_is_not_touched(platform: TinyPlatform, url: str) -> None:
    platform.programs["a"] = program_object("a")
    result = CliRunner().invoke(app, ["programs", "show", "a", "--json", "--url", url])
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout)["id"] == "a"
    assert CliRunner().invoke(app, ["programs", "show", "--help", "--json"]).exit_code == 0


def test_a_program_that_fails_is_a_result_and_no_error(platform: TinyPlatform, url: str) -> None:
    platform.events["prog_1"] = [
        ("1", "program.ended", {"state": "failed", "end_reason": "turn_failed", "error": None})
    ]
    platform.programs["prog_1"] = program_object("prog_1", state="failed")
    result = CliRunner().invoke(app, ["run", "x", "--json", "--url", url])
    assert (result.exit_code, result.stderr) == (ExitCode.FAILED, "")
    assert [json.loads(line).get("state") for line in result.stdout.splitlines()] == [None, "failed"]
