"""The export of finished programs: what analysis and replay need, and nothing that was said."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from agent_program.clock import ManualClock
from deployments.cli import app
from deployments.cli_support import ExitCode
from deployments.journal_export import FORMAT, export_program
from deployments.memory_clients import ScriptedEngine, ScriptedTools, answer, tool_calls
from deployments.ports import ReplicaLost
from support.programs import Bench, spec
from support.tiny_platform import TinyPlatform, program_object, running


class Ticking(ManualClock):
    """A clock on which every look takes a second, so that no two steps have the same time."""

    def wall_s(self) -> float:
        self.advance(1)
        return super().wall_s()


async def exported(bench: Bench) -> dict[str, Any]:
    stored = await bench.journal.load(bench.program.id)
    return export_program({**stored.record.to_wire(), "journal": [step.to_wire() for step in stored.steps]})


async def test_a_program_is_its_sizes_times_and_tools() -> None:
    calls = tool_calls(
        ("c1", "shell", {"command": "pytest -q secret"}), ("c2", "read_file", {"path": "x"}), prompt_tokens=100
    )
    bench = Bench(
        spec(),
        engine=ScriptedEngine([ReplicaLost("gone"), calls, answer("secret", prompt_tokens=180, cached_tokens=96)]),
        tools=ScriptedTools({"shell": ["secret"], "read_file": ["secret"]}),
        clock=Ticking(),
    )
    await bench.run()
    record = await exported(bench)
    assert "secret" not in json.dumps(record)
    assert (record["format"], record["state"], record["max_turns"]) == (FORMAT, "completed", 8)
    first, second = record["turns"]
    assert (first["prompt_tokens"], first["attempts"], first["replica"]) == (100, 2, "replica-1")
    assert (second["prompt_tokens"], second["cached_tokens"], second["tools"]) == (180, 96, [])
    assert (second["tool_key"], second["tool_seconds"]) == (None, None)
    assert sorted(tool["tool_key"] for tool in first["tools"]) == ["pytest", "read_file"]
    assert first["tool_key"] == "pytest+read_file"
    order = [record["created_at"], first["started_at"], first["finished_at"], first["tools"][0]["started_at"]]
    order += [first["tools"][0]["finished_at"], second["started_at"], second["finished_at"], record["finished_at"]]
    assert order == sorted(order)
    # The second attempt's start, not the first's.
    starts = [step.at for step in await bench.journal.steps(bench.program.id) if step.kind == "turn.started"]
    assert first["started_at"] == starts[1]


async def test_a_program_without_a_turn_is_exported_too() -> None:
    bench = Bench(spec(), engine=ScriptedEngine())
    await bench.submit()
    await bench.journal.request_cancel(bench.program.id)
    record = await exported(bench)
    assert (record["state"], record["started_at"], record["turns"]) == ("cancelled", None, [])


def test_the_command_prints_one_line_a_finished_program_oldest_first() -> None:
    programs = {name: program_object(name, journal=[]) for name in ("new", "old")}
    going = {"going": program_object("going", state="running", journal=[])}
    with running(TinyPlatform(programs={**going, **programs})) as url:
        lines = CliRunner().invoke(app, ["programs", "export", "--url", url]).stdout.splitlines()
        newest = CliRunner().invoke(app, ["programs", "export", "--limit", "1", "--url", url]).stdout.splitlines()
        unended = CliRunner().invoke(app, ["programs", "export", "--state", "running", "--url", url])
    assert [json.loads(line)["id"] for line in lines] == ["old", "new"]
    assert [json.loads(line)["id"] for line in newest] == ["new"]
    assert unended.exit_code == ExitCode.USAGE
