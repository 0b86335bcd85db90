"""What every journal promises (`deployments/journal.py`), run over each implementation."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_program.clock import SystemClock
from agent_program.errors import IllegalTransition, InvalidRequest, Overloaded, ProgramNotFound
from agent_program.states import ProgramState
from deployments.journal import (
    CANCELS_TOPIC,
    QUEUED_TOPIC,
    IdempotencyKey,
    IdempotencyMismatch,
    LeaseLost,
    LeaseStatus,
    ProgramExists,
    program_topic,
)
from deployments.journal_histograms import LENGTH, TURN, plain
from deployments.program import EndReason
from deployments.record_steps import apply_to_record
from deployments.redis_journal import RedisJournal
from deployments.steps import Step, StepKind
from support.journals import World
from support.programs import limits, spec
from support.redis_server import RedisServer
from support.waiting import wait_for_async


async def test_an_accepted_program_can_be_read_back_whole(world: World) -> None:
    program = spec(metadata={"who": "me"}, sampling={"seed": 7}, limits=limits(max_total_tokens=None))
    accepted = await world.create(program)
    stored = await world.journal.load(program.id)
    assert stored.spec == program
    assert stored.record == accepted == await world.journal.get(program.id)
    assert accepted.state is ProgramState.QUEUED
    assert [step.kind for step in stored.steps] == [StepKind.PROGRAM_QUEUED]


async def test_an_unknown_program_is_not_found_by_any_method(world: World) -> None:
    for call in (
        world.journal.get("nobody"),
        world.journal.load("nobody"),
        world.journal.steps("nobody"),
        world.journal.request_cancel("nobody"),
        world.journal.delete("nobody"),
    ):
        with pytest.raises(ProgramNotFound):
            await call


async def test_an_id_is_taken_once(world: World) -> None:
    await world.create(spec(id="a"))
    with pytest.raises(ProgramExists):
        await world.create(spec(id="a", messages=[{"role": "user", "content": "something else"}]))


async def test_a_full_queue_refuses_and_forgets_the_program(world: World) -> None:
    await world.create(spec(id="a"), queued_max=1)
    with pytest.raises(Overloaded) as refused:
        await world.create(spec(id="b"), queued_max=1)
    assert refused.value.retry_after_s
    with pytest.raises(ProgramNotFound):
        await world.journal.get("b")
    await world.claim()
    await world.create(spec(id="b"), queued_max=1)


async def test_an_idempotency_key_makes_one_program(world: World) -> None:
    key = IdempotencyKey(tenant_id="t", key="k", fingerprint="f")
    first = await world.create(spec(id="a"), idempotency=key)
    again = await world.create(spec(id="b"), idempotency=key)
    assert again.id == first.id == "a"
    with pytest.raises(ProgramNotFound):
        await world.journal.get("b")


async def test_an_idempotency_key_is_for_one_request_of_one_tenant(world: World) -> None:
    await world.create(spec(id="a"), idempotency=IdempotencyKey(tenant_id="t", key="k", fingerprint="f"))
    with pytest.raises(IdempotencyMismatch):
        await world.create(spec(id="b"), idempotency=IdempotencyKey(tenant_id="t", key="k", fingerprint="g"))
    await world.create(spec(id="b"), idempotency=IdempotencyKey(tenant_id="u", key="k", fingerprint="g"))


async def test_an_idempotency_key_ends_with_its_program(world: World) -> None:
    key = IdempotencyKey(tenant_id="t", key="k", fingerprint="f")
    await world.create(spec(id="a"), idempotency=key)
    await world.journal.request_cancel("a")
    await world.journal.delete("a")
    assert (await world.create(spec(id="b"), idempotency=key)).id == "b"


async def test_programs_are_claimed_in_the_order_of_their_acceptance_and_once_each(world: World) -> None:
    for name in ("a", "b", "c"):
        await world.create(spec(id=name))
    claims = [await world.claim() for _ in range(3)]
    assert [claim.program_id for claim in claims] == ["a", "b", "c"]
    assert await world.journal.claim("runner", lease_s=60.0) is None


async def test_a_lapsed_lease_goes_to_the_next_claim_with_a_larger_token_and_before_new_programs(world: World) -> None:
    await world.create(spec(id="a"))
    old = await world.claim(lease_s=0.05)
    await world.create(spec(id="b"))
    await world.lapse(old)
    new = await world.claim()
    assert new.program_id == "a"
    assert new.token > old.token


async def test_lapsed_leases_can_be_left_to_their_runners(world: World) -> None:
    await world.create(spec(id="a"))
    old = await world.claim(lease_s=0.05)
    await world.create(spec(id="b"))
    await world.lapse(old)
    taken = await world.journal.claim("runner", lease_s=60.0, take_lapsed=False)
    assert taken is not None
    assert taken.program_id == "b"
    assert await world.journal.claim("runner", lease_s=60.0, take_lapsed=False) is None
    # Its runner lives, and keeps it.
    assert await world.journal.extend([old], lease_s=60.0) == {"a": LeaseStatus.HELD}


async def test_only_the_latest_claim_may_write(world: World) -> None:
    await world.create(spec(id="a"))
    old = await world.claim(lease_s=0.05)
    await world.lapse(old)
    new = await world.claim()
    with pytest.raises(LeaseLost):
        await world.append(old, StepKind.PROGRAM_CLAIMED, runner="old", resumed=False)
    await world.append(new, StepKind.PROGRAM_CLAIMED, runner="new", resumed=True)
    steps = await world.journal.steps("a")
    assert [step.data.get("runner") for step in steps] == [None, "new"]


async def test_an_extended_lease_does_not_lapse(world: World) -> None:
    await world.create(spec(id="a"))
    claim = await world.claim(lease_s=0.05)
    assert await world.journal.extend([claim], lease_s=60.0) == {"a": LeaseStatus.HELD}
    await world.lapse(claim)
    assert await world.journal.claim("other", lease_s=60.0) is None


async def test_extending_tells_of_lost_leases_and_of_cancellations(world: World) -> None:
    for name in ("a", "b", "c", "d"):
        await world.create(spec(id=name))
    lost = await world.claim(lease_s=0.05)
    await world.lapse(lost)
    await world.claim()
    asked, held, ended = [await world.claim() for _ in range(3)]
    await world.journal.request_cancel(asked.program_id)
    await world.append(ended, StepKind.PROGRAM_CLAIMED, runner="runner", resumed=False)
    await world.end(ended)
    assert await world.journal.extend([lost, asked, held, ended], lease_s=60.0) == {
        "a": LeaseStatus.LOST,
        "b": LeaseStatus.CANCEL_REQUESTED,
        "c": LeaseStatus.HELD,
        "d": LeaseStatus.LOST,
    }
    assert await world.journal.extend([], lease_s=60.0) == {}


async def test_a_step_out_of_order_is_refused_whole(world: World) -> None:
    await world.create(spec(id="a"))
    claim = await world.claim()
    before = await world.journal.load("a")
    step = Step(seq=3, kind=StepKind.PROGRAM_CLAIMED, at=2.0, data={"runner": "r", "resumed": False})
    with pytest.raises(LeaseLost):
        await world.journal.append(claim, [step], apply_to_record(before.record, step))
    assert await world.journal.load("a") == before


async def test_the_same_append_twice_is_one_append(world: World) -> None:
    await world.create(spec(id="a"))
    claim = await world.claim()
    stored = await world.journal.load("a")
    step = Step(seq=2, kind=StepKind.PROGRAM_CLAIMED, at=2.0, data={"runner": "r", "resumed": True})
    record = apply_to_record(stored.record, step)
    await world.journal.append(claim, [step], record)
    await world.journal.append(claim, [step], record)
    assert len(await world.journal.steps("a")) == 2
    assert (await world.journal.totals()).counters["resumed"] == 1


async def test_steps_are_read_from_any_point_in_bounded_parts(world: World) -> None:
    await world.create(spec(id="a"))
    claim = await world.claim()
    await world.append(claim, StepKind.PROGRAM_CLAIMED, runner="r", resumed=False)
    for turn in range(1, 13):
        await world.append(claim, StepKind.TURN_STARTED, turn=turn, attempt=1)
    assert [step.seq for step in await world.journal.steps("a", after_seq=9, limit=3)] == [10, 11, 12]
    assert [step.seq for step in await world.journal.steps("a", after_seq=12)] == [13, 14]
    assert await world.journal.steps("a", after_seq=14) == ()


async def test_a_program_handed_back_is_claimed_at_once(world: World) -> None:
    await world.create(spec(id="a"))
    await world.create(spec(id="b"))
    claim = await world.claim()
    await world.journal.hand_back(claim)
    again = await world.claim()
    assert again.program_id == "a"
    await world.journal.hand_back(claim)  # the old claim hands back nothing
    assert (await world.claim()).program_id == "b"


async def test_a_final_record_ends_the_lease_for_good(world: World) -> None:
    await world.run_to_end(spec(id="a"))
    assert await world.journal.claim("other", lease_s=60.0) is None
    assert (await world.journal.get("a")).state is ProgramState.COMPLETED


async def test_cancelling_a_queued_program_ends_it_at_once(world: World) -> None:
    await world.create(spec(id="a"))
    record = await world.journal.request_cancel("a")
    assert record.state is ProgramState.CANCELLED
    assert record.end_reason is EndReason.CANCELLED
    assert await world.journal.claim("runner", lease_s=60.0) is None
    assert [step.kind for step in await world.journal.steps("a")] == [StepKind.PROGRAM_QUEUED, StepKind.PROGRAM_ENDED]
    totals = await world.journal.totals()
    assert totals.by_state["cancelled"] == 1
    assert totals.by_state["queued"] == 0
    assert totals.counters["ended:cancelled:cancelled"] == 1


async def test_cancelling_a_claimed_program_is_left_to_its_runner(world: World) -> None:
    await world.create(spec(id="a"))
    await world.claim()
    record = await world.journal.request_cancel("a")
    assert record.state is ProgramState.QUEUED
    assert record.cancel_requested
    assert (await world.journal.load("a")).record.cancel_requested


async def test_cancelling_again_changes_nothing_and_an_ended_program_cannot_be_cancelled(world: World) -> None:
    await world.create(spec(id="a"))
    first = await world.journal.request_cancel("a")
    assert await world.journal.request_cancel("a") == first
    await world.run_to_end(spec(id="b"))
    with pytest.raises(IllegalTransition):
        await world.journal.request_cancel("b")
    assert not (await world.journal.get("b")).cancel_requested


async def test_only_a_program_that_ended_can_be_deleted(world: World) -> None:
    await world.create(spec(id="a"))
    with pytest.raises(IllegalTransition):
        await world.journal.delete("a")
    assert (await world.journal.get("a")).state is ProgramState.QUEUED
    await world.journal.request_cancel("a")
    await world.journal.delete("a")
    with pytest.raises(ProgramNotFound):
        await world.journal.get("a")
    assert (await world.journal.list(state=None, limit=10, after=None)).records == ()


async def test_lists_go_from_new_to_old_by_state_and_in_pages(world: World) -> None:
    for name in ("a", "b", "c", "d", "e"):
        await world.create(spec(id=name))
    await world.journal.request_cancel("b")
    await world.journal.request_cancel("d")

    async def ids(**query: Any) -> tuple[list[str], bool]:
        page = await world.journal.list(**{"state": None, "limit": 10, "after": None, **query})
        return [record.id for record in page.records], page.has_more

    assert await ids() == (["e", "d", "c", "b", "a"], False)
    assert await ids(limit=2) == (["e", "d"], True)
    assert await ids(limit=2, after="d") == (["c", "b"], True)
    assert await ids(limit=2, after="b") == (["a"], False)
    assert await ids(state=ProgramState.CANCELLED) == (["d", "b"], False)
    # A page goes on behind a program that has since left the listed state.
    assert await ids(state=ProgramState.QUEUED, after="d") == (["c", "a"], False)
    with pytest.raises(InvalidRequest):
        await ids(after="nobody")


async def test_finished_programs_are_forgotten_oldest_first_beyond_the_count(world: World) -> None:
    for name in ("a", "b", "c"):
        await world.run_to_end(spec(id=name))
    await world.create(spec(id="live"))
    assert await world.journal.forget_finished(keep_s=1e9, keep_count=2) == 1
    with pytest.raises(ProgramNotFound):
        await world.journal.get("a")
    for name in ("b", "c", "live"):
        await world.journal.get(name)
    assert await world.journal.forget_finished(keep_s=1e9, keep_count=2) == 0


async def test_finished_programs_are_forgotten_when_they_are_old(world: World) -> None:
    for name in ("a", "b"):
        await world.run_to_end(spec(id=name))
    await world.create(spec(id="live"))
    assert await world.journal.forget_finished(keep_s=3600, keep_count=100) == 0
    assert await world.journal.forget_finished(keep_s=0, keep_count=100) == 2
    page = await world.journal.list(state=None, limit=10, after=None)
    assert [record.id for record in page.records] == ["live"]


async def test_counters_add_up_what_the_steps_say(world: World) -> None:
    await world.create(spec(id="a"))
    claim = await world.claim()
    await world.append(claim, StepKind.PROGRAM_CLAIMED, runner="r", resumed=False)
    await world.append(claim, StepKind.TURN_STARTED, turn=1, attempt=1)
    await world.append(
        claim,
        StepKind.TURN_FINISHED,
        turn=1,
        message={"role": "assistant", "content": "hello"},
        finish_reason="stop",
        prompt_tokens=100,
        cached_tokens=60,
        recomputed_tokens=5,
        output_tokens=7,
        seconds=0.5,
        replica="r1",
        lease=None,
        lease_ends={"reused": 2},
    )
    await world.end(claim, lease_ends={"released": 1})
    totals = await world.journal.totals()
    counters = {name: amount for name, amount in totals.counters.items() if "/" not in name}
    assert counters == {
        "turns": 1,
        "prompt_tokens": 100,
        "cached_tokens": 60,
        "recomputed_tokens": 5,
        "output_tokens": 7,
        "leases:reused": 2,
        "leases:released": 1,
        "ended:completed:answer": 1,
    }
    assert totals.by_state["completed"] == 1
    assert plain(TURN, totals.counters)["sum"] == 0.5
    assert sum(plain(LENGTH, totals.counters)["counts"]) == 1
    record = await world.journal.get("a")
    assert (record.output, record.leases) == ("hello", {"reused": 2, "released": 1})


async def test_listeners_are_woken_by_what_happens_on_their_topic(world: World) -> None:
    async def woken_by(topic: str, action: Any) -> None:
        async with world.journal.listen(topic) as signal:
            while await signal.wait(0.2):
                pass  # the subscription itself may fire
            waiting = asyncio.create_task(signal.wait(30))
            await action
            assert await waiting

    await woken_by(QUEUED_TOPIC, world.create(spec(id="a")))
    claim = await world.claim()
    step = world.append(claim, StepKind.PROGRAM_CLAIMED, runner="r", resumed=False)
    await woken_by(program_topic("a"), step)
    await woken_by(CANCELS_TOPIC, world.journal.request_cancel("a"))
    await woken_by(QUEUED_TOPIC, world.journal.hand_back(claim))


async def test_many_claimers_share_the_queue_without_overlap(world: World) -> None:
    names = [f"p{number}" for number in range(40)]
    for name in names:
        await world.create(spec(id=name))

    async def drain() -> list[str]:
        taken = []
        while (claim := await world.journal.claim("runner", lease_s=60.0)) is not None:
            taken.append(claim.program_id)
        return taken

    taken = [name for part in await asyncio.gather(*(drain() for _ in range(4))) for name in part]
    assert sorted(taken) == sorted(names)


async def test_a_journal_that_is_closed_leaves_no_connection(journal_server: RedisServer | None) -> None:
    if journal_server is None:
        return
    observer = RedisJournal(journal_server.url, SystemClock())
    before = len(await observer._client.client_list())
    journal = RedisJournal(journal_server.url, SystemClock())
    await journal.check()
    async with journal.listen(QUEUED_TOPIC):
        pass
    await journal.close()

    async def gone() -> bool:
        return len(await observer._client.client_list()) <= before

    await wait_for_async(gone, what="the closed journal's connections to be gone")
    await observer.close()


async def test_a_claim_that_met_a_store_that_stood_still_takes_no_lease_that_ran_out_meanwhile(
    journal_server: RedisServer | None,
) -> None:
    if journal_server is None:
        return
    journal, other = (RedisJournal(journal_server.url, SystemClock()) for _ in range(2))
    world = World(journal, SystemClock())
    await world.create(spec(id="a"))
    held = await journal.claim("living", lease_s=1.0)
    assert held is not None
    assert await other.claim("another", lease_s=1.0) is None
    journal_server.pause()
    try:
        late = asyncio.create_task(other.claim("another", lease_s=1.0))
        await asyncio.sleep(1.5)  # longer than the lease: the passing of time itself is what is tested
    finally:
        journal_server.resume()
    assert await late is None
    assert await journal.extend([held], lease_s=60.0) == {"a": LeaseStatus.HELD}
    await journal.close()
    await other.close()
