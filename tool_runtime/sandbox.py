"""The sandbox port: what a backend must say about how it isolates a program, and what running something in one yields.

A backend is a *plan maker*: it turns a `SandboxSpec` into a `SpawnPlan`, the command line and data that start the exec agent
(`tool_runtime/inside/agent.py`) behind its walls. Everything after that is the same for all: the launcher starts the plan,
`LiveSandbox` talks to the agent, the probes try to get out. Adding a backend adds one plan maker, and changes nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tool_runtime.config import OutputLimits, SandboxLimits

if TYPE_CHECKING:
    import asyncio

#: Where a program finds its workspace, in every backend that has a filesystem of its own.
WORKSPACE_INSIDE = "/workspace"


class KillScope(StrEnum):
    """What one SIGKILL by the agent reaches."""

    #: The sandbox has a pid namespace: `kill(-1)` ends everything in it.
    NAMESPACE = "namespace"
    #: It has none, but may signal nothing outside itself: `kill(-1)` ends everything in it as well. Should the agent be gone,
    #: the launcher kills its descendants.
    DOMAIN = "domain"
    #: It could signal anything: nobody calls `kill(-1)`, the launcher kills the agent's descendants, and the sandbox ends.
    DESCENDANTS = "descendants"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerCommand:
    """A program to run in a sandbox in the agent's place, with the host at its standard input and output."""

    argv: tuple[str, ...]
    #: Added to the sandbox's own environment.
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Files and directories of the host that it needs, shown read-only under their own names.
    readable: tuple[Path, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxSpec:
    """One sandbox that is wanted."""

    #: The program's workspace on the host.
    workspace: Path
    #: User and group that the sandbox runs as; None for the platform's own, where that is not root.
    uid: int | None
    limits: SandboxLimits
    #: Port on the sandbox's own loopback at which it finds the egress proxy; None for no network at all.
    proxy_port: int | None = None
    #: None for the exec agent.
    server: ServerCommand | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SpawnPlan:
    """What the launcher needs to start a sandbox. `{fd:NAME}` in `argv` and `extra_args` stands for a descriptor."""

    executable: str
    #: `argv[0]` is what the program sees as its own name: nothing of the host's paths.
    argv: tuple[str, ...]
    #: Given through the descriptor `{fd:args}`, NUL-separated: it keeps them out of the process list.
    extra_args: tuple[str, ...] = ()
    #: Contents of read-only memory files, by the name that `{fd:NAME}` uses. `control` is reserved for the agent's socket.
    blobs: Mapping[str, bytes] = field(default_factory=dict)
    #: The same for contents that are this plan's alone and not worth keeping for others.
    own_blobs: Mapping[str, bytes] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "/"
    uid: int | None = None
    #: What all its processes together may hold.
    memory_bytes_max: int
    #: How many processes and threads it may have, where nothing else counts them; None where the kernel does.
    processes_max: int | None = None
    #: What a cgroup counts, where the launcher has one for it: processes and threads, and CPUs.
    cgroup_processes_max: int
    cpus_max: float | None = None
    #: Files and directories in the memory filesystems that are the sandbox's own; None where it has none.
    tmp_files_max: int | None = None
    kill_scope: KillScope = KillScope.NAMESPACE
    #: The agent's first message comes with a listening socket, for the egress proxy.
    hands_out_listener: bool = False


class Sandboxing(Protocol):
    """A backend."""

    @property
    def name(self) -> str:
        """As in the settings and in `/readyz`."""
        ...

    @property
    def isolates(self) -> bool:
        """Probes must pass before anything runs in it. Only `unsafe_local` says no."""
        ...

    @property
    def has_own_view(self) -> bool:
        """Programs see their workspace under one name, whatever it is called on the host: it may be renamed under them."""
        ...

    def plan(self, spec: SandboxSpec) -> SpawnPlan:
        """How to start a sandbox for `spec`. Starts nothing."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkspaceUsage:
    """How much a workspace holds; at least this much where a limit ended the count."""

    disk_bytes: int
    #: Files, directories and everything else that has a name.
    entries: int
    is_too_deep: bool = False


class Ending(StrEnum):
    """Why an execution is over."""

    FINISHED = "finished"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    #: It used more of something than it may: output, memory, disk.
    LIMIT = "limit"
    #: The sandbox died under it, or was killed because of another call.
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundedText:
    """A stream's head and tail."""

    text: str = ""
    #: Bytes that were dropped between the two.
    truncated_bytes: int = 0
    #: Ends of lines among them.
    truncated_lines: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """What running something in a sandbox came to."""

    ending: Ending
    exit_code: int | None
    stdout: BoundedText
    stderr: BoundedText
    duration_s: float
    #: The kept shell or Python that ran it is gone, and its variables with it.
    session_lost: bool = False
    #: Why, where `ending` needs a reason: what the sandbox said as it died, or what could not be started.
    reason: str = ""


class Executor(Protocol):
    """What runs a tool: a live sandbox, or something of the host's that needs none."""

    async def execute(
        self,
        tool: str,
        fields: Mapping[str, Any],
        *,
        timeout_s: float,
        grace_s: float,
        output: OutputLimits,
        cancelled: asyncio.Event | None = None,
    ) -> Execution:
        """Run one call, whose arguments are `fields`, to its end, which comes a few seconds after `timeout_s` and `grace_s` at the latest."""
        ...
