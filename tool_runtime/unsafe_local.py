"""No isolation at all: tools run as the platform's own user, with its files and its network.

For a developer who trusts the programs, and only when the settings name it. It is also what the probes are tried against: a
probe that reports nothing here would report nothing anywhere.
"""

from __future__ import annotations

import os
from pathlib import Path

from tool_runtime.bubblewrap import inside_command
from tool_runtime.sandbox import KillScope, SandboxSpec, SpawnPlan


class UnsafeLocal:
    """Programs run as they are."""

    name = "unsafe_local"
    isolates = False
    has_own_view = False

    def __init__(self, python: Path) -> None:
        self._python = python

    def plan(self, spec: SandboxSpec) -> SpawnPlan:
        package_root = str(Path(__file__).resolve().parent.parent)
        return SpawnPlan(
            executable=str(self._python),
            argv=inside_command(self._python, package_root, spec, KillScope.DESCENDANTS),
            environment={
                "PATH": os.defpath,
                "HOME": str(spec.workspace),
                "LANG": "C.UTF-8",
                "TERM": "dumb",
                **(spec.server.environment if spec.server is not None else {}),
            },
            cwd=str(spec.workspace),
            memory_bytes_max=spec.limits.memory_bytes_max,
            cgroup_processes_max=spec.limits.processes_max,
            cpus_max=spec.limits.cpus_max,
            kill_scope=KillScope.DESCENDANTS,
        )
