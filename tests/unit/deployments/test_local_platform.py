"""What is checked before anything is started, and what a private Ray cluster is told."""

from __future__ import annotations

import os
import socket

import pytest
from typer.testing import CliRunner

from deployments.cli import app
from deployments.local_platform import ListenOn, PlatformStartError, _ray_cpus, local_platform
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
