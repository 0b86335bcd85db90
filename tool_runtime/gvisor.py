"""The gVisor backend: each sandbox has a kernel of its own, the program `runsc`. Only where the settings name it.

The plan is an OCI runtime specification. Two things about how it gets to `runsc`:

- `runsc` wants a directory with `config.json` and a root filesystem in it. There is one for all sandboxes, made when the backend
  is, with nothing of any program in it; its `config.json` is a link to a descriptor, behind which each sandbox has its own.
- The agent's socket is handed in with `--pass-fd`. Neither arguments nor files of the host tell of the program.

A sandbox's processes are gVisor's own and invisible to the host, which sees `runsc` and ends that. No listener can be handed out
through gVisor's sockets, so there is no egress: programs have no network.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent_program.errors import SandboxUnavailable
from tool_runtime.bubblewrap import (
    AGENT_DIR,
    AGENT_PACKAGE,
    ENVIRONMENT,
    ETC_SHARED,
    ETC_WRITTEN,
    INSIDE_UID,
    SYSTEM_LINKS,
    inside_command,
    python_prefix,
)
from tool_runtime.sandbox import WORKSPACE_INSIDE, KillScope, SandboxSpec, SpawnPlan

#: Where the specification is when `runsc` starts, and where the agent finds its socket.
_CONFIG_FD, _CONTROL_FD_INSIDE = 9, 3
_BIND_READ_ONLY = ("bind", "ro", "nosuid", "nodev")
#: Opens the specification at its number and becomes `runsc`; bash, for sh takes no descriptor above 9 by its number.
_START = f'exec {_CONFIG_FD}<&"$0"; exec "$@"'
_DIRECTORIES = ("usr", "etc", "proc", "dev", "sys", "tmp", WORKSPACE_INSIDE.lstrip("/"))


class GVisor:
    """Sandboxes that `runsc` makes."""

    name = "gvisor"
    isolates = True
    has_own_view = True

    def __init__(self, runsc: Path, python: Path, bundle: Path, states: Path) -> None:
        """`bundle` is where `make_bundle` made one; `states` is where `runsc` keeps what it knows of each sandbox."""
        self._runsc = runsc
        self._python = python
        self._bundle = bundle
        self._states = states

    def plan(self, spec: SandboxSpec) -> SpawnPlan:
        name = f"runsc-{secrets.token_hex(8)}"
        flags = (
            "--network=none",
            "--host-uds=none",
            "--host-fifo=none",
            "--ignore-cgroups",
            "--file-access-mounts=shared",
        )
        run = ("run", f"--bundle={self._bundle}", f"--pass-fd={{fd:control}}:{_CONTROL_FD_INSIDE}", name)
        return SpawnPlan(
            executable="/bin/bash",
            argv=(
                *("bash", "-c", _START, "{fd:config}", str(self._runsc), f"--root={self._states / name}"),
                *(*flags, *(() if os.geteuid() == 0 else ("--rootless",)), *run),
            ),
            own_blobs={"config": json.dumps(self.specification(spec)).encode()},
            environment={"PATH": os.defpath},
            # runsc drops its own privileges; programs run as the workspace's owner, never as root.
            uid=None,
            memory_bytes_max=spec.limits.memory_bytes_max,
            cgroup_processes_max=spec.limits.processes_max,
            cpus_max=spec.limits.cpus_max,
            kill_scope=KillScope.DOMAIN,
        )

    def specification(self, spec: SandboxSpec) -> dict[str, Any]:
        """The OCI runtime specification of one sandbox."""
        uid = spec.uid if spec.uid is not None else int(INSIDE_UID)
        command = inside_command(self._python, AGENT_DIR, spec, KillScope.NAMESPACE)
        return {
            "ociVersion": "1.0.2",
            "hostname": "sandbox",
            "root": {"path": str(self._bundle / "rootfs"), "readonly": True},
            "process": {
                "terminal": False,
                "user": {"uid": uid, "gid": uid},
                "args": [str(_CONTROL_FD_INSIDE) if word == "{fd:control}" else word for word in command],
                "env": [f"{name}={value}" for name, value in self._environment(spec).items()],
                "cwd": WORKSPACE_INSIDE,
                "noNewPrivileges": True,
                "capabilities": {kind: [] for kind in ("bounding", "effective", "inheritable", "permitted", "ambient")},
            },
            "mounts": [*self._mounts(spec)],
            "linux": {
                "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")]
                + ([] if os.geteuid() == 0 else [{"type": "user"}]),
                **({} if os.geteuid() == 0 else _mapped(uid)),
            },
        }

    def _environment(self, spec: SandboxSpec) -> Mapping[str, str]:
        return {**ENVIRONMENT, **(spec.server.environment if spec.server is not None else {})}

    def _mounts(self, spec: SandboxSpec) -> list[dict[str, Any]]:
        size = f"size={spec.limits.tmp_bytes_max}"
        shown = [Path("/usr"), *_system_directories()]
        prefix = python_prefix(self._python)
        if prefix is not None:
            shown.append(prefix)
        shown += [path for name in ETC_SHARED if (path := Path("/etc", name)).exists()]
        shown += spec.server.readable if spec.server is not None else ()
        return [
            *(
                {"destination": str(path), "type": "bind", "source": str(path), "options": [*_BIND_READ_ONLY]}
                for path in shown
            ),
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {
                "destination": "/tmp",
                "type": "tmpfs",
                "source": "tmpfs",
                "options": ["nosuid", "nodev", "mode=1777", size],
            },
            {
                "destination": "/dev/shm",
                "type": "tmpfs",
                "source": "tmpfs",
                "options": ["nosuid", "nodev", "mode=1777", size],
            },
            # Last, and nothing below it, as in every backend.
            {
                "destination": WORKSPACE_INSIDE,
                "type": "bind",
                "source": str(spec.workspace),
                "options": ["bind", "rw", "nosuid", "nodev"],
            },
        ]


def bundle_files(package: Path) -> dict[str, bytes]:
    """The files of the one root filesystem, by their names in the bundle. `package` holds the agent's modules."""
    files = {f"rootfs/etc/{name}": text.encode() for name, text in ETC_WRITTEN.items()}
    for module in sorted(package.glob("*.py")):
        files[f"rootfs{AGENT_PACKAGE}/{module.name}"] = module.read_bytes()
    return files


def make_bundle(bundle: Path, python: Path, package: Path) -> None:
    """Make the directory that all sandboxes start from. `runsc` can't make mount points in a read-only root: they are made here.

    Raises:
        SandboxUnavailable: it cannot be made.
    """
    root = bundle / "rootfs"
    try:
        for name in _DIRECTORIES:
            (root / name).mkdir(parents=True, exist_ok=True)
        for path in _system_directories():
            (root / path.relative_to("/")).mkdir(exist_ok=True)
        for link in _system_links():
            _link(root / link.relative_to("/"), os.readlink(link))
        for name, content in bundle_files(package).items():
            path = bundle / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            path.chmod(0o644)
        prefix = python_prefix(python)
        if prefix is not None:
            (root / prefix.relative_to("/")).mkdir(parents=True, exist_ok=True)
        for shared in (Path("/etc", name) for name in ETC_SHARED):
            place = root / shared.relative_to("/")
            if shared.is_dir():
                place.mkdir(exist_ok=True)
            elif shared.exists():
                place.touch()
        for directory in (bundle, *(path for path in bundle.rglob("*") if path.is_dir() and not path.is_symlink())):
            directory.chmod(0o755)
        _link(bundle / "config.json", f"/proc/self/fd/{_CONFIG_FD}")
    except OSError as exc:
        raise SandboxUnavailable(f"the root filesystem for gVisor cannot be made: {exc}") from exc


def _system_links() -> list[Path]:
    return [path for name in SYSTEM_LINKS if (path := Path("/", name)).is_symlink()]


def _system_directories() -> list[Path]:
    return [path for name in SYSTEM_LINKS if (path := Path("/", name)).is_dir() and not path.is_symlink()]


def _link(path: Path, target: str) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def _mapped(uid: int) -> dict[str, Any]:
    """Without root there is one user to be had, the platform's own, which is shown under another number."""
    return {
        "uidMappings": [{"containerID": uid, "hostID": os.geteuid(), "size": 1}],
        "gidMappings": [{"containerID": uid, "hostID": os.getegid(), "size": 1}],
    }
