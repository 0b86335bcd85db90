"""The Landlock backend: for machines that grant no namespaces, such as pods under the runtime's default seccomp profile.

A tier below bubblewrap. It holds files, network, local sockets and signals; it has no view of its own: programs see the host's
paths (those that are granted), there is no /proc, no loopback, /tmp is a directory in the workspace, and memory filesystems are
not there at all. What stays open when sandboxes run as the platform's own user: changing modes, times and attributes of that
user's files outside (Landlock does not know these). As root each program has a user of its own, which closes that too.

No socket opens at all, so no local socket of the host can be reached, which Landlock alone would allow; and the calls that act
on other processes by number (limits, priorities, affinity) or on shared memory of System V are refused, for the same reason.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

from tool_runtime import seccomp
from tool_runtime.bubblewrap import ENVIRONMENT, python_prefix, rlimits
from tool_runtime.process_tree import threads_of_user
from tool_runtime.sandbox import KillScope, SandboxSpec, SpawnPlan

#: Signals to the outside are held from this version; before it only a user of its own holds them. One or the other there must
#: be, for the agent itself counts on it when it signals everything that it may.
_ABI_WITH_SIGNALS, _ABI_LEAST = 6, 1
#: What a sandbox that shares its user may add to that user's processes before the kernel stops it; the watchdog, which counts
#: its own processes only, comes long before that unless it is outrun.
_FORK_BOMB_MAX = 4096
_READ = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_READ_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "ssl", "pki", "ca-certificates", "localtime")
_DEVICES = ("null", "zero", "full", "random", "urandom")

_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); from tool_runtime.inside import confine, agent; "
    "confine.confine(int(sys.argv[3]), int(sys.argv[4])); agent.main('', int(sys.argv[2]), *sys.argv[5:])"
)
_START_SERVER = _START.replace("confine, agent", "confine, server").replace("agent.main('', ", "server.main(")


class Landlock:
    """Sandboxes that a process builds around itself."""

    name = "landlock"
    isolates = True
    has_own_view = False

    def __init__(self, python: Path, agent_dir: Path, *, machine: str | None = None) -> None:
        """`agent_dir` holds the agent's package where the sandboxes' user can read it.

        Raises:
            UnsupportedArchitecture: there is no system-call filter for this processor.
        """
        self._python = python
        self._agent_dir = agent_dir
        architecture = seccomp.architecture(machine or platform.machine())
        self._filter = seccomp.filter_program(architecture, families=(), guards_other_processes=True)

    def plan(self, spec: SandboxSpec) -> SpawnPlan:
        fds = ("{fd:control}", "{fd:rules}", "{fd:seccomp}")
        limits = rlimits(
            spec.limits,
            processes_of_user_max=threads_of_user(os.geteuid()) + _FORK_BOMB_MAX if spec.uid is None else None,
        )
        return SpawnPlan(
            executable=str(self._python),
            argv=(
                *("python3", "-I", "-S", "-B", "-c", _START if spec.server is None else _START_SERVER),
                *(str(self._agent_dir), *fds),
                *(limits, KillScope.DOMAIN.value, "0"),  # no socket opens: a proxy could not be reached
                *(spec.server.argv if spec.server is not None else ()),
            ),
            blobs={"seccomp": self._filter},
            own_blobs={"rules": self._rules(spec)},
            environment=self._environment(spec),
            cwd=str(spec.workspace),
            uid=spec.uid,
            memory_bytes_max=spec.limits.memory_bytes_max,
            processes_max=spec.limits.processes_max,
            cgroup_processes_max=spec.limits.processes_max,
            cpus_max=spec.limits.cpus_max,
            kill_scope=KillScope.DOMAIN,
        )

    def _rules(self, spec: SandboxSpec) -> bytes:
        lines = [str(_ABI_WITH_SIGNALS if spec.uid is None else _ABI_LEAST)]
        readable = [*_READ, *(f"/etc/{name}" for name in _READ_ETC), str(self._agent_dir)]
        prefix = python_prefix(self._python)
        if prefix is not None:
            readable.append(str(prefix))
        if spec.server is not None:
            readable += [str(path) for path in spec.server.readable]
        lines += [f"read {path}" for path in readable]
        lines += [f"device /dev/{name}" for name in _DEVICES]
        lines.append(f"all {spec.workspace}")
        return os.fsencode("\n".join(lines))

    def _environment(self, spec: SandboxSpec) -> Mapping[str, str]:
        given = spec.server.environment if spec.server is not None else {}
        return {**ENVIRONMENT, "HOME": str(spec.workspace), "TMPDIR": str(spec.workspace / ".tmp"), **given}
