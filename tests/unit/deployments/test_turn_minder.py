"""A turn that is watched: deadlines, and what routers hear of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from agent_program.errors import EngineUnavailable
from agent_program.ids import ProgramId, ReplicaId
from agent_program.turn import TurnHints
from continuum_router.exchange import Exchange, Note, TurnLost, TurnReplied
from deployments.ports import ReplicaLost
from deployments.turn_minder import TurnMinder, TurnPatience, TurnReport, TurnTaken, turn_outcome
from engine_replicas.turn_stream import TurnClosed, TurnOpened
from support.virtual_time import LoopClock, run_virtually

R = ReplicaId("r1")
P = ProgramId("p")
HINTS = TurnHints(program_id=P)
TAKEN = TurnTaken(replica_id=R)
STREAM = TurnOpened(status=200, is_stream=True, replica_id=R)
WHOLE = TurnOpened(status=200, is_stream=False, replica_id=R)
REPORT = TurnReport(report={"running": 1})


def closed(lease: dict[str, Any] | None = None) -> TurnClosed:
    return TurnClosed(
        prompt_tokens=10, cached_tokens=0, output_tokens=2, tool_keys=(), finish_reason="stop", lease=lease
    )


async def script(*items: Any) -> AsyncGenerator[Any, None]:
    """Items; a number is waited for, an exception raised."""
    for item in items:
        if isinstance(item, float):
            await asyncio.sleep(item)
        elif isinstance(item, Exception):
            raise item
        else:
            yield item


def watched(
    *items: Any, hints: TurnHints | None = HINTS, **patience: float
) -> tuple[list[Any], list[Note], Exception | None]:
    """What came through, what routers heard, and what was raised."""

    async def run() -> tuple[list[Any], list[Note], Exception | None]:
        told: list[Note] = []
        clock = LoopClock(asyncio.get_running_loop())
        minder = TurnMinder(patience=TurnPatience(**patience), clock=clock, tell=told.append)
        through = []
        try:
            async for item in minder.watch(script(*items), hints):
                through.append(item)
        except (ReplicaLost, EngineUnavailable) as error:
            return through, told, error
        return through, told, None

    return run_virtually(run())


def test_a_turn_comes_through_without_what_is_the_routers() -> None:
    lease = {"ttl_s": 5.0, "blocks": 3}
    through, told, error = watched(TAKEN, WHOLE, "{}", closed(lease), REPORT)
    assert (through, error) == ([WHOLE, "{}", closed(lease)], None)
    assert told == [TurnReplied(program_id=P, replica_id=R, report={"running": 1}, kept_s=5.0, context_tokens=12)]


@pytest.mark.parametrize("lease", [None, {"ttl_s": 0.0, "blocks": 3}, {"ttl_s": 5.0, "blocks": 0}])
def test_a_lease_that_keeps_nothing_is_told_as_none(lease: dict[str, Any] | None) -> None:
    _, (note,), _ = watched(TAKEN, WHOLE, "{}", closed(lease), REPORT)
    assert isinstance(note, TurnReplied)
    assert note.kept_s == 0.0


def test_a_turn_of_no_program_tells_nothing_when_it_comes_back() -> None:
    _, told, _ = watched(TAKEN, WHOLE, "{}", closed(), REPORT, hints=None)
    assert told == []


@pytest.mark.parametrize("loss", [ReplicaLost("killed"), EngineUnavailable("its engine died")])
def test_a_lost_turn_is_told_with_the_replica_that_had_taken_it(loss: Exception) -> None:
    through, told, error = watched(TAKEN, STREAM, "data", loss)
    assert through == [STREAM, "data"]
    assert told == [TurnLost(program_id=P, replica_id=R)]
    assert error is loss


def test_a_turn_that_nobody_took_is_told_without_a_replica() -> None:
    _, told, _ = watched(ReplicaLost("killed"))
    assert told == [TurnLost(program_id=P, replica_id=None)]


def test_a_turn_that_ends_without_closing_is_lost() -> None:
    _, told, error = watched(TAKEN, WHOLE, "{}")
    assert isinstance(error, ReplicaLost)
    assert told == [TurnLost(program_id=P, replica_id=R)]


def test_a_loss_after_the_turn_has_closed_is_none_of_the_replicas() -> None:
    _, told, _ = watched(TAKEN, WHOLE, "{}", closed(), ReplicaLost("late"))
    assert told == []


def test_a_turn_is_given_up_at_its_deadline_however_it_trickles() -> None:
    through, told, error = watched(TAKEN, STREAM, *[4.0, "data"] * 10, closed(), turn_s=10.0)
    assert through == [STREAM, "data", "data"]
    assert isinstance(error, ReplicaLost)
    assert told == [TurnLost(program_id=P, replica_id=R)]


def test_silence_counts_from_the_first_piece_on_so_that_queueing_is_no_silence() -> None:
    through, _, error = watched(TAKEN, 60.0, STREAM, 4.0, "data", closed(), silence_s=5.0)
    assert (len(through), error) == (3, None)
    through, _, error = watched(TAKEN, STREAM, "data", 6.0, "data", silence_s=5.0)
    assert through == [STREAM, "data"]
    assert isinstance(error, ReplicaLost)


def test_a_whole_answer_may_be_silent_until_it_comes() -> None:
    _, _, error = watched(TAKEN, WHOLE, 60.0, "{}", closed(), silence_s=5.0)
    assert error is None


def test_an_outcome_is_put_together_from_its_pieces_and_an_error_is_raised_as_one() -> None:
    document = ['{"choices": [{"message": {"role": "assistant"}, ', '"finish_reason": "stop"}]}']

    async def outcome(*items: Any) -> Any:
        return await turn_outcome(script(*items), lambda status, body: EngineUnavailable(f"{status} {body['x']}"))

    whole = run_virtually(outcome(WHOLE, *document, closed()))
    assert (whole.message, whole.finish_reason, whole.replica) == ({"role": "assistant"}, "stop", R)
    refused = TurnOpened(status=503, is_stream=False, replica_id=R)
    with pytest.raises(EngineUnavailable, match="503 y"):
        run_virtually(outcome(refused, '{"x": "y"}', closed()))
    with pytest.raises(ReplicaLost):
        run_virtually(outcome(WHOLE, *document))


# The exchange


class Heard:
    def __init__(self) -> None:
        self.notes: list[Note] = []

    def hear(self, note: Note) -> None:
        self.notes.append(note)


def test_notes_reach_the_routers_of_their_namespace_and_keep_none_alive() -> None:
    exchange, engine, tools = Exchange(), Heard(), Heard()
    exchange.listen("engine", engine)
    exchange.listen("tools", tools)
    note = TurnLost(program_id=P, replica_id=R)
    exchange.tell("engine", note)
    exchange.tell("nobody", note)
    assert (engine.notes, tools.notes) == ([note], [])
    del engine
    exchange.tell("engine", note)
