"""An execution as the text that a model is given: what was printed, then what it should know about how it ended. Pure."""

from __future__ import annotations

from agent_program.tool_events import ToolOutcome
from tool_runtime.sandbox import Ending, Execution

_OUTCOMES = {
    Ending.TIMED_OUT: ToolOutcome.TIMEOUT,
    Ending.CANCELLED: ToolOutcome.CANCELLED,
    Ending.LIMIT: ToolOutcome.ERROR,
    Ending.INTERRUPTED: ToolOutcome.INTERRUPTED,
}
_STATE_LOST = {
    "shell": "The shell session is gone; the next call starts a new one: variables, functions and background jobs are lost.",
    "python": "The Python session is gone; the next call starts a new one: variables and imports are lost.",
}


def outcome_of(execution: Execution) -> ToolOutcome:
    """How the call ended, for the history and the scheduler."""
    if execution.ending is Ending.FINISHED:
        return ToolOutcome.OK if execution.exit_code == 0 else ToolOutcome.ERROR
    return _OUTCOMES[execution.ending]


def text_of(
    tool: str, execution: Execution, *, timeout_s: float, state_was_lost: bool = False, files_were_lost: bool = False
) -> str:
    """What the model reads. `state_was_lost`: the session's state was lost before this call, and it has not been told; so for
    `files_were_lost`, which is about what was written last."""
    parts = [execution.stdout.text.rstrip("\n")]
    if execution.stderr.text.strip():
        parts.append("[stderr]\n" + execution.stderr.text.rstrip("\n"))
    notes = _notes(tool, execution, timeout_s)
    if state_was_lost and tool in _STATE_LOST:
        kept = "" if files_were_lost else " Files were kept."
        notes.insert(0, f"This {tool} session is new: the earlier one and its variables were lost.{kept}")
    if files_were_lost:
        notes.insert(0, "The sandbox was lost, and with it the files that were written last: look at what is there.")
    if execution.session_lost and tool in _STATE_LOST:
        notes.append(_STATE_LOST[tool])
    parts += [f"[{note}]" for note in notes]
    return "\n".join(part for part in parts if part) or "[no output]"


def _notes(tool: str, execution: Execution, timeout_s: float) -> list[str]:
    if execution.ending is Ending.TIMED_OUT:
        return [f"Stopped after {timeout_s:g} s, the limit of this call. Everything it had started was killed."]
    if execution.ending is Ending.CANCELLED:
        return ["Cancelled. Everything it had started was killed."]
    if execution.ending is Ending.LIMIT:
        return [f"Stopped: {execution.reason}. Everything it had started was killed."]
    if execution.ending is Ending.INTERRUPTED:
        return [f"Interrupted: {execution.reason}. It may have done some of its work."]
    if execution.exit_code and (tool in _STATE_LOST or execution.exit_code > 1):
        return [f"exit code {execution.exit_code}"]
    return []
