"""The embedded store keeps its data, defends it, and never outlives its parent."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from agent_program.errors import StoreUnavailable
from deployments.embedded_store import EmbeddedStore
from support.waiting import wait_for

pytestmark = pytest.mark.integration


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def running(data_dir: Path, port: int | None = None) -> AsyncIterator[EmbeddedStore]:
    store = EmbeddedStore(port=port or free_port(), data_dir=data_dir, memory_mib=64)
    await store.start()
    try:
        yield store
    finally:
        await store.stop()


async def test_what_it_holds_survives_a_restart(tmp_path: Path) -> None:
    for expected in (None, b"v"):
        async with running(tmp_path) as store, Redis.from_url(store.url) as client:
            assert await client.get("k") == expected
            await client.set("k", "v")


async def test_a_port_in_use_is_named_with_the_setting_to_change(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(StoreUnavailable, match=rf"port {port} .* store\.embedded_port"):
            await EmbeddedStore(port=port, data_dir=tmp_path, memory_mib=64).start()


async def test_a_directory_has_one_server_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.embedded_store._STOP_TIMEOUT_S", 0.2)
    async with running(tmp_path) as store:
        with pytest.raises(StoreUnavailable, match=r"store\.data_dir"):
            await EmbeddedStore(port=free_port(), data_dir=tmp_path, memory_mib=64).start()
        await store.check_health()


async def test_a_server_that_ended_is_unhealthy(tmp_path: Path) -> None:
    async with running(tmp_path) as store:
        assert store._process is not None
        store._process.kill()
        await store._process.wait()
        with pytest.raises(StoreUnavailable, match="has ended"):
            await store.check_health()


async def test_a_server_that_cannot_start_says_where_its_log_is(tmp_path: Path) -> None:
    (tmp_path / "appendonlydir").write_text("a file where the server wants a directory")
    with pytest.raises(StoreUnavailable, match=r"valkey\.log"):
        await EmbeddedStore(port=free_port(), data_dir=tmp_path, memory_mib=64).start()


async def test_it_is_full_rather_than_forgetful(tmp_path: Path) -> None:
    async with running(tmp_path) as store:
        assert (await store.status())["memory_max_bytes"] == 64 * 1024 * 1024


PARENT = """
import asyncio, sys
from pathlib import Path
from deployments.embedded_store import EmbeddedStore

async def main():
    store = EmbeddedStore(port=int(sys.argv[1]), data_dir=Path(sys.argv[2]), memory_mib=64)
    await store.start()
    print(store._process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_it_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(free_port()), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        server_pid = int(parent.stdout.readline())
        os.kill(server_pid, 0)
        parent.kill()
        parent.wait()
    wait_for(lambda: not is_alive(server_pid), what="the server to end after its parent")


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def test_a_start_waits_for_an_earlier_server_that_is_just_ending(tmp_path: Path) -> None:
    second = EmbeddedStore(port=free_port(), data_dir=tmp_path, memory_mib=64)
    async with running(tmp_path) as first:
        starting = asyncio.create_task(second.start())
        await asyncio.sleep(0.2)
        assert not starting.done()
        await first.stop()
        await starting
        await second.check_health()
        await second.stop()
