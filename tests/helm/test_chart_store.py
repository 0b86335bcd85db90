"""The store's container command and configuration, run on a real server: they start it, and say what the values say."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from support import chart
from support.redis_server import valkey_binary

#: What people paste into Secrets, and what a shell or a configuration file would stumble over.
PASSWORDS = ["a1b2c3d4", 'quote" back\\slash $(id) `id` $HOME # no comment %s ü€']


@contextmanager
def running_store(values: dict[str, Any], directory: Path, password: str | None) -> Iterator[redis.Redis]:
    """The StatefulSet's container as a process of this machine, its volumes below `directory`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here = {"extraConfig": f"port {port}\nbind 127.0.0.1", "serverCommand": valkey_binary()}
    values = {**values, "redis": values["redis"] | here}
    (stateful_set,) = chart.of_kind("StatefulSet", values)
    (container,) = stateful_set["spec"]["template"]["spec"]["containers"]
    (config,) = (one for one in chart.of_kind("ConfigMap", values) if "redis.conf" in one["data"])

    volumes = {"/etc/redis": "etc", "/run/redis": "run", "/data": "data"}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == set(volumes)

    def local(text: str) -> str:
        for path, name in volumes.items():
            text = text.replace(path, str(directory / name))
        return text

    for name in volumes.values():
        (directory / name).mkdir()
    (directory / "etc" / "redis.conf").write_text(local(config["data"]["redis.conf"]))
    environment = {"PATH": os.environ["PATH"]} | ({} if password is None else {"REDIS_PASSWORD": password})
    command = [local(one) for one in container["command"]]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        client = redis.Redis(port=port, password=password, socket_timeout=5, retry=None)
        deadline_s = time.monotonic() + 30
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError as error:
                if process.poll() is not None or time.monotonic() > deadline_s:
                    pytest.fail(f"{shlex.join(command)}: {error}\n{(directory / 'log').read_text()}")
                time.sleep(0.02)
        yield client
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("password", PASSWORDS)
def test_the_password_is_the_secrets_whatever_is_in_it(password: str, tmp_path: Path) -> None:
    with running_store({"redis": {}}, tmp_path, password) as client:
        assert client.ping()
        anonymous = redis.Redis(port=client.connection_pool.connection_kwargs["port"], retry=None)
        with pytest.raises(redis.AuthenticationError):
            anonymous.ping()


def test_the_password_is_in_no_command_line_and_in_a_file_that_only_the_server_reads(tmp_path: Path) -> None:
    with running_store({"redis": {}}, tmp_path, "s3cret") as client:
        pid = int(client.info("server")["process_id"])
        assert b"s3cret" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert (tmp_path / "run" / "redis.conf").stat().st_mode & 0o077 == 0


def test_state_is_never_evicted_and_is_written_to_the_volume(tmp_path: Path) -> None:
    with running_store({"redis": {"maxMemory": "64mb"}}, tmp_path, "x") as client:
        found = client.config_get("*")
        assert found["maxmemory"] == str(64 * 2**20)
        assert found["maxmemory-policy"] == "noeviction"
        assert (found["appendonly"], found["appendfsync"]) == ("yes", "everysec")
        assert found["dir"] == str(tmp_path / "data")


def test_without_password_and_volume_other_pods_can_still_connect(tmp_path: Path) -> None:
    values = {"redis": {"auth": {"enabled": False}, "persistence": {"enabled": False}}}
    with running_store(values, tmp_path, None) as client:
        found = client.config_get("*")
        # Protected mode would refuse whoever does not come over the loopback.
        assert found["protected-mode"] == "no"
        assert found["appendonly"] == "no"


def test_a_volume_outlives_the_release() -> None:
    (stateful_set,) = chart.of_kind("StatefulSet", {})
    assert stateful_set["spec"]["persistentVolumeClaimRetentionPolicy"] == {
        "whenDeleted": "Retain",
        "whenScaled": "Retain",
    }
    assert [one["metadata"]["name"] for one in stateful_set["spec"]["volumeClaimTemplates"]] == ["data"]


def test_changed_configuration_restarts_the_server() -> None:
    def checksum(values: dict[str, Any]) -> str:
        (stateful_set,) = chart.of_kind("StatefulSet", values)
        annotations: dict[str, str] = stateful_set["spec"]["template"]["metadata"]["annotations"]
        return annotations["checksum/config"]

    assert checksum({}) != checksum({"redis": {"maxMemory": "1gb"}})
