"""Where programs' files live on the host, and how they are removed.

    <state_dir>/workspaces/<opaque id>     one directory a program, mode 0700, owned by the sandbox's user
    <state_dir>/parked/<random>            workspaces of sandboxes that wait for a program
    <state_dir>/trash/<random>             what is being deleted
    <state_dir>/programs/<digest>          programs that sandboxes are made with, where their own place is out of reach

A workspace outlives sandboxes and actors; deleting it is asked for. The name is a digest of tenant and program, so that
nothing of either shows in a path inside the sandbox, and no id can name a directory outside.

What a program left is hostile: it is never opened, followed or run here, only renamed and unlinked.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import stat
from pathlib import Path

from agent_program.errors import SandboxUnavailable
from agent_program.ids import ProgramId, TenantId
from tool_runtime.sandbox import WorkspaceUsage

#: A deletion that did nothing for this long is nobody's any more.
_BROKEN_OFF_S = 600.0
#: A tree that is deeper than this is over the limit whatever it holds: nobody needs it, and counting it would cost depth.
_DEPTH_MAX = 200


class Workspaces:
    """All workspaces of a node."""

    def __init__(self, state_dir: Path, *, uid_first: int, uid_count: int) -> None:
        """`uid_first` and `uid_count` are used by root only; others own their sandboxes' files themselves.

        Raises:
            SandboxUnavailable: the directory cannot be made, belongs to someone else, or the sandbox's user cannot reach it.
        """
        self._is_root = os.geteuid() == 0
        self._uid_first, self._uid_count = uid_first, uid_count
        self._root = state_dir.absolute()
        self._workspaces, self._trash = self._root / "workspaces", self._root / "trash"
        self._parked, self.programs = self._root / "parked", self._root / "programs"
        #: Locks on our parked workspaces, by which others know that somebody lives.
        self._locks: dict[Path, int] = {}
        # Root's sandboxes run as other users, who must pass through but see no names.
        mode = 0o711 if self._is_root else 0o700
        try:
            for directory in (self._root, self._workspaces, self._parked, self._trash, self.programs):
                directory.mkdir(mode=mode, parents=True, exist_ok=True)
                _check_own(directory)
                directory.chmod(mode)
        except OSError as exc:
            raise SandboxUnavailable(f"the state directory {self._root} cannot be used: {exc}") from exc
        if self._is_root:
            _check_reachable(self._root)

    def path(self, tenant_id: TenantId, program_id: ProgramId) -> Path:
        """Where the program's workspace is, whether or not it exists."""
        return self._workspaces / _digest(tenant_id, program_id)[:32]

    def uid(self, tenant_id: TenantId, program_id: ProgramId) -> int | None:
        """The user that the program's sandbox runs as; None for the platform's own.

        A workspace that exists keeps its owner, whatever the settings say now.
        """
        if not self._is_root:
            return None
        try:
            owner = self.path(tenant_id, program_id).lstat().st_uid
        except FileNotFoundError:
            owner = 0
        return owner or self._uid_first + int(_digest(tenant_id, program_id)[32:40], 16) % self._uid_count

    def ensure(self, tenant_id: TenantId, program_id: ProgramId) -> Path:
        """Make the workspace if it does not exist, and return it.

        Raises:
            SandboxUnavailable: it cannot be made.
        """
        path, uid = self.path(tenant_id, program_id), self.uid(tenant_id, program_id)
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            if uid is not None:
                os.chown(path, uid, uid, follow_symlinks=False)
            path.chmod(0o700)
        except OSError as exc:
            raise SandboxUnavailable(f"the workspace cannot be made: {exc}") from exc
        return path

    def usage(self, path: Path, *, bytes_max: int, files_max: int) -> WorkspaceUsage:
        """What a workspace holds, counted until a limit is passed. Safe while its program runs and rearranges it."""
        counter = _Counter(bytes_max, files_max)
        counter.count(path, None, 0)
        return WorkspaceUsage(disk_bytes=counter.disk_bytes, entries=counter.entries, is_too_deep=counter.is_too_deep)

    def delete(self, tenant_id: TenantId, program_id: ProgramId) -> bool:
        """Remove the program's workspace, which no sandbox may be using; False if there is none.

        Raises:
            OSError: something in it cannot be removed; it is out of the program's way all the same.
        """
        return self._remove(self.path(tenant_id, program_id))

    def park(self) -> tuple[Path, int | None]:
        """A workspace that is no program's yet, and the user that its sandbox runs as.

        Raises:
            SandboxUnavailable: it cannot be made.
        """
        name = secrets.token_hex(16)
        path = self._parked / name
        uid = self._uid_first + int(name[:8], 16) % self._uid_count if self._is_root else None
        try:
            path.mkdir(mode=0o700)
            self._locks[path] = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._locks[path], fcntl.LOCK_EX | fcntl.LOCK_NB)
            if uid is not None:
                os.chown(path, uid, uid)
        except OSError as exc:
            raise SandboxUnavailable(f"a workspace cannot be made: {exc}") from exc
        return path, uid

    def adopt(self, parked: Path, tenant_id: TenantId, program_id: ProgramId) -> None:
        """Make a parked workspace the program's, which has none."""
        parked.rename(self.path(tenant_id, program_id))
        os.close(self._locks.pop(parked))

    def discard(self, parked: Path) -> None:
        """Remove a parked workspace."""
        self._remove(parked)
        lock = self._locks.pop(parked, None)
        if lock is not None:
            os.close(lock)

    def clean(self, *, ttl_s: float | None, now_wall_s: float) -> int:
        """Remove what nobody will come back for; returns how many directories that were.

        These are workspaces in which nothing happened for `ttl_s` (by the time of the last change of the directory itself,
        which no program can set back or forward, and which `ensure` renews), parked ones whose actor is gone, and deletions
        that were broken off.
        """
        stale = [path for path in self._parked.iterdir() if path not in self._locks and _is_unlocked(path)]
        stale += [path for path in self._trash.iterdir() if now_wall_s - _changed_s(path, now_wall_s) > _BROKEN_OFF_S]
        if ttl_s is not None:
            stale += [path for path in self._workspaces.iterdir() if now_wall_s - _changed_s(path, now_wall_s) > ttl_s]
        return sum(self._remove(path) for path in stale)

    def _remove(self, path: Path) -> bool:
        condemned = self._trash / secrets.token_hex(8)
        try:
            path.rename(condemned)
        except FileNotFoundError:
            return False
        delete_tree(condemned)
        return True


class _Counter:
    """Counts a tree, and stops early where a limit is passed."""

    def __init__(self, bytes_max: int, files_max: int) -> None:
        self.disk_bytes = 0
        self.entries = 0
        self.is_too_deep = False
        self._bytes_max = bytes_max
        self._files_max = files_max

    def count(self, name: str | Path, parent: int | None, depth: int) -> bool:
        """Count what is below a directory; False if there is no use in going on."""
        # Opened by its name in an open parent and never through a link: a program that swaps directories for links meanwhile
        # has its own tree counted and nothing else.
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            directory = os.open(name, flags, dir_fd=parent)
        except OSError:
            return True  # it went away, or its owner closed it even to us, who then cannot count it
        try:
            with os.scandir(directory) as entries:
                return all(self._count_entry(entry, directory, depth) for entry in entries)
        finally:
            os.close(directory)

    def _count_entry(self, entry: os.DirEntry[str], directory: int, depth: int) -> bool:
        try:
            state = entry.stat(follow_symlinks=False)
        except OSError:
            return True
        self.entries += 1
        self.disk_bytes += state.st_blocks * 512
        if self.disk_bytes > self._bytes_max or self.entries > self._files_max:
            return False
        if not stat.S_ISDIR(state.st_mode):
            return True
        if depth >= _DEPTH_MAX:
            self.is_too_deep = True
            return False
        return self.count(entry.name, directory, depth + 1)


def delete_tree(root: Path) -> None:
    """Remove a directory with whatever a hostile program left in it; nothing may be running in it any more.

    One directory is open at a time and names are looked up in it alone, so depth costs neither recursion, nor descriptors, nor
    a path longer than the system takes. Closed directories are opened first. No link is followed.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    _make_writable(root, None)
    here = os.open(root, flags)
    way_down: list[str] = []
    try:
        while True:
            below = _empty_of_files(here)
            if below is not None:
                _make_writable(below, here)
                way_down.append(below)
                here = _go(here, below, flags)
            elif way_down:
                here = _go(here, "..", flags)
                os.rmdir(way_down.pop(), dir_fd=here)
            else:
                break
    finally:
        os.close(here)
    root.rmdir()


def _empty_of_files(directory: int) -> str | None:
    """Unlink what is no directory, until one is met; its name, or None when nothing is left."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                return entry.name
            os.unlink(entry.name, dir_fd=directory)
    return None


def _go(here: int, name: str, flags: int) -> int:
    there = os.open(name, flags, dir_fd=here)
    os.close(here)
    return there


def _make_writable(name: str | Path, parent: int | None) -> None:
    # Root passes anyway; others need it for listing and emptying. It was just seen to be a directory, and nobody changes it.
    if os.geteuid() != 0:
        os.chmod(name, 0o700, dir_fd=parent)


def _is_unlocked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _changed_s(path: Path, otherwise: float) -> float:
    try:
        return path.lstat().st_ctime
    except FileNotFoundError:
        return otherwise


def _check_own(directory: Path) -> None:
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise SandboxUnavailable(f"{directory} is not a directory of the platform's own user; refusing to use it")


def _check_reachable(directory: Path) -> None:
    for parent in directory.parents:
        if not parent.stat().st_mode & stat.S_IXOTH:
            raise SandboxUnavailable(
                f"sandboxes run as an unprivileged user, who cannot pass {parent} (mode {stat.S_IMODE(parent.stat().st_mode):o}) "
                f"to reach {directory}: choose another state_dir"
            )


def _digest(tenant_id: TenantId, program_id: ProgramId) -> str:
    return hashlib.sha256(f"{tenant_id}\0{program_id}".encode()).hexdigest()
