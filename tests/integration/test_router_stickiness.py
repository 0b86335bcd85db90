"""The router on real Ray Serve with toy replicas and a real Valkey: who answered tells where each request went."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from support.redis_server import RedisServer, free_port
from support.waiting import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("ray_cluster")]

HTTP_PORT = free_port()


class ToyApp:
    """The deployed toy app: change its size, call its replicas."""

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        self._name, self._args = name, args
        self.url = f"http://127.0.0.1:{HTTP_PORT}/{name}"

    def scale(self, replicas: int) -> None:
        """Deploy by config (replicas are kept; `serve.run` would restart them all) and wait until they run."""
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        config = ServeDeploySchema.model_validate(
            {
                "applications": [
                    {
                        "name": self._name,
                        "route_prefix": f"/{self._name}",
                        "import_path": "support.toy_replicas:build",
                        "args": self._args,
                        "deployments": [{"name": "ToyReplica", "num_replicas": replicas}],
                    }
                ]
            }
        )
        _get_global_client().deploy_apps(config)
        wait_for(lambda: self.is_running(replicas), what=f"{replicas} replicas run")

    def is_running(self, replicas: int) -> bool:
        from ray import serve

        app = serve.status().applications.get(self._name)
        if app is None or app.status != "RUNNING":
            return False
        return app.deployments["ToyReplica"].replica_states == {"RUNNING": replicas}

    def handle(self, deployment: str = "ToyReplica") -> Any:
        from ray import serve

        return serve.get_deployment_handle(deployment, self._name)

    def call(self, method: str, program_id: str) -> dict[str, Any]:
        handle = getattr(self.handle().options(session_id=program_id), method)
        return handle.remote().result(timeout_s=60)

    def bindings(self, store: RedisServer) -> dict[str, str]:
        """What the store says: program → replica."""
        prefix = b"continuum:bindings:engine:"
        with store.client() as client:
            keys = list(client.scan_iter(prefix + b"*"))
            values = client.mget(keys) if keys else []
        return {
            key.removeprefix(prefix).decode(): value.decode() for key, value in zip(keys, values, strict=True) if value
        }

    def turn(self, program_id: str, slow_s: float = 0.0) -> dict[str, Any]:
        return self.handle().options(session_id=program_id).turn.remote(slow_s).result(timeout_s=60)

    def turns(self, program_ids: list[str], slow_s: float = 0.0) -> dict[str, str]:
        """One turn of each program, all at once → the replica that took it."""
        handle = self.handle()
        responses = {name: handle.options(session_id=name).turn.remote(slow_s) for name in program_ids}
        return {name: response.result(timeout_s=60)["replica"] for name, response in responses.items()}


@pytest.fixture
def toy(store: RedisServer, request: pytest.FixtureRequest) -> Iterator[Callable[..., ToyApp]]:
    from ray import serve

    serve.start(http_options={"host": "127.0.0.1", "port": HTTP_PORT})
    # A name per test: a handle, and with it the router and its store, outlives an app that is deployed again.
    name = request.node.name[:60]

    def deploy(replicas: int, **args: Any) -> ToyApp:
        app = ToyApp(name, {"store_url": store.url, **args})
        app.scale(replicas)
        return app

    yield deploy
    serve.delete(name)


def _programs(count: int) -> list[str]:
    return [f"program-{number}" for number in range(count)]


def test_programs_that_arrive_together_split_evenly_and_stay_where_they_are(toy: Callable[..., ToyApp]) -> None:
    app = toy(2)
    first = app.turns(_programs(24), slow_s=0.05)
    assert sorted(Counter(first.values()).values()) == [12, 12]
    for _ in range(3):
        assert app.turns(_programs(24)) == first


def test_adding_a_replica_moves_no_program(toy: Callable[..., ToyApp]) -> None:
    app = toy(2)
    before = app.turns(_programs(20))
    app.scale(3)
    wait_for(lambda: len(set(app.turns(["new-a", "new-b", "new-c"]).values()) | set(before.values())) == 3, what="news")
    assert app.turns(_programs(20)) == before


def test_killing_a_replica_moves_only_its_programs(toy: Callable[..., ToyApp]) -> None:
    app = toy(2)
    answers = {name: app.turn(name) for name in _programs(20)}
    before = {name: answer["replica"] for name, answer in answers.items()}
    victim = answers["program-0"]
    os.kill(victim["pid"], signal.SIGKILL)
    after = app.turns(_programs(20))
    assert victim["replica"] not in after.values()
    moved = {name for name in before if before[name] != after[name]}
    assert moved == {name for name in before if before[name] == victim["replica"]}
    wait_for(lambda: app.is_running(2), what="the replacement runs")
    assert app.turns(_programs(20)) == after  # the replacement pulls nobody back


def test_a_burst_of_one_program_stays_on_one_replica_though_it_is_full(toy: Callable[..., ToyApp]) -> None:
    app = toy(2, max_ongoing_requests=2)
    handle = app.handle().options(session_id="busy")
    responses = [handle.turn.remote(0.02) for _ in range(40)]
    assert len({response.result(timeout_s=60)["replica"] for response in responses}) == 1


def test_scaling_down_moves_only_the_programs_of_the_replica_that_leaves(toy: Callable[..., ToyApp]) -> None:
    app = toy(3)
    before = app.turns(_programs(24))
    app.scale(2)
    after = app.turns(_programs(24))
    assert {name for name in before if before[name] != after[name]} == {
        name for name in before if before[name] not in after.values()
    }
    assert len(set(after.values())) == 2


def test_calls_made_at_once_within_one_http_request_are_all_routed(toy: Callable[..., ToyApp]) -> None:
    app = toy(2)
    answer = httpx.get(app.url, params={"program": "fan-out", "calls": 12}, timeout=60)
    assert answer.status_code == 200
    assert len(answer.json()) == 12
    assert len(set(answer.json())) == 1


def test_every_process_sends_a_program_to_the_same_replica(toy: Callable[..., ToyApp]) -> None:
    app = toy(2)
    from_here = app.turns(_programs(12))
    door = app.handle("ToyFrontDoor")
    from_the_door = {name: door.parallel.remote(name, 1) for name in _programs(24)}
    seen = {name: response.result(timeout_s=60)[0] for name, response in from_the_door.items()}
    assert {name: seen[name] for name in from_here} == from_here
    assert app.turns(_programs(24)) == seen


def test_an_event_goes_to_the_programs_replica_and_binds_none_that_has_none(
    toy: Callable[..., ToyApp], store: RedisServer
) -> None:
    app = toy(3)
    homes = app.turns(_programs(9))
    for name, home in homes.items():
        assert app.call("tool_event", name)["replica"] == home
    app.call("tool_event", "never-had-a-turn")
    assert app.bindings(store) == homes


def test_a_released_program_is_forgotten_by_the_store(toy: Callable[..., ToyApp], store: RedisServer) -> None:
    app = toy(2)
    homes = app.turns(_programs(4))
    assert app.call("release_program", "program-0")["replica"] == homes.pop("program-0")
    wait_for(lambda: app.bindings(store) == homes, what="the released binding is gone and no other")


def test_requests_without_a_program_are_spread_and_bind_nothing(toy: Callable[..., ToyApp], store: RedisServer) -> None:
    app = toy(2)
    responses = [app.handle().turn.remote(0.2) for _ in range(20)]
    spread = Counter(response.result(timeout_s=60)["replica"] for response in responses)
    assert len(spread) == 2
    assert min(spread.values()) >= 7
    assert app.bindings(store) == {}


def test_new_programs_prefer_the_replica_that_reports_the_smaller_load(toy: Callable[..., ToyApp]) -> None:
    app = toy(2, settings={"routing_stats_period_s": 0.1})
    homes = app.turns(["first", "second"])
    app.handle().options(session_id="first").report_load.remote({"waiting": 40}).result(timeout_s=60)
    # Reports travel by the controller: until they have arrived programs may go either way.
    fresh = (f"fresh-{number}" for number in range(10_000))
    wait_for(
        lambda: set(app.turns([next(fresh) for _ in range(8)]).values()) == {homes["second"]},
        what="new programs avoid the loaded replica",
    )


# The store away


def test_without_the_store_programs_stay_and_new_ones_start_and_the_store_learns_of_them_later(
    toy: Callable[..., ToyApp], store: RedisServer
) -> None:
    app = toy(2, settings={"store_timeout_s": 0.2, "store_retry_s": 0.2})
    before = app.turns(_programs(10))
    store.kill()
    assert app.turns(_programs(10)) == before
    new = app.turns([f"new-{number}" for number in range(10)])
    assert len(set(new.values())) == 2
    assert app.turns(list(new)) == new
    store.start()  # empty: what it held is lost
    wait_for(lambda: new.items() <= app.bindings(store).items(), what="the store learns of the new programs")
    assert app.turns(_programs(10)) == before
    assert app.turns(list(new)) == new


def test_a_store_that_hangs_delays_a_turn_and_stops_none(toy: Callable[..., ToyApp], store: RedisServer) -> None:
    app = toy(2, settings={"store_timeout_s": 0.2, "store_retry_s": 0.2})
    before = app.turns(_programs(6))
    store.pause()
    try:
        assert app.turns(_programs(6)) == before
        assert len(app.turns([f"new-{number}" for number in range(20)])) == 20
    finally:
        store.resume()
    assert app.turns(_programs(6)) == before


def test_a_replica_that_dies_while_the_store_is_away_moves_its_programs_for_good(
    toy: Callable[..., ToyApp], store: RedisServer
) -> None:
    app = toy(2, settings={"store_timeout_s": 0.2, "store_retry_s": 0.2})
    answers = {name: app.turn(name) for name in _programs(10)}
    store.pause()
    try:
        victim = answers["program-0"]
        os.kill(victim["pid"], signal.SIGKILL)
        during = app.turns(_programs(10))
    finally:
        store.resume()
    assert victim["replica"] not in during.values()
    wait_for(lambda: during.items() <= app.bindings(store).items(), what="the store learns where they are now")
    assert app.turns(_programs(10)) == during
