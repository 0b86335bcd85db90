"""What the demo shows of program objects."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from deployments.demo import TASKS, failures, run_demo
from deployments.demo_view import ProgressView, progress_line, summary_table, totals, turn_of
from support.tiny_platform import TinyPlatform, program_object, running


def printed(value: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(value)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"state": "queued", "turns": 0, "finished_at": None}, "0/4"),
        ({"state": "running", "turns": 0, "finished_at": None}, "1/4"),
        ({"state": "waiting_tool", "turns": 1, "current_tool": "shell", "finished_at": None}, "1/4"),
        ({"state": "running", "turns": 1, "finished_at": None}, "2/4"),
        ({"state": "running", "turns": 4, "finished_at": None}, "4/4"),
        ({"state": "completed", "turns": 4}, "4/4"),
    ],
)
def test_the_turn_that_a_program_is_in(changes: dict[str, object], shown: str) -> None:
    assert turn_of(program_object("p", **changes)) == shown


def test_a_line_names_the_program_by_its_submitter() -> None:
    program = program_object("p", metadata={"name": "primes"}, state="waiting_tool", current_tool="python")
    line = progress_line(program)
    assert line.startswith("primes ")
    assert "waiting_tool" in line
    assert "75% from cached KV" in line  # 300 of 400


def test_without_a_terminal_a_line_is_printed_when_it_changes() -> None:
    console = Console(file=io.StringIO(), width=200)
    with ProgressView(console) as view:
        for turns in (1, 1, 2):
            view.show([program_object("p", state="running", turns=turns, finished_at=None)])
    assert console.file.getvalue().count("\n") == 2  # type: ignore[attr-defined]


def test_the_summary_has_what_each_program_cost() -> None:
    text = printed(summary_table([program_object("p", leases={"reused": 2, "expired": 1})]))
    assert "completed answer" in text
    assert "expired 1, reused 2" in text
    assert "8.00 s" in text  # 1_700_000_008 − 1_700_000_000


def test_the_totals_add_up() -> None:
    said = totals([program_object("p"), program_object("q")])
    assert "2 programs took 4 turns. Of 800 prompt tokens, 600 (75%)" in said


def test_only_programs_that_did_not_complete_are_failures() -> None:
    error = {"code": "turn_failed", "message": "the engine said no"}
    failed = program_object("q", state="failed", end_reason="turn_failed", error=error)
    assert failures([program_object("p"), failed]) == ["q: failed (turn_failed) the engine said no"]


def test_the_tasks_are_submitted_together_and_followed_to_their_ends() -> None:
    platform = TinyPlatform()
    with running(platform) as url:
        finished = run_demo(url, TASKS, screen=Console(file=io.StringIO()))
    assert len(finished) == len(TASKS) >= 6
    assert [body["metadata"]["name"] for body in platform.submitted] == [task.name for task in TASKS]
    assert {body["tool_choice"] for body in platform.submitted} == {"required"}
