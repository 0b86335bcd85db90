"""The adapter against Serve's own router class, without a cluster: what Serve asks and tells, and what we rely on in it.

The methods whose names start with an underscore are Serve's private ones; a new version of Ray that changes them fails here,
with their names.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve._private.request_router.request_router import RequestRouter
from ray.serve.request_router import PendingRequest, ReplicaID

from agent_program.ids import ProgramId, ReplicaId
from agent_program.turn import TurnHints
from continuum_router.config import RouterSettings
from continuum_router.exchange import TurnLost, TurnReplied, tell
from continuum_router.ray_router import ProgramAffinityRouter, router_config
from support.redis_server import RedisServer, valkey_binary
from support.waiting import wait_for_async

DEPLOYMENT = DeploymentID(name="Engine", app_name="app")


class StandInReplica:
    """What the router sees of a running replica, without an actor behind it."""

    def __init__(self, name: str, *, report: dict[str, Any] | None = None, turns: int = 0, turns_max: int = 8) -> None:
        self.replica_id = ReplicaID(name, deployment_id=DEPLOYMENT)
        self.routing_stats = report or {}
        self.max_ongoing_requests = turns_max
        self.turns = turns

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.turns


@pytest.fixture
def store_url() -> Any:
    with RedisServer(valkey_binary()) as server:
        yield server.url


@pytest.fixture
async def router(store_url: str, request: pytest.FixtureRequest) -> AsyncIterator[ProgramAffinityRouter]:
    made = ProgramAffinityRouter(
        deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
    )
    changes = getattr(request, "param", {})
    made.initialize_state(store_url=store_url, namespace="engine", settings={"store_timeout_s": 10.0, **changes})
    yield made
    await made._programs.close()


def a_request(program_id: str = "", *, method: str = "chat", internal_id: str = "internal") -> PendingRequest:
    metadata = RequestMetadata(
        request_id="request", internal_request_id=internal_id, call_method=method, session_id=program_id
    )
    return PendingRequest(args=[], kwargs={}, metadata=metadata)


async def chosen(router: ProgramAffinityRouter, pending: PendingRequest) -> list[list[str]]:
    ranks = await router.choose_replicas(list(router.curr_replicas.values()), pending)
    return [[replica.replica_id.unique_id for replica in rank] for rank in ranks]


async def test_a_programs_ranking_is_its_replica_and_nothing_else(router: ProgramAffinityRouter) -> None:
    router.update_replicas([StandInReplica("a"), StandInReplica("b")])
    first = await chosen(router, a_request("p"))
    assert [len(rank) for rank in first] == [1]
    assert await chosen(router, a_request("p")) == first


async def test_serve_is_told_to_back_off_while_a_programs_replica_is_full(router: ProgramAffinityRouter) -> None:
    router.update_replicas([StandInReplica("a")])
    pending = a_request("p")
    await chosen(router, pending)
    assert pending.routing_context.should_backoff


async def test_a_request_without_a_program_may_fall_back_to_any_replica(router: ProgramAffinityRouter) -> None:
    router.update_replicas([StandInReplica("a", report={"waiting": 3}), StandInReplica("b")])
    best, rest = await chosen(router, a_request())
    assert best == ["b"]
    assert sorted(rest) == ["a", "b"]


async def test_a_routing_task_without_a_request_gets_every_replica(router: ProgramAffinityRouter) -> None:
    router.update_replicas([StandInReplica("a"), StandInReplica("b")])
    (rank,) = await router.choose_replicas(list(router.curr_replicas.values()), None)
    assert len(rank) == 2
    assert await router.choose_replicas([], None) == []


async def test_without_replicas_there_is_no_choice(router: ProgramAffinityRouter) -> None:
    assert await chosen(router, a_request("p")) == []


async def test_a_dead_replicas_programs_go_elsewhere_and_a_late_broadcast_does_not_bring_it_back(
    router: ProgramAffinityRouter,
) -> None:
    replicas = {name: StandInReplica(name) for name in ("a", "b")}
    router.update_replicas(list(replicas.values()))
    ((home,),) = await chosen(router, a_request("p"))
    router.on_replica_actor_died(replicas[home].replica_id)
    router.update_replicas(list(replicas.values()))
    ((refuge,),) = await chosen(router, a_request("p"))
    assert refuge != home


@pytest.mark.parametrize("router", [{"lost_replica_quarantine_s": 0.1}], indirect=True)
async def test_a_replica_that_was_held_for_dead_and_is_still_listed_is_used_again_without_further_news(
    router: ProgramAffinityRouter,
) -> None:
    alive = StandInReplica("alive")
    router.update_replicas([alive])
    router.on_replica_actor_died(alive.replica_id)
    router.update_replicas([alive])

    async def is_used() -> bool:
        return await chosen(router, a_request("p")) == [["alive"]]

    await wait_for_async(is_used, what="the quarantine is over")


async def test_requests_that_choose_together_spread_before_any_of_them_is_sent(router: ProgramAffinityRouter) -> None:
    router.update_replicas([StandInReplica("a"), StandInReplica("b")])
    waiting = [a_request(internal_id=f"request-{number}") for number in range(10)]
    for pending in waiting:
        router._add_pending_request_to_indices(pending)
    picks = [(await chosen(router, pending))[0][0] for pending in waiting]
    assert Counter(picks) == {"a": 5, "b": 5}
    for pending in waiting:
        router._remove_pending_request_from_indices(pending)
    await asyncio.sleep(0)
    assert router._reserved == {}


async def test_a_request_that_chooses_again_counts_once(router: ProgramAffinityRouter) -> None:
    router.update_replicas([StandInReplica("a"), StandInReplica("b")])
    pending = a_request("p")
    router._add_pending_request_to_indices(pending)
    for _ in range(50):  # as while its replica is full
        await chosen(router, pending)
    picks = {(await chosen(router, a_request(f"q{number}")))[0][0] for number in range(4)}
    assert picks == {"a", "b"}


async def test_requests_that_share_an_internal_id_each_get_a_replica(router: ProgramAffinityRouter) -> None:
    router.update_replicas([StandInReplica("a"), StandInReplica("b")])
    together = [a_request(f"p{number}", internal_id="of-one-http-request") for number in range(8)]
    async with asyncio.timeout(60):
        replicas = await asyncio.gather(*(router._choose_replica_for_request(pending) for pending in together))
    assert len(replicas) == 8
    assert router._pending_by_metadata == {}


async def test_a_request_waits_for_its_own_full_replica_while_others_are_served(router: ProgramAffinityRouter) -> None:
    full, idle = StandInReplica("full", turns_max=1), StandInReplica("idle")
    router.update_replicas([full])
    await chosen(router, a_request("p"))
    router.update_replicas([full, idle])
    full.turns = 1
    router.on_new_queue_len_info(full.replica_id, 1)
    stuck = [asyncio.create_task(router._choose_replica_for_request(a_request("p"))) for _ in range(20)]

    async def are_stuck() -> bool:
        return len(router._reserved) >= 4  # as many as Serve would seek replicas for at once, left to itself

    await wait_for_async(are_stuck, what="requests wait for the full replica")
    async with asyncio.timeout(60):
        replica = await router._choose_replica_for_request(a_request("new"))
    assert replica is idle
    assert not any(task.done() for task in stuck)
    full.turns = 0
    async with asyncio.timeout(60):
        assert set(await asyncio.gather(*stuck)) == {full}


async def test_a_cancelled_request_leaves_nothing_behind(router: ProgramAffinityRouter) -> None:
    full = StandInReplica("full", turns_max=1, turns=1)
    router.update_replicas([full])
    waiting = asyncio.create_task(router._choose_replica_for_request(a_request("p")))

    async def has_chosen() -> bool:
        return bool(router._reserved)

    await wait_for_async(has_chosen, what="the request has chosen its full replica")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0)
    assert (router._pending_by_metadata, router._reserved) == ({}, {})


async def test_a_release_ends_the_binding_once_the_replica_has_taken_it(router: ProgramAffinityRouter) -> None:
    router.update_replicas([StandInReplica("a"), StandInReplica("b")])
    home = (await chosen(router, a_request("p")))[0][0]
    release = a_request("p", method="release_program")
    assert await chosen(router, release) == [[home]]
    router.on_request_routed(release, ReplicaID(home, deployment_id=DEPLOYMENT), None)
    await asyncio.gather(*router._releases)
    assert router._programs.programs_known == 0


async def test_an_event_of_an_unbound_program_binds_nothing(router: ProgramAffinityRouter) -> None:
    router.update_replicas([StandInReplica("a")])
    await chosen(router, a_request("p", method="tool_event"))
    assert router._programs.programs_known == 0
    assert await router._programs._bindings.get(ProgramId("p")) is None


# What replicas and callers hear and say


async def test_a_turn_takes_along_why_it_went_where_it_went(router: ProgramAffinityRouter) -> None:
    router.update_replicas([StandInReplica("a")])
    turn = a_request("p")
    await chosen(router, turn)
    assert turn.kwargs == {"placement": {"reason": "new"}}
    event = a_request("p", method="tool_event")
    await chosen(router, event)
    assert event.kwargs == {}


async def test_a_turn_of_a_sub_program_goes_to_its_parents_replica(router: ProgramAffinityRouter) -> None:
    router.update_replicas([StandInReplica("a"), StandInReplica("b", report={"waiting": 3})])
    await chosen(router, a_request("parent"))
    router.update_replicas([StandInReplica("a", report={"waiting": 2}), StandInReplica("b")])
    child = a_request("child")
    child.args.extend([{}, TurnHints(program_id=ProgramId("child"), parent_program_id=ProgramId("parent"))])
    assert await chosen(router, child) == [["a"]]
    assert child.kwargs["placement"]["reason"] == "parent"


async def test_what_callers_tell_on_any_thread_reaches_the_router_of_their_namespace(
    router: ProgramAffinityRouter,
) -> None:
    router.update_replicas([StandInReplica("a"), StandInReplica("b")])
    ((home,),) = await chosen(router, a_request("p"))
    lost = TurnLost(program_id=ProgramId("p"), replica_id=ReplicaId(home))
    await asyncio.to_thread(tell, "tools", lost)
    await asyncio.sleep(0)
    assert await chosen(router, a_request("p")) == [[home]]
    await asyncio.to_thread(tell, "engine", lost)

    async def has_left() -> bool:
        return await chosen(router, a_request("p")) != [[home]]

    await wait_for_async(has_left, what="the program leaves the replica that lost its turn")
    replied = TurnReplied(
        program_id=ProgramId("p"), replica_id=ReplicaId(home), report={"waiting": 7}, kept_s=0.0, context_tokens=10
    )
    tell("engine", replied)

    async def has_heard() -> bool:
        view = router._programs.fleet.view(ReplicaId(home))
        return view is not None and view.waiting == 7

    await wait_for_async(has_heard, what="the reply corrects the view")


async def test_a_wrong_setting_stops_the_router_and_is_named(store_url: str) -> None:
    made = ProgramAffinityRouter(deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA)
    with pytest.raises(ValueError, match="binding_ttl_seconds"):
        made.initialize_state(store_url=store_url, namespace="engine", settings={"binding_ttl_seconds": 1})


def test_the_deployment_configuration_carries_the_settings_as_json() -> None:
    settings = RouterSettings(routing_stats_period_s=0.25, seed=7)
    config = router_config("redis://127.0.0.1:6379/0", namespace="tools", settings=settings)
    assert config.request_routing_stats_period_s == 0.25
    assert RouterSettings.model_validate(config.request_router_kwargs["settings"]) == settings
    made = config.get_request_router_class()
    assert made.__name__ == "ProgramAffinityRouter"
    assert issubclass(made, RequestRouter)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("choose_replicas", ["self", "candidate_replicas", "pending_request"]),
        ("initialize_state", ["self", "kwargs"]),
        ("update_replicas", ["self", "replicas"]),
        ("on_replica_actor_died", ["self", "replica_id"]),
        ("on_send_request", ["self", "replica_id"]),
        ("on_request_completed", ["self", "replica_id", "internal_request_id"]),
        ("on_request_routed", ["self", "pending_request", "replica_id", "result"]),
        ("_add_pending_request_to_indices", ["self", "pending_request"]),
        ("_remove_pending_request_from_indices", ["self", "pending_request"]),
        ("_get_pending_request_matching_internal_request_id", ["self", "request_metadata"]),
    ],
)
def test_serves_router_has_the_methods_that_we_override(name: str, parameters: list[str]) -> None:
    assert list(inspect.signature(getattr(RequestRouter, name)).parameters) == parameters


def test_serves_router_has_the_properties_that_we_use() -> None:
    for name in ("max_num_routing_tasks", "curr_replicas", "_event_loop"):
        assert isinstance(inspect.getattr_static(RequestRouter, name), property), name
