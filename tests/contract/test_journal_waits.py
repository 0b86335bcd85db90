"""What every journal promises about programs that wait for their client, run over each implementation."""

from __future__ import annotations

from typing import Any

import pytest

from agent_program.errors import ProgramNotFound
from agent_program.states import ProgramState
from deployments.journal import Claim, LeaseLost, LeaseStatus
from deployments.record_steps import apply_to_record
from deployments.steps import Step, StepKind
from support.journals import World
from support.programs import spec


async def waiting(world: World, name: str = "a") -> Claim:
    """A program whose runner has asked its client for something."""
    await world.create(spec(id=name))
    claim = await world.claim()
    await world.append(claim, StepKind.PROGRAM_CLAIMED, runner="r", resumed=False)
    call = {"call_id": "c", "kind": "output", "tool": "weather", "arguments": "{}"}
    await world.append(
        claim, StepKind.ACTION_REQUIRED, turn=1, calls=[call], expires_at=1e10, is_kv_released=False, lease_ends={}
    )
    return claim


async def act(world: World, kind: StepKind, *, seq: int = 4, **data: Any) -> bool:
    stored = await world.journal.load("a")
    step = Step(seq=seq, kind=kind, at=stored.record.updated_at + 1, data=data)
    return await world.journal.act("a", [step], apply_to_record(stored.record, step))


async def test_a_program_put_down_is_claimed_when_its_client_has_acted(world: World) -> None:
    claim = await waiting(world)
    await world.journal.hand_back(claim, after_s=600)
    assert await world.journal.claim("runner", lease_s=60) is None
    assert (await world.journal.list(state=ProgramState.REQUIRES_ACTION, limit=9, after=None)).records[0].id == "a"
    decided = {"turn": 1, "call_id": "x", "tool": "shell", "approved": True, "reason": None}
    assert await act(world, StepKind.ACTION_DECIDED, **decided)
    assert await world.journal.claim("runner", lease_s=60) is None, "it still waits"
    assert await act(world, StepKind.ACTION_TAKEN, seq=5, turn=1, seconds=1.0)
    again = await world.claim()
    assert (again.program_id, again.token > claim.token) == ("a", True)
    assert (await world.journal.get("a")).state is ProgramState.RUNNING
    with pytest.raises(LeaseLost):
        await world.append(claim, StepKind.PROGRAM_CLAIMED, runner="r", resumed=True)


async def test_a_program_put_down_is_claimed_when_its_time_is_over(world: World) -> None:
    claim = await waiting(world)
    await world.journal.hand_back(claim, after_s=0.05)
    await world.lapse(claim)
    assert (await world.claim()).program_id == "a"


async def test_extending_does_not_cut_the_wait_for_a_client_short(world: World) -> None:
    claim = await waiting(world)
    await world.journal.hand_back(claim, after_s=600)
    assert await world.journal.extend([claim], lease_s=0.05) == {"a": LeaseStatus.HELD}
    await world.lapse(claim)
    assert await world.journal.claim("runner", lease_s=60) is None


async def test_a_client_that_acts_before_its_program_is_put_down_is_not_missed(world: World) -> None:
    claim = await waiting(world)
    assert await act(world, StepKind.ACTION_TAKEN, turn=1, seconds=1.0)
    await world.journal.hand_back(claim, after_s=600)
    assert (await world.claim()).program_id == "a"


async def test_acting_is_refused_where_the_program_does_not_wait_or_has_moved_on(world: World) -> None:
    claim = await waiting(world)
    await world.journal.hand_back(claim, after_s=600)
    taken = {"turn": 1, "seconds": 1.0}
    assert not await act(world, StepKind.ACTION_TAKEN, seq=3, **taken), "another step has that number"
    assert len((await world.journal.load("a")).steps) == 3
    stored = await world.journal.load("a")
    assert await act(world, StepKind.ACTION_TAKEN, **taken)
    step = Step(seq=5, kind=StepKind.ACTION_TAKEN, at=9.0, data=taken)
    assert not await world.journal.act("a", [step], stored.record), "it runs"
    with pytest.raises(ProgramNotFound):
        await world.journal.act("nobody", [step], stored.record)


async def test_cancelling_a_waiting_program_gives_it_to_a_runner_at_once(world: World) -> None:
    claim = await waiting(world)
    await world.journal.hand_back(claim, after_s=600)
    assert (await world.journal.request_cancel("a")).cancel_requested
    again = await world.claim()
    assert again.program_id == "a"
    # Also where the runner that asked has not put it down yet.
    await world.append(again, StepKind.PROGRAM_CLAIMED, runner="r", resumed=True)
    await world.journal.hand_back(again, after_s=600)
    assert (await world.claim()).program_id == "a"
