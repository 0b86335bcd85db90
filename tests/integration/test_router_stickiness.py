"""The router on real Ray Serve with toy replicas and a real Valkey: who answered tells where each request went."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from support.redis_server import RedisServer, free_port, valkey_binary
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

    def call(self, method: str, program_id: str, *arguments: Any) -> Any:
        handle = getattr(self.handle().options(session_id=program_id), method)
        return handle.remote(*arguments).result(timeout_s=60)

    def bindings(self, store: RedisServer, label: str = "") -> dict[str, str]:
        """What the store says: program → replica, for the programs whose name starts with the label."""
        prefix = b"continuum:bindings:engine:"
        with store.client() as client:
            keys = list(client.scan_iter(prefix + label.encode() + b"*"))
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


Deploy = Callable[..., ToyApp]


@contextmanager
def _deploying(store: RedisServer, name: str) -> Iterator[Deploy]:
    from ray import serve

    serve.start(http_options={"host": "127.0.0.1", "port": HTTP_PORT})

    def deploy(replicas: int, **args: Any) -> ToyApp:
        app = ToyApp(name, {"store_url": store.url, **args})
        app.scale(replicas)
        return app

    yield deploy
    serve.delete(name)


@pytest.fixture
def toy(store: RedisServer, request: pytest.FixtureRequest) -> Iterator[Deploy]:
    """Deploys an app of the test's own. Its name is the test's: a handle, and with it the router and its store, outlives an app
    that is deployed again."""
    with _deploying(store, request.node.name[:60]) as deploy:
        yield deploy


@pytest.fixture(scope="module")
def calm_store() -> Iterator[RedisServer]:
    """The store of the calm app."""
    with RedisServer(valkey_binary()) as server:
        yield server


@pytest.fixture(scope="module")
def calm(ray_cluster: None, calm_store: RedisServer) -> Iterator[ToyApp]:
    """Two replicas for the tests that leave them as they are. Each test uses program names of its own."""
    with _deploying(calm_store, "calm") as deploy:
        yield deploy(2, settings={"routing_stats_period_s": 0.1})


def _programs(label: str, count: int) -> list[str]:
    return [f"{label}-{number}" for number in range(count)]


# Nothing goes wrong


def test_programs_that_arrive_together_split_evenly_and_stay_where_they_are(calm: ToyApp) -> None:
    names = _programs("even", 24)
    first = calm.turns(names, slow_s=0.05)
    shares = sorted(Counter(first.values()).values())
    assert len(shares) == 2
    assert shares[0] >= 10
    for _ in range(3):
        assert calm.turns(names) == first


def test_calls_made_at_once_within_one_http_request_are_all_routed(calm: ToyApp) -> None:
    answer = httpx.get(calm.url, params={"program": "fan-out", "calls": 12}, timeout=60)
    assert answer.status_code == 200
    assert len(answer.json()) == 12
    assert len(set(answer.json())) == 1


def test_every_process_sends_a_program_to_the_same_replica(calm: ToyApp) -> None:
    from_here = calm.turns(_programs("shared", 12))
    door = calm.handle("ToyFrontDoor")
    from_the_door = {name: door.parallel.remote(name, 1) for name in _programs("shared", 24)}
    seen = {name: response.result(timeout_s=60)[0] for name, response in from_the_door.items()}
    assert {name: seen[name] for name in from_here} == from_here
    assert calm.turns(_programs("shared", 24)) == seen


def test_an_event_goes_to_the_programs_replica_and_binds_none_that_has_none(
    calm: ToyApp, calm_store: RedisServer
) -> None:
    homes = calm.turns(_programs("told", 6))
    for name, home in homes.items():
        assert calm.call("tool_event", name)["replica"] == home
    calm.call("tool_event", "told-nothing-yet")
    assert calm.bindings(calm_store, "told") == homes


def test_a_released_program_is_forgotten_by_the_store(calm: ToyApp, calm_store: RedisServer) -> None:
    homes = calm.turns(_programs("ending", 4))
    assert calm.call("release_program", "ending-0")["replica"] == homes.pop("ending-0")
    wait_for(lambda: calm.bindings(calm_store, "ending") == homes, what="one binding is gone and no other")


def test_requests_without_a_program_are_spread_and_bind_nothing(calm: ToyApp, calm_store: RedisServer) -> None:
    before = calm.bindings(calm_store)
    responses = [calm.handle().turn.remote(0.2) for _ in range(20)]
    spread = Counter(response.result(timeout_s=60)["replica"] for response in responses)
    assert len(spread) == 2
    assert min(spread.values()) >= 5  # programs bound by other tests weigh as well
    assert calm.bindings(calm_store) == before


def test_new_programs_prefer_the_replica_that_reports_the_smaller_load(calm: ToyApp) -> None:
    homes = calm.turns(_programs("first", 64))  # more than other tests may have left on one of them
    here, there = sorted(set(homes.values()))
    loaded = next(name for name, home in homes.items() if home == here)
    fresh = (f"fresh-{number}" for number in range(100_000))
    calm.call("report_load", loaded, {"waiting": 40})
    try:
        # Reports travel by the controller: until they have arrived programs may go either way.
        wait_for(
            lambda: set(calm.turns([next(fresh) for _ in range(4)]).values()) == {there},
            what="new programs avoid the loaded replica",
        )
        assert calm.turn(loaded)["replica"] == here  # a bound one stays
    finally:
        calm.call("report_load", loaded, {})


# Replicas come and go


def test_scaling_up_moves_nobody_and_scaling_down_only_the_programs_of_the_replica_that_leaves(toy: Deploy) -> None:
    app = toy(2)
    names = _programs("program", 20)
    before = app.turns(names)
    app.scale(3)
    late = (f"late-{number}" for number in range(100_000))
    newcomers: dict[str, str] = {}
    wait_for(
        lambda: newcomers.update(app.turns([next(late)])) or set(newcomers.values()) - set(before.values()),
        what="a new program goes to the new replica",
    )
    assert app.turns(names) == before
    before |= newcomers
    app.scale(2)
    after = app.turns(list(before))
    left = set(before.values()) - set(after.values())
    assert len(left) == 1
    assert {name for name in before if before[name] != after[name]} == {name for name in before if before[name] in left}


def test_killing_a_replica_moves_only_its_programs_and_its_replacement_pulls_nobody_back(toy: Deploy) -> None:
    app = toy(2)
    names = _programs("program", 20)
    answers = {name: app.turn(name) for name in names}
    before = {name: answer["replica"] for name, answer in answers.items()}
    victim = answers[names[0]]
    os.kill(victim["pid"], signal.SIGKILL)
    after = app.turns(names)
    assert victim["replica"] not in after.values()
    assert {name for name in names if before[name] != after[name]} == {
        name for name in names if before[name] == victim["replica"]
    }
    wait_for(lambda: app.is_running(2), what="the replacement runs")
    assert app.turns(names) == after


def test_a_burst_of_one_program_stays_on_one_replica_though_it_is_full(toy: Deploy) -> None:
    app = toy(2, max_ongoing_requests=2)
    handle = app.handle().options(session_id="busy")
    responses = [handle.turn.remote(0.02) for _ in range(40)]
    assert len({response.result(timeout_s=60)["replica"] for response in responses}) == 1


# The store goes and comes back


def test_without_the_store_programs_stay_new_ones_start_lost_replicas_are_left_and_the_store_learns_of_it_all(
    toy: Deploy, store: RedisServer
) -> None:
    app = toy(2, settings={"store_timeout_s": 0.2, "store_retry_s": 0.2})
    names, later = _programs("program", 10), _programs("later", 10)
    answers = {name: app.turn(name) for name in names}
    before = {name: answer["replica"] for name, answer in answers.items()}

    store.pause()  # it hangs, as behind a partition
    assert app.turns(names) == before
    new = app.turns(later)
    assert new.keys() == set(later)
    store.resume()
    wait_for(lambda: new.items() <= app.bindings(store).items(), what="the store learns of the new programs")

    store.kill()
    victim = answers[names[0]]
    os.kill(victim["pid"], signal.SIGKILL)
    during = app.turns(names + later)
    assert victim["replica"] not in during.values()
    store.start()  # empty: what it held is lost
    assert app.turns(names + later) == during
    wait_for(lambda: app.bindings(store) == during, what="the store has every binding anew")
    assert app.turns(names + later) == during
