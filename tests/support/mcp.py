"""MCP servers of one's own for tests: how to start them in a sandbox, and one that answers by HTTP on loopback."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import mcp
import pytest

from support.waiting import wait_for_async
from tool_runtime.config import McpServerSettings

SERVERS = Path(__file__).parent / "servers"
PROBE, RAW = SERVERS / "mcp_probe.py", SERVERS / "mcp_raw.py"


def _shown_in_sandboxes(*paths: Path) -> tuple[Path, ...]:
    """The paths, which a sandbox can be shown; skips where the checkout lies in a place that is the sandbox's own."""
    for path in paths:
        if path.parts[:2] in (("/", "tmp"), ("/", "workspace")):
            pytest.skip(f"{path} cannot be shown in a sandbox, whose own {'/'.join(path.parts[:2])[1:]} hides it")
    return paths


def probe_by_stdio(**settings: Any) -> McpServerSettings:
    """The SDK's server, in a sandbox. Skips where no Python that sandboxes can run has this version, and so the SDK."""
    packages = Path(mcp.__file__).parent.parent
    wanted = f"{sys.version_info.major}.{sys.version_info.minor}"
    python = shutil.which(f"python{wanted}", path="/usr/bin:/usr/local/bin")
    if python is None:
        pytest.skip(f"there is no python{wanted} below /usr, which is what sandboxes show")
    return McpServerSettings(
        command=python,
        args=(str(PROBE),),
        env={"PYTHONPATH": str(packages)},
        readable=_shown_in_sandboxes(packages, SERVERS),
        **settings,
    )


def raw(*arguments: str, **settings: Any) -> McpServerSettings:
    """The server that needs the standard library only, in a sandbox."""
    return McpServerSettings(
        command="python3",
        args=("-S", str(RAW), *arguments),
        readable=_shown_in_sandboxes(SERVERS),
        **{"start_timeout_s": 20, **settings},
    )


class HttpProbe:
    """The SDK's server, on a port of the loopback interface; it can be killed and started again."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    def settings(self, **settings: Any) -> McpServerSettings:
        """How a platform reaches it."""
        return McpServerSettings(
            url=f"http://localhost:{self._port}/mcp", allow_addresses=("127.0.0.0/8", "::1/128"), **settings
        )

    async def start(self) -> None:
        """Start it and wait until it listens."""
        self._process = subprocess.Popen(  # noqa: ASYNC220 - it starts in a moment, and nothing else runs in a test meanwhile
            [sys.executable, str(PROBE), str(self._port)], stderr=subprocess.DEVNULL
        )
        await wait_for_async(self._answers, what="the MCP server listens")

    def kill(self) -> None:
        """End it without a good-bye."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
        except OSError:
            return False
        return True


@contextlib.asynccontextmanager
async def http_probe() -> AsyncIterator[HttpProbe]:
    """One that runs, and is gone at the end."""
    probe = HttpProbe()
    try:
        await probe.start()
        yield probe
    finally:
        probe.kill()
