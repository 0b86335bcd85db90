"""One behaviour of the binding authority, whatever keeps the bindings: this process's memory, Valkey, Redis."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from agent_program.clock import ManualClock
from agent_program.errors import StoreUnavailable
from agent_program.ids import ProgramId, ReplicaId
from continuum_router.bindings import Bindings, MemoryBindings
from continuum_router.redis_bindings import RedisBindings
from support.redis_server import SERVERS, RedisServer

A, B, C = ReplicaId("a"), ReplicaId("b"), ReplicaId("c")
P, Q = ProgramId("prog_p"), ProgramId("prog_q")
_namespaces = itertools.count()


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    with RedisServer(SERVERS[request.param]()) as started:
        yield started


class Authority:
    """An implementation under test: opens connections to one set of bindings, and lets their time pass."""

    def __init__(self, connect: Callable[[], Bindings], lapse: Callable[[], object]) -> None:
        self.connect = connect
        #: Lets more than a time to live go by.
        self.lapse = lapse


@pytest.fixture(params=["memory", *SERVERS])
async def authority(request: pytest.FixtureRequest) -> AsyncIterator[Authority]:
    made: list[Bindings] = []
    if request.param == "memory":
        clock = ManualClock()
        memory = MemoryBindings(clock=clock, ttl_s=60.0)
        yield Authority(lambda: memory, lambda: clock.advance(60.0))
        return
    with RedisServer(SERVERS[request.param]()) as server:

        def connect() -> Bindings:
            made.append(RedisBindings(server.url, namespace="engine", ttl_s=60.0, timeout_s=10.0))
            return made[-1]

        yield Authority(connect, lambda: server.expire_all())
        for bindings in made:
            await bindings.close()


@pytest.fixture
def bindings(authority: Authority) -> Bindings:
    return authority.connect()


async def test_a_program_is_unbound_until_it_is_bound(bindings: Bindings) -> None:
    assert await bindings.get(P) is None
    assert await bindings.bind(P, A) == A
    assert await bindings.get(P) == A
    assert await bindings.get(Q) is None


async def test_the_first_binding_stands_against_later_wishes(bindings: Bindings) -> None:
    await bindings.bind(P, A)
    assert await bindings.bind(P, B) == A
    assert await bindings.get(P) == A


async def test_a_binding_to_the_replica_believed_gone_is_replaced(bindings: Bindings) -> None:
    await bindings.bind(P, A)
    assert await bindings.bind(P, B, replacing=A) == B
    assert await bindings.get(P) == B


async def test_a_stale_belief_replaces_nothing(bindings: Bindings) -> None:
    await bindings.bind(P, A)
    await bindings.bind(P, B, replacing=A)
    assert await bindings.bind(P, C, replacing=A) == B
    assert await bindings.get(P) == B


async def test_replacing_binds_a_program_that_is_unbound_too(bindings: Bindings) -> None:
    assert await bindings.bind(P, B, replacing=A) == B


async def test_of_many_that_bind_at_once_all_get_the_same_answer(authority: Authority) -> None:
    wishes = [ReplicaId(f"replica-{number}") for number in range(20)]
    answers = await asyncio.gather(*(authority.connect().bind(P, wish) for wish in wishes))
    assert len(set(answers)) == 1
    assert answers[0] in wishes


async def test_of_many_that_replace_a_lost_replica_at_once_all_get_the_same_answer(authority: Authority) -> None:
    await authority.connect().bind(P, A)
    wishes = [ReplicaId(f"replica-{number}") for number in range(20)]
    answers = await asyncio.gather(*(authority.connect().bind(P, wish, replacing=A) for wish in wishes))
    assert len(set(answers)) == 1
    assert answers[0] in wishes


async def test_release_ends_the_binding_that_it_names_once(bindings: Bindings) -> None:
    await bindings.bind(P, A)
    assert await bindings.release(P, A)
    assert await bindings.get(P) is None
    assert not await bindings.release(P, A)


async def test_release_leaves_a_binding_to_another_replica_alone(bindings: Bindings) -> None:
    await bindings.bind(P, A)
    assert not await bindings.release(P, B)
    assert await bindings.get(P) == A


async def test_a_binding_lapses_when_its_time_is_up_and_can_be_made_anew(
    authority: Authority, bindings: Bindings
) -> None:
    await bindings.bind(P, A)
    authority.lapse()
    assert await bindings.get(P) is None
    assert not await bindings.release(P, A)
    assert await bindings.bind(P, B) == B


async def test_what_one_connection_binds_another_sees(authority: Authority) -> None:
    await authority.connect().bind(P, A)
    assert await authority.connect().get(P) == A


# What only time by hand can show


async def test_every_wish_starts_the_time_to_live_anew_and_a_question_does_not() -> None:
    clock = ManualClock()
    memory = MemoryBindings(clock=clock, ttl_s=60.0)
    await memory.bind(P, A)
    clock.advance(50.0)
    await memory.bind(P, B)  # refused, and a use of the binding
    clock.advance(50.0)
    assert await memory.get(P) == A
    clock.advance(10.0)
    assert await memory.get(P) is None


async def test_memory_keeps_no_more_than_its_capacity_and_forgets_the_least_recently_used() -> None:
    memory = MemoryBindings(clock=ManualClock(), ttl_s=60.0, capacity=3)
    for name in ("p", "q", "r"):
        await memory.bind(ProgramId(name), A)
    await memory.bind(ProgramId("p"), A)
    await memory.bind(ProgramId("s"), A)
    assert len(memory) == 3
    assert await memory.get(ProgramId("q")) is None
    assert await memory.get(ProgramId("p")) == A


# What only a server can show


def connect(server: RedisServer, **changes: object) -> RedisBindings:
    options = {"namespace": f"test-{next(_namespaces)}", "ttl_s": 60.0, "timeout_s": 10.0, **changes}
    return RedisBindings(server.url, **options)  # type: ignore[arg-type]


async def test_namespaces_do_not_see_each_other(server: RedisServer) -> None:
    engine, tools = connect(server), connect(server)
    await engine.bind(P, A)
    assert await tools.get(P) is None
    assert await tools.bind(P, B) == B
    assert await engine.get(P) == A
    await engine.close()
    await tools.close()


async def test_the_key_is_the_documented_one_and_every_wish_renews_its_time_to_live(server: RedisServer) -> None:
    bindings = connect(server, namespace="layout")
    await bindings.bind(P, A)
    key = f"continuum:bindings:layout:{P}"
    with server.client() as client:
        assert client.get(key) == b"a"
        assert 0 < client.pttl(key) <= 60_000
        client.pexpire(key, 1000)
        await bindings.get(P)
        assert client.pttl(key) <= 1000
        await bindings.bind(P, B)
        assert client.pttl(key) > 1000
    await bindings.close()


async def test_scripts_survive_a_server_that_forgot_them(server: RedisServer) -> None:
    bindings = connect(server)
    await bindings.bind(P, A)
    with server.client() as client:
        client.script_flush()
    assert await bindings.bind(P, B) == A
    await bindings.close()


async def test_a_server_that_is_not_there_is_reported_as_the_store_being_unavailable() -> None:
    bindings = RedisBindings("redis://127.0.0.1:9", namespace="engine", ttl_s=60.0, timeout_s=0.2)
    for question in (bindings.get(P), bindings.bind(P, A), bindings.release(P, A)):
        with pytest.raises(StoreUnavailable):
            await question
    await bindings.close()


async def test_a_server_that_stops_answering_is_given_up_on_and_its_late_answers_reach_nobody(
    server: RedisServer,
) -> None:
    bindings = connect(server, timeout_s=0.3, connections_max=2)
    await bindings.bind(P, A)
    await bindings.bind(Q, B)
    server.pause()
    try:
        for _ in range(4):
            with pytest.raises(StoreUnavailable):
                await bindings.get(P)
    finally:
        server.resume()
    patient = connect(server, namespace="other")
    await patient.get(P)  # the server has come round to answering
    for _ in range(10):
        assert (await bindings.get(P), await bindings.get(Q)) == (A, B)
    await bindings.close()
    await patient.close()


async def test_a_restarted_server_is_used_again_without_a_new_connection_object() -> None:
    with RedisServer(SERVERS["valkey"]()) as server:
        bindings = connect(server)
        await bindings.bind(P, A)
        server.kill()
        with pytest.raises(StoreUnavailable):
            await bindings.get(P)
        server.start()
        assert await bindings.get(P) is None
        assert await bindings.bind(P, B) == B
        await bindings.close()


async def test_more_requests_than_connections_wait_their_turn(server: RedisServer) -> None:
    bindings = connect(server, connections_max=2)
    answers = await asyncio.gather(*(bindings.bind(ProgramId(f"p{number}"), A) for number in range(200)))
    assert answers == [A] * 200
    await bindings.close()


@pytest.mark.parametrize("namespace", ["", "Engine", "a:b", "x" * 65, "a b"])
def test_a_namespace_that_could_collide_with_another_key_is_refused(namespace: str) -> None:
    with pytest.raises(ValueError, match="namespace"):
        RedisBindings("redis://127.0.0.1:1", namespace=namespace, ttl_s=1.0)


def test_a_store_url_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="URL"):
        RedisBindings("http://127.0.0.1", namespace="engine", ttl_s=1.0)
