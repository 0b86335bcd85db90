import itertools

import pytest

from agent_program.errors import IllegalTransition
from agent_program.states import FINAL_STATES, TRANSITIONS, ProgramEvent, ProgramState, next_state

ALL_PAIRS = list(itertools.product(ProgramState, ProgramEvent))
LEGAL = [(state, event) for state, event in ALL_PAIRS if event in TRANSITIONS[state]]
ILLEGAL = [pair for pair in ALL_PAIRS if pair not in LEGAL]


@pytest.mark.parametrize(("state", "event"), ILLEGAL)
def test_an_event_the_table_does_not_list_raises_and_names_both(state: ProgramState, event: ProgramEvent) -> None:
    with pytest.raises(IllegalTransition, match=f"{state.value} cannot take {event.value}"):
        next_state(state, event)


def test_every_state_has_a_row() -> None:
    assert set(TRANSITIONS) == set(ProgramState)


@pytest.mark.parametrize("state", sorted(FINAL_STATES))
def test_a_final_state_has_no_way_out(state: ProgramState) -> None:
    assert state.is_final
    assert TRANSITIONS[state] == {}


@pytest.mark.parametrize("state", sorted(set(ProgramState) - FINAL_STATES))
def test_a_live_program_can_always_be_cancelled_and_can_always_fail(state: ProgramState) -> None:
    assert next_state(state, ProgramEvent.CANCELLED) is ProgramState.CANCELLED
    assert next_state(state, ProgramEvent.ERRORED) is ProgramState.FAILED


def test_every_state_can_be_reached_from_queued() -> None:
    reached, frontier = {ProgramState.QUEUED}, [ProgramState.QUEUED]
    while frontier:
        for target in TRANSITIONS[frontier.pop()].values():
            if target not in reached:
                reached.add(target)
                frontier.append(target)
    assert reached == set(ProgramState)


def test_a_program_that_a_dead_runner_held_can_be_claimed_where_it_stands() -> None:
    for state in (ProgramState.RUNNING, ProgramState.WAITING_TOOL):
        assert next_state(state, ProgramEvent.CLAIMED) is state
