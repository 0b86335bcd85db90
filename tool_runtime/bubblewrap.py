"""The bubblewrap backend: the flags that hold, and the reason for each that is not plain. Plans only; runs nothing.

Order matters. Nothing is mounted below a place that a program can write, because bubblewrap before 0.12 follows symbolic
links there while it still sees the host (GHSA-pxhw-h44j-8pfx): the workspace comes last, and the root is made read-only
after it. The plan is always run by a user other than root: the kernel lets uid 0 write /proc/sys/kernel/core_pattern from
inside any sandbox, and with it run code outside. /proc/sys is bound read-only all the same. bubblewrap's own environment
is empty, because /proc/1/environ shows it to the program even with --clearenv.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

from tool_runtime import seccomp
from tool_runtime.config import SandboxLimits
from tool_runtime.sandbox import WORKSPACE_INSIDE, KillScope, SandboxSpec, SpawnPlan

INSIDE_UID = "65534"
AGENT_DIR = "/.agent"
AGENT_PACKAGE = f"{AGENT_DIR}/tool_runtime/inside"
_AGENT_FILES = (
    *("frames.py", "processes.py", "sessions.py", "files.py", "agent.py", "python_session.py"),
    *("functions.py", "function_call.py", "server.py"),
)

SYSTEM_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
#: What programs need of /etc and what tells nothing about the host: loader cache, alternatives, certificates, time zone.
ETC_SHARED = (
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "alternatives",
    "ssl",
    "pki",
    "ca-certificates",
    "localtime",
)
ETC_WRITTEN: Mapping[str, str] = {
    "passwd": (
        "root:x:0:0:root:/root:/usr/sbin/nologin\n"
        f"sandbox:x:{INSIDE_UID}:{INSIDE_UID}:sandbox:{WORKSPACE_INSIDE}:/bin/bash\n"
    ),
    "group": f"root:x:0:\nsandbox:x:{INSIDE_UID}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}

ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": WORKSPACE_INSIDE,
    "USER": "sandbox",
    "TMPDIR": "/tmp",  # the sandbox's own
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
}


class Bubblewrap:
    """Sandboxes from namespaces and seccomp, made by the program `bwrap`."""

    name = "bubblewrap"
    isolates = True
    has_own_view = True

    def __init__(self, bwrap: Path, python: Path, *, machine: str | None = None) -> None:
        """`python` runs the agent, and its installation is shown to programs read-only where it lies outside /usr.

        Raises:
            UnsupportedArchitecture: there is no system-call filter for this processor.
        """
        self._bwrap = bwrap
        self._python = python
        self._filter = seccomp.filter_program(seccomp.architecture(machine or platform.machine()))
        package = Path(__file__).parent / "inside"
        self._agent = {name: (package / name).read_bytes() for name in _AGENT_FILES}

    def plan(self, spec: SandboxSpec) -> SpawnPlan:
        blobs = {"seccomp": self._filter, **self._agent}
        blobs |= {f"etc-{name}": text.encode() for name, text in ETC_WRITTEN.items()}
        return SpawnPlan(
            executable=str(self._bwrap),
            argv=(
                *("bwrap", "--args", "{fd:args}", "--"),
                *inside_command(self._python, AGENT_DIR, spec, KillScope.NAMESPACE),
            ),
            extra_args=(
                *_namespaces(spec),
                *_system(self._python),
                *_readable(spec),
                *_kernel_views(spec.limits),
                *_agent_files(),
                *("--perms", "1777", "--size", str(spec.limits.tmp_bytes_max), "--tmpfs", "/tmp"),
                *("--bind", str(spec.workspace), WORKSPACE_INSIDE, "--chdir", WORKSPACE_INSIDE),
                *("--remount-ro", "/"),
                *("--seccomp", "{fd:seccomp}"),
            ),
            blobs=blobs,
            uid=spec.uid,
            memory_bytes_max=spec.limits.memory_bytes_max,
            cgroup_processes_max=spec.limits.processes_max,
            cpus_max=spec.limits.cpus_max,
            tmp_files_max=spec.limits.tmp_files_max,
            kill_scope=KillScope.NAMESPACE,
            hands_out_listener=spec.proxy_port is not None,
        )


def inside_command(python: Path, agent_dir: str, spec: SandboxSpec, scope: KillScope) -> tuple[str, ...]:
    """The command line of the exec agent, or of what leads to the server that `spec` names; their package lies below `agent_dir`."""
    given = ("{fd:control}", rlimits(spec.limits), scope.value, str(spec.proxy_port or 0))
    if spec.server is not None:
        start = (
            f"import sys; sys.path.insert(0, {agent_dir!r}); from tool_runtime.inside import server; "
            "server.main(int(sys.argv[1]), *sys.argv[2:])"
        )
        return str(python), "-I", "-S", "-B", "-c", start, *given, *spec.server.argv
    start = (
        f"import sys; sys.path.insert(0, {agent_dir!r}); from tool_runtime.inside import agent; "
        "agent.main(sys.orig_argv[5], int(sys.argv[1]), *sys.argv[2:])"
    )
    return str(python), "-I", "-S", "-B", "-c", start, *given


def rlimits(limits: SandboxLimits, *, processes_of_user_max: int | None = None) -> str:
    """The limits that every process inside inherits, in the agent's notation.

    NPROC counts the processes and threads of a user in a user namespace, which are the sandbox's own if it has either to
    itself; if it has neither, `processes_of_user_max` has to be given.
    """
    values = {
        "NPROC": processes_of_user_max or limits.processes_max,
        "NOFILE": limits.open_files_max,
        "FSIZE": limits.file_bytes_max,
        "CORE": 0,
        "MEMLOCK": 0,
    }
    if limits.process_address_space_bytes_max is not None:
        values["AS"] = limits.process_address_space_bytes_max
    return ",".join(f"{name}={value}" for name, value in values.items())


def _namespaces(spec: SandboxSpec) -> tuple[str, ...]:
    of_proxy = _proxy_environment(spec.proxy_port) if spec.proxy_port is not None else {}
    named = {**ENVIRONMENT, **of_proxy, **(spec.server.environment if spec.server is not None else {})}
    environment = (word for name, value in named.items() for word in ("--setenv", name, value))
    return (
        *("--unshare-user", "--unshare-all", "--disable-userns"),
        *("--uid", INSIDE_UID, "--gid", INSIDE_UID, "--hostname", "sandbox"),
        *("--new-session", "--die-with-parent", "--clearenv", *environment),
    )


def _proxy_environment(port: int) -> Mapping[str, str]:
    """What programs look for, in both spellings."""
    proxy = f"http://127.0.0.1:{port}"
    named = {"http_proxy": proxy, "https_proxy": proxy, "no_proxy": "localhost,127.0.0.1"}
    return {**named, **{name.upper(): value for name, value in named.items()}}


def _system(python: Path) -> tuple[str, ...]:
    """/usr and what belongs to it, read-only; an /etc that names nobody; the agent's Python where that lies elsewhere."""
    words: list[str] = ["--ro-bind", "/usr", "/usr"]
    for name in SYSTEM_LINKS:
        path = Path("/", name)
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            words += ["--ro-bind", str(path), str(path)]
    words += ["--perms", "0755", "--dir", "/etc"]
    for name in ETC_SHARED:
        words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for name in ETC_WRITTEN:
        words += ["--perms", "0444", "--file", f"{{fd:etc-{name}}}", f"/etc/{name}"]
    prefix = python_prefix(python)
    if prefix is not None:
        words += ["--ro-bind", str(prefix), str(prefix)]
    return tuple(words)


def _readable(spec: SandboxSpec) -> tuple[str, ...]:
    """What a server needs of the host, read-only."""
    paths = spec.server.readable if spec.server is not None else ()
    return tuple(word for path in paths for word in ("--ro-bind", str(path), str(path)))


def _kernel_views(limits: SandboxLimits) -> tuple[str, ...]:
    return (
        *("--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys"),
        *("--dev", "/dev", "--size", str(limits.tmp_bytes_max), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
    )


def _agent_files() -> tuple[str, ...]:
    words = ["--dir", AGENT_DIR, "--dir", f"{AGENT_DIR}/tool_runtime", "--dir", AGENT_PACKAGE]
    for name in _AGENT_FILES:
        words += ["--perms", "0444", "--file", f"{{fd:{name}}}", f"{AGENT_PACKAGE}/{name}"]
    return tuple(words)


def find_python() -> Path:
    """The interpreter that runs agents: the system's where there is one, otherwise the platform's own."""
    for system in (Path("/usr/bin/python3"), Path("/usr/local/bin/python3")):
        if system.exists():
            return system
    return Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}")


def python_prefix(python: Path) -> Path | None:
    """The installation to show for `python`; None where /usr already holds it."""
    resolved = python.resolve()
    return None if resolved.is_relative_to("/usr") else resolved.parent.parent
