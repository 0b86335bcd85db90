"""Waiting at the edge: who leaves gives up their place, who ends gives theirs on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from agent_program.errors import Overloaded
from agent_program.ids import DEFAULT_TENANT, ProgramId
from continuum_router.config import AdmissionSettings
from deployments.edge_gate import EdgeGate
from support.api import CLOSED, MODEL, OPENED, ApiBench, error_of
from support.virtual_time import LoopClock, run_virtually

P = ProgramId("p")
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}]}


def gate(**changes: Any) -> EdgeGate:
    settings = AdmissionSettings(**{"turns_max": 1, "waiting_per_tenant_max": 1, "wait_s": 10.0, **changes})
    return EdgeGate(settings, clock=LoopClock(asyncio.get_running_loop()))


async def hold(target: EdgeGate, seconds: float, program_id: ProgramId | None = None) -> float:
    """Hold a place; returns when it was given."""
    async with target.turn(DEFAULT_TENANT, program_id):
        started_s = asyncio.get_running_loop().time()
        await asyncio.sleep(seconds)
    return started_s


def virtually(work: Coroutine[Any, Any, Any]) -> Any:
    return run_virtually(work)


def test_the_next_one_starts_when_a_turn_ends() -> None:
    async def run() -> list[float]:
        target = gate()
        return await asyncio.gather(hold(target, 3.0), hold(target, 3.0))

    assert virtually(run()) == [0.0, 3.0]


def test_a_full_queue_is_a_429_with_a_time_and_a_program_that_was_let_in_passes_it() -> None:
    async def run() -> None:
        target = gate()
        await hold(target, 2.0, P)
        first, second = (asyncio.create_task(hold(target, 2.0)) for _ in range(2))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as refused:
            await hold(target, 1.0)
        assert refused.value.retry_after_s == 2
        assert await hold(target, 1.0, P) == 2.0
        target.program_over(P)
        await asyncio.gather(first, second)
        assert target.status() == {"running": 0, "waiting": 0}

    virtually(run())


def test_who_waits_too_long_is_told_when_to_come_again_and_leaves_no_place_taken() -> None:
    async def run() -> None:
        target = gate()
        holder = asyncio.create_task(hold(target, 60.0))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as refused:
            await hold(target, 1.0)
        assert refused.value.retry_after_s is not None
        assert target.status() == {"running": 1, "waiting": 0}
        await holder
        assert target.status() == {"running": 0, "waiting": 0}

    virtually(run())


def test_who_is_cancelled_while_waiting_or_running_leaves_nothing_behind() -> None:
    async def run() -> None:
        target = gate(waiting_per_tenant_max=5)
        tasks = [asyncio.create_task(hold(target, 60.0)) for _ in range(4)]
        await asyncio.sleep(1.0)
        for task in (tasks[2], tasks[0]):
            task.cancel()
        await asyncio.sleep(1.0)
        assert target.status() == {"running": 1, "waiting": 1}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert target.status() == {"running": 0, "waiting": 0}

    virtually(run())


async def test_a_program_that_said_it_was_its_last_turn_is_new_again_afterwards() -> None:
    last = {**BODY, "program_id": "p", "continuum": {"is_last_turn": True}}
    never = asyncio.Event()
    bench = ApiBench(
        [[OPENED, "{}", CLOSED], [OPENED, never, "{}", CLOSED]],
        admission=AdmissionSettings(turns_max=1, waiting_per_tenant_max=0),
    )
    async with bench.client() as client:
        assert (await client.post("/v1/chat/completions", json=last)).status_code == 200
        waiting = asyncio.create_task(client.post("/v1/chat/completions", json=BODY))
        while len(bench.engine.bodies) < 2:  # noqa: ASYNC110 - the double has no event to wait for
            await asyncio.sleep(0)
        assert (await client.post("/v1/chat/completions", json=last)).status_code == 429
        never.set()
        await waiting


async def test_over_http_a_refusal_is_a_429_with_retry_after_and_starts_nothing() -> None:
    never = asyncio.Event()
    bench = ApiBench(
        [[OPENED, never, "{}", CLOSED]], admission=AdmissionSettings(turns_max=1, waiting_per_tenant_max=0)
    )
    async with bench.client() as client:
        waiting = asyncio.create_task(client.post("/v1/chat/completions", json=BODY))
        while not bench.engine.bodies:  # noqa: ASYNC110 - the double has no event to wait for
            await asyncio.sleep(0)
        refused = await client.post("/v1/chat/completions", json=BODY)
        never.set()
        assert (await waiting).status_code == 200
    assert (refused.status_code, error_of(refused)["code"]) == (429, "overloaded")
    assert int(refused.headers["retry-after"]) >= 1
    assert len(bench.engine.bodies) == 1
