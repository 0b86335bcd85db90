"""What a model reads of an execution."""

from __future__ import annotations

import pytest

from agent_program.tool_events import ToolOutcome
from tool_runtime.rendering import outcome_of, text_of
from tool_runtime.sandbox import BoundedText, Ending, Execution


def execution(
    ending: Ending = Ending.FINISHED,
    *,
    out: str = "",
    err: str = "",
    code: int | None = 0,
    lost: bool = False,
    reason: str = "",
) -> Execution:
    return Execution(
        ending=ending,
        exit_code=code,
        stdout=BoundedText(text=out),
        stderr=BoundedText(text=err),
        duration_s=1.0,
        session_lost=lost,
        reason=reason,
    )


@pytest.mark.parametrize(
    ("ended", "outcome"),
    [
        (execution(), ToolOutcome.OK),
        (execution(code=1), ToolOutcome.ERROR),
        (execution(code=None), ToolOutcome.ERROR),
        (execution(Ending.TIMED_OUT), ToolOutcome.TIMEOUT),
        (execution(Ending.CANCELLED), ToolOutcome.CANCELLED),
        (execution(Ending.INTERRUPTED), ToolOutcome.INTERRUPTED),
        (execution(Ending.LIMIT), ToolOutcome.ERROR),
    ],
)
def test_each_ending_is_one_outcome(ended: Execution, outcome: ToolOutcome) -> None:
    assert outcome_of(ended) is outcome


def test_plain_output_stays_plain() -> None:
    assert text_of("shell", execution(out="a\nb\n\n"), timeout_s=1) == "a\nb"


def test_no_output_is_said_so_that_an_empty_answer_is_not_mistaken_for_none() -> None:
    assert text_of("shell", execution(), timeout_s=1) == "[no output]"


def test_errors_and_the_exit_code_follow_the_output() -> None:
    assert text_of("shell", execution(out="a\n", err="b\n", code=2), timeout_s=1) == "a\n[stderr]\nb\n[exit code 2]"


def test_a_file_tools_error_is_its_text_alone() -> None:
    assert text_of("read_file", execution(out="No such file", code=1), timeout_s=1) == "No such file"


def test_a_timeout_keeps_the_output_and_tells_the_limit_and_the_loss() -> None:
    text = text_of("shell", execution(Ending.TIMED_OUT, out="so far", lost=True, code=130), timeout_s=2.5)
    assert text.startswith("so far\n[Stopped after 2.5 s, the limit of this call.")
    assert "The shell session is gone" in text
    assert "exit code" not in text


def test_a_limit_and_an_interruption_tell_their_reason() -> None:
    assert "it printed too much" in text_of("shell", execution(Ending.LIMIT, reason="it printed too much"), timeout_s=1)
    assert "killed by x" in text_of("python", execution(Ending.INTERRUPTED, reason="killed by x"), timeout_s=1)


def test_a_session_that_was_lost_between_calls_is_told_of_before_anything_else() -> None:
    text = text_of("python", execution(out="1", code=3), timeout_s=1, state_was_lost=True)
    assert text.index("This python session is new") < text.index("exit code 3")
    assert "session is new" not in text_of("read_file", execution(out="1"), timeout_s=1, state_was_lost=True)
