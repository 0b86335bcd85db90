"""How a sandbox is started and ended, wherever it is: the port between what uses sandboxes and what makes their processes.

A launcher turns a `SpawnPlan` into a stream to what the plan starts, and a future that says when nothing of it is left. Two exist:
`launcher_client.py` starts processes of this machine; `kubernetes_pods.py` has a cluster make pods, whose stream it carries over
a web socket. The stream is a local socket in either case, so nothing else knows which it is.

Where programs' files lie is the second difference. A process of this machine is shown the workspace itself; a pod has files of its
own, and the workspace is copied in when it starts and out when it rests (`workspace_copies.py`).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from tool_runtime.sandbox import SpawnPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """How a sandbox's outermost process ended."""

    #: As in `subprocess`: negative for a signal; None where it is not known.
    status: int | None
    #: The beginning of what it wrote to standard error, or of what is known instead.
    stderr: str
    #: Which limit it exceeded, where that is why it was killed unasked.
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spawned:
    """A sandbox that was started; its agent may not be ready yet."""

    id: str
    #: The outermost process on this machine; None where it runs elsewhere.
    pid: int | None
    #: The stream to its agent.
    socket: socket.socket
    exited: asyncio.Future[Exit]


class RemoteFiles(Protocol):
    """Moves the files of sandboxes that have theirs elsewhere."""

    async def copy_in(self, child: Spawned, archive: AsyncIterator[bytes]) -> None:
        """Unpack a tar into the sandbox's workspace.

        Raises:
            SandboxUnavailable: it cannot be done; what is there is incomplete.
        """
        ...

    def copy_out(self, child: Spawned) -> AsyncGenerator[bytes, None]:
        """The sandbox's workspace as a tar. It comes from the sandbox, and so may be anything.

        Raises:
            SandboxUnavailable: meanwhile; what came is not a whole archive.
        """
        ...


class Launcher(Protocol):
    """Starts and ends sandboxes."""

    @property
    def files(self) -> RemoteFiles | None:
        """None where sandboxes see this machine's own directories."""
        ...

    async def spawn(self, plan: SpawnPlan) -> Spawned:
        """Start `plan`.

        Raises:
            SandboxUnavailable: it cannot be started; the message has the reason, and nothing is left of it.
        """
        ...

    async def watch(self, child: Spawned, *, is_busy: bool) -> None:
        """Say whether something runs in it, which may decide how closely its memory is watched."""
        ...

    async def kill(self, child: Spawned) -> None:
        """End everything in a sandbox; `child.exited` is set when it is gone. Does nothing for one that is."""
        ...

    async def close(self) -> None:
        """End every sandbox; returns when nothing is left."""
        ...
