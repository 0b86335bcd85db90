"""A cgroup (version 2) for each sandbox, where the machine lets us have one. Standard library only: the launcher uses it.

    <parent>/sandbox-<id>     memory.max  memory.swap.max  memory.oom.group  pids.max  cpu.max  cgroup.kill

What a cgroup does better than the watchdog: it counts kernel memory as well (inodes of a memory filesystem, page tables, sockets),
it counts at once and not every tenth of a second, it bounds CPU time, and its kill outruns a fork bomb.

It needs a directory of our own below /sys/fs/cgroup in which we may make others, with the memory and pids controllers handed down:
`Delegate=yes` of systemd, or a pod with writable cgroups. Whether there is one is found out by making a cgroup and taking it away.
"""

from __future__ import annotations

import os
from pathlib import Path

_NEEDED = ("memory", "pids")
_WANTED = (*_NEEDED, "cpu")
_CPU_PERIOD_US = 100_000


class NoCgroup(Exception):
    """There is none to be had; the message says why."""


def delegated_parent(configured: Path | None, *, hierarchy: Path = Path("/sys/fs/cgroup")) -> Path:
    """The directory in which cgroups can be made: `configured`, otherwise our own.

    Raises:
        NoCgroup: it cannot be used.
    """
    parent = configured or hierarchy / _own_path().lstrip("/")
    try:
        controllers = set((parent / "cgroup.controllers").read_text().split())
    except OSError as exc:
        raise NoCgroup(f"{parent} is no cgroup of version 2") from exc
    if missing := set(_NEEDED) - controllers:
        raise NoCgroup(f"{parent} has no controller for {', '.join(sorted(missing))}")
    _hand_down(parent, [name for name in _WANTED if name in controllers])
    probe = SandboxCgroup(parent, f"probe-{os.getpid()}")
    try:
        probe.make(memory_bytes_max=2**26, processes_max=8, cpus_max=None)
    finally:
        probe.remove()
    return parent


def found_parent(configured: Path | None) -> tuple[Path | None, str]:
    """`delegated_parent`, or None; and in words, for people, how limits are held then."""
    try:
        parent = delegated_parent(configured)
    except NoCgroup as exc:
        return None, f"rlimits and a watchdog: {exc}"
    return parent, f"cgroups in {parent}"


def _own_path() -> str:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError as exc:
        raise NoCgroup("there are no cgroups") from exc
    return next((line[3:] for line in lines if line.startswith("0::")), "/")


def _hand_down(parent: Path, controllers: list[str]) -> None:
    control = parent / "cgroup.subtree_control"
    try:
        if set(controllers) - set(control.read_text().split()):
            control.write_text(" ".join(f"+{name}" for name in controllers))
    except OSError as exc:
        # EBUSY: processes of ours are in it, and a cgroup hands controllers down or has processes, not both.
        raise NoCgroup(f"{parent} cannot hand its controllers down: {exc.strerror}") from exc


class SandboxCgroup:
    """One sandbox's cgroup."""

    def __init__(self, parent: Path, name: str) -> None:
        self._path = parent / name

    def make(self, *, memory_bytes_max: int, processes_max: int, cpus_max: float | None) -> None:
        """Make it, with its limits.

        Raises:
            NoCgroup: it cannot be made, or does not take a limit; nothing is left of it.
        """
        limits = {
            "memory.max": str(memory_bytes_max),
            "memory.oom.group": "1",  # all of the sandbox ends, as when the watchdog ends it
            "pids.max": str(processes_max),
        }
        if cpus_max is not None:
            limits["cpu.max"] = f"{int(cpus_max * _CPU_PERIOD_US)} {_CPU_PERIOD_US}"
        try:
            self._path.mkdir()
            for name, value in limits.items():
                self._set(name, value)
            if (self._path / "memory.swap.max").exists():  # the kernel may have no swap accounting
                self._set("memory.swap.max", "0")
        except OSError as exc:
            self.remove()
            raise NoCgroup(f"no cgroup can be made in {self._path.parent}: {exc}") from exc

    def open_procs(self) -> int:
        """A descriptor to which a process writes 0 to enter. Whoever opened it must have the right, not who writes."""
        return os.open(self._path / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)

    def kill(self) -> None:
        """SIGKILL to everything in it, in one step."""
        try:
            self._set("cgroup.kill", "1")
        except OSError:
            return  # a kernel before 5.14: the launcher's other ways remain

    def excess(self) -> str:
        """What it had too much of, in words, if the kernel ended something for it; empty otherwise."""
        if self._count("memory.events", "oom_kill") or self._count("memory.events", "oom_group_kill"):
            return f"it used more than {self._number('memory.max') // 2**20} MiB of memory"
        return ""

    def remove(self) -> None:
        """Take it away; it must be empty of processes."""
        try:
            self._path.rmdir()
        except OSError:
            return  # it was not made, or a process is still leaving; an empty one costs nothing

    def _set(self, name: str, value: str) -> None:
        # Never created: on anything but a cgroup filesystem that would look like success.
        fd = os.open(self._path / name, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, value.encode())
        finally:
            os.close(fd)

    def _number(self, name: str) -> int:
        try:
            return int((self._path / name).read_text())
        except (OSError, ValueError):
            return 0

    def _count(self, name: str, key: str) -> int:
        try:
            lines = (self._path / name).read_text().splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith(f"{key} ")), 0)
