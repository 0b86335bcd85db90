"""Where programs' files live on the host, and how they are removed.

    <state_dir>/workspaces/<opaque id>     one directory a program, mode 0700, owned by the sandbox's user
    <state_dir>/owners/<opaque id>         whose it is, for the platform's own eyes
    <state_dir>/snapshots/<opaque id>/     what programs had kept of theirs (`workspace_transfers.py`)
    <state_dir>/uploads/<random>           archives that arrive, and what is unpacked of them
    <state_dir>/parked/<random>            workspaces of sandboxes that wait for a program
    <state_dir>/trash/<random>             what is being deleted
    <state_dir>/programs/<digest>          programs that sandboxes are made with, where their own place is out of reach

A workspace outlives sandboxes and actors; deleting it is asked for. The name is a digest of tenant and program, so that
nothing of either shows in a path inside the sandbox, and no id can name a directory outside.

A workspace in which nothing happened for a time is removed, with its snapshots. That time is read from the directory, so it does
not matter whose actor made it, nor how often actors were restarted since.

What a program left is hostile: it is never followed or run here (`trees.py`), only renamed, read where it is plain, and unlinked.
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
from tool_runtime.trees import delete_tree

#: A deletion that did nothing for this long is nobody's any more.
_BROKEN_OFF_S = 600.0


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
        self._owners, self.snapshots = self._root / "owners", self._root / "snapshots"
        self.uploads = self._root / "uploads"
        #: Locks on our parked workspaces, by which others know that somebody lives.
        self._locks: dict[Path, int] = {}
        # Root's sandboxes run as other users, who must pass through but see no names.
        mode = 0o711 if self._is_root else 0o700
        try:
            for directory in (self._root, self._workspaces, self._parked, self._trash, self.programs):
                _make_own(directory, mode)
            for directory in (self._owners, self.snapshots, self.uploads):
                _make_own(directory, 0o700)
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
            self._note_owner(tenant_id, program_id)
        except OSError as exc:
            raise SandboxUnavailable(f"the workspace cannot be made: {exc}") from exc
        return path

    def quiet(self, *, quiet_s: float, now_wall_s: float, count_max: int) -> list[tuple[TenantId, ProgramId]]:
        """Whose workspaces are here in which nothing happened for `quiet_s`, the quietest first, and no more than `count_max`."""
        times = [(_changed_s(path, now_wall_s), path.name) for path in self._workspaces.iterdir()]
        old = sorted((changed_s, name) for changed_s, name in times if now_wall_s - changed_s >= quiet_s)
        owners = (self._owner_of(name) for _, name in old[:count_max])
        return [owner for owner in owners if owner is not None]

    def delete(self, tenant_id: TenantId, program_id: ProgramId) -> bool:
        """Remove the program's workspace, which no sandbox may be using; False if there is none.

        Raises:
            OSError: something in it cannot be removed; it is out of the program's way all the same.
        """
        return self._remove_workspace(self.path(tenant_id, program_id))

    def replace(self, tenant_id: TenantId, program_id: ProgramId, content: Path) -> None:
        """Make `content`, a directory below `uploads`, the program's workspace in place of what it has. No sandbox may use either.

        Raises:
            OSError: it cannot be done; the workspace is as it was.
        """
        path = self.path(tenant_id, program_id)
        condemned = self._trash / secrets.token_hex(8)
        had_one = path.exists()
        if had_one:
            path.rename(condemned)
        try:
            content.rename(path)
        except OSError:
            if had_one:
                condemned.rename(path)
            raise
        self._note_owner(tenant_id, program_id)
        if had_one:
            delete_tree(condemned)

    def park(self) -> tuple[Path, int | None]:
        """A workspace that is no program's yet, and the user that its sandbox runs as.

        Raises:
            SandboxUnavailable: it cannot be made.
        """
        name = secrets.token_hex(16)
        path, aside = self._parked / name, self._trash / name
        uid = self._uid_first + int(name[:8], 16) % self._uid_count if self._is_root else None
        try:
            # Locked before it is among the parked, where `clean` takes one without a lock for abandoned.
            aside.mkdir(mode=0o700)
            self._locks[path] = os.open(aside, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._locks[path], fcntl.LOCK_EX | fcntl.LOCK_NB)
            if uid is not None:
                os.chown(aside, uid, uid)
            aside.rename(path)
        except OSError as exc:
            raise SandboxUnavailable(f"a workspace cannot be made: {exc}") from exc
        return path, uid

    def adopt(self, parked: Path, tenant_id: TenantId, program_id: ProgramId) -> None:
        """Make a parked workspace the program's, which has none."""
        parked.rename(self.path(tenant_id, program_id))
        self._note_owner(tenant_id, program_id)
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
        for abandoned in (self._trash, self.uploads):
            stale += [path for path in abandoned.iterdir() if now_wall_s - _changed_s(path, now_wall_s) > _BROKEN_OFF_S]
        removed = sum(self._remove(path) for path in stale)
        if ttl_s is not None:
            old = [path for path in self._workspaces.iterdir() if now_wall_s - _changed_s(path, now_wall_s) > ttl_s]
            removed += sum(self._remove_workspace(path) for path in old)
        return removed

    def _note_owner(self, tenant_id: TenantId, program_id: ProgramId) -> None:
        note = self._owners / self.path(tenant_id, program_id).name
        if not note.exists():
            note.write_text(f"{tenant_id}\0{program_id}")

    def _owner_of(self, name: str) -> tuple[TenantId, ProgramId] | None:
        try:
            tenant_id, _, program_id = (self._owners / name).read_text().partition("\0")
        except FileNotFoundError:
            return None  # made before owners were noted, or just removed
        return TenantId(tenant_id), ProgramId(program_id)

    def _remove_workspace(self, path: Path) -> bool:
        """The workspace and all that belongs to it."""
        self._remove(self.snapshots / path.name)
        (self._owners / path.name).unlink(missing_ok=True)
        return self._remove(path)

    def _remove(self, path: Path) -> bool:
        condemned = self._trash / secrets.token_hex(8)
        try:
            path.rename(condemned)
        except FileNotFoundError:
            return False
        if condemned.is_dir() and not condemned.is_symlink():
            delete_tree(condemned)
        else:
            condemned.unlink()
        return True


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


def _make_own(directory: Path, mode: int) -> None:
    directory.mkdir(mode=mode, parents=True, exist_ok=True)
    _check_own(directory)
    directory.chmod(mode)


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
