"""What is checked before anything is started, what a private Ray cluster is told, and how an interrupt ends the start."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from typer.testing import CliRunner

from deployments.cli import app
from deployments.local_platform import ListenOn, PlatformStartError, Starters, _ray_cpus, local_platform
from deployments.settings import PlatformSettings, ReplicaSettings

OPEN = PlatformSettings.model_validate({"http": {"open_without_keys": True}})


def test_a_port_that_is_taken_is_said_before_anything_starts() -> None:
    stages: list[str] = []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = ListenOn(port=taken.getsockname()[1])
        with (
            pytest.raises(PlatformStartError, match=rf"cannot listen on 127\.0\.0\.1:{listen.port}"),
            local_platform(PlatformSettings(), listen, on_stage=stages.append),
        ):
            raise AssertionError("it must not start")
        assert stages == []
        assert CliRunner().invoke(app, ["serve", "--port", str(listen.port)]).exit_code == 1


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    with (
        pytest.raises(PlatformStartError, match=r"cannot listen on 192\.0\.2\.1"),
        local_platform(OPEN, ListenOn(host="192.0.2.1", port=0), on_stage=lambda _: None),
    ):
        raise AssertionError("it must not start")


def test_one_machine_is_told_to_have_the_cpus_that_the_replicas_ask_for() -> None:
    # 3 services and a store at 1 CPU each, and 200 engines at 2: 404
    many = ReplicaSettings(engine=200, engine_cpus=2, service_cpus=1)
    assert _ray_cpus(many) == max(404, os.cpu_count() or 1)


def test_a_small_platform_is_told_the_truth() -> None:
    few = ReplicaSettings(engine=1, engine_cpus=0.1, service_cpus=0.1)
    assert _ray_cpus(few) == os.cpu_count()


def test_a_store_port_in_use_is_named_with_the_settings_to_change() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = PlatformSettings.model_validate({"store": {"embedded_port": port}})
        with (
            pytest.raises(PlatformStartError, match=f"127.0.0.1:{port}.*store.embedded_port"),
            local_platform(settings, ListenOn(port=0), on_stage=lambda stage: None),
        ):
            raise AssertionError("it must not start")


def raises_it(number: int) -> None:
    os.kill(os.getpid(), number)
    raise AssertionError("the signal was not raised here")


def loses_it(number: int) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        os.kill(os.getpid(), number)


def takes_the_signal_first(number: int) -> None:
    """Ray's start sets a handler of SIGTERM that exits."""
    signal.signal(signal.SIGTERM, lambda number, _frame: exit(number))
    raises_it(number)


@dataclass
class Start:
    """A platform whose parts are doubles: one of them gets a signal while it starts."""

    during: str
    arrives: Callable[[int], None] = raises_it
    number: int = signal.SIGINT
    done: list[str] = field(default_factory=list)

    def starters(self) -> Starters:
        def app(_settings: object, _listen: object, _port: int, stack: contextlib.ExitStack, _say: object) -> None:
            stack.callback(self.done.append, "app stopped")
            self._starts("app")

        return Starters(
            ray=lambda **_: self._starts("ray"),
            stop_ray=lambda: self.done.append("ray stopped"),
            model=lambda _: self._starts("model"),
            app=app,
        )

    def _starts(self, part: str) -> None:
        self.done.append(part)
        if part == self.during:
            self.arrives(self.number)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the last processes were waited for; none of the tests' own are looked for."""
    graces: list[float] = []

    def end(*, grace_s: float) -> list[str]:
        graces.append(grace_s)
        return []

    monkeypatch.setattr("deployments.local_platform.end_descendants", end)
    monkeypatch.setattr("deployments.local_platform.adopt_orphans", lambda: None)
    return graces


@pytest.fixture
def ignored_interrupts() -> Iterator[None]:
    """As a shell leaves them to what it starts in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "the handler is put back"
    signal.signal(signal.SIGINT, before)


def run(start: Start) -> None:
    settings = PlatformSettings.model_validate({"store": {"redis_url": "redis://127.0.0.1:1"}})
    with (
        pytest.raises(KeyboardInterrupt),
        local_platform(settings, ListenOn(port=0), on_stage=lambda _: None, starters=start.starters()),
    ):
        raise AssertionError("it must not get this far")


STARTED = {
    "model": ["model"],
    "ray": ["model", "ray", "ray stopped"],
    "app": ["model", "ray", "app", "app stopped", "ray stopped"],
}


@pytest.mark.usefixtures("ended", "ignored_interrupts")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("arrives", [raises_it, loses_it])
@pytest.mark.parametrize("during", STARTED)
def test_an_interrupt_ends_the_start_wherever_it_comes_and_even_if_a_part_loses_it(
    during: str, arrives: Callable[[int], None], number: int
) -> None:
    start = Start(during=during, arrives=arrives, number=number)
    run(start)
    assert start.done == STARTED[during]


@pytest.mark.usefixtures("ended")
def test_the_handler_that_ray_sets_while_it_starts_makes_an_interrupt_too() -> None:
    start = Start(during="ray", arrives=takes_the_signal_first, number=signal.SIGTERM)
    run(start)
    assert start.done == STARTED["ray"]


def test_processes_of_a_ray_that_did_not_start_are_not_waited_for(ended: list[float]) -> None:
    run(Start(during="ray"))
    assert ended == [0.0]
    run(Start(during="app"))
    assert ended[1] > 0
