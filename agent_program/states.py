"""The life of a program as a table. Everything that decides whether a step is legal is in this file.

    queued ─► running ◄─► waiting_tool          running ◄─► requires_action
       │         │             │                                │
       └─────────┴─────────────┴────────────────────────────────┴─► completed | failed | cancelled | expired

Two rules. An event that the table does not list for a state raises and changes nothing. A final state has no way out.
"""

from __future__ import annotations

from enum import StrEnum

from agent_program.errors import IllegalTransition


class ProgramState(StrEnum):
    """Where a program is."""

    #: Accepted and journaled; no runner has it yet.
    QUEUED = "queued"
    #: A turn is queued or running on an engine replica.
    RUNNING = "running"
    #: Its tool calls are queued or running.
    WAITING_TOOL = "waiting_tool"
    #: Waits for outputs or an approval from the client.
    REQUIRES_ACTION = "requires_action"
    #: Ended by its own answer, or by reaching a limit that the submitter set (`end_reason` says which).
    COMPLETED = "completed"
    #: Ended by an error that is not the program's to handle.
    FAILED = "failed"
    CANCELLED = "cancelled"
    #: Ended because an action that it required was not taken in time.
    EXPIRED = "expired"

    @property
    def is_final(self) -> bool:
        return self in FINAL_STATES


class ProgramEvent(StrEnum):
    """What happens to a program."""

    CLAIMED = "claimed"
    TURN_STARTED = "turn_started"
    TOOLS_STARTED = "tools_started"
    ACTION_REQUIRED = "action_required"
    ACTION_TAKEN = "action_taken"
    FINISHED = "finished"
    ERRORED = "errored"
    CANCELLED = "cancelled"
    DEADLINE_PASSED = "deadline_passed"


FINAL_STATES = frozenset({ProgramState.COMPLETED, ProgramState.FAILED, ProgramState.CANCELLED, ProgramState.EXPIRED})

_S, _E = ProgramState, ProgramEvent
_ENDINGS = {_E.FINISHED: _S.COMPLETED, _E.ERRORED: _S.FAILED, _E.CANCELLED: _S.CANCELLED}

#: state → event → next state. CLAIMED is also legal while running or waiting: another runner resumes after a death, or takes
#: a program whose wait for an action is over.
TRANSITIONS: dict[ProgramState, dict[ProgramEvent, ProgramState]] = {
    _S.QUEUED: {_E.CLAIMED: _S.RUNNING, _E.ERRORED: _S.FAILED, _E.CANCELLED: _S.CANCELLED},
    _S.RUNNING: {
        _E.CLAIMED: _S.RUNNING,
        _E.TURN_STARTED: _S.RUNNING,
        _E.TOOLS_STARTED: _S.WAITING_TOOL,
        _E.ACTION_REQUIRED: _S.REQUIRES_ACTION,
        **_ENDINGS,
    },
    _S.WAITING_TOOL: {
        _E.CLAIMED: _S.WAITING_TOOL,
        _E.TURN_STARTED: _S.RUNNING,
        _E.ACTION_REQUIRED: _S.REQUIRES_ACTION,
        **_ENDINGS,
    },
    _S.REQUIRES_ACTION: {
        _E.CLAIMED: _S.REQUIRES_ACTION,
        _E.ACTION_TAKEN: _S.RUNNING,
        _E.DEADLINE_PASSED: _S.EXPIRED,
        **_ENDINGS,
    },
    **{state: {} for state in FINAL_STATES},
}


def next_state(state: ProgramState, event: ProgramEvent) -> ProgramState:
    """Where `event` takes a program that is in `state`.

    Raises:
        IllegalTransition: the table does not list the event for the state.
    """
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise IllegalTransition(f"a program that is {state.value} cannot take {event.value}") from None
