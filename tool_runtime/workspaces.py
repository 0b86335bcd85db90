"""Where programs' files live on the host, and how they are removed.

    <state_dir>/workspaces/<opaque id>     one directory a program, mode 0700, owned by the sandbox's user
    <state_dir>/trash/<random>             what is being deleted
    <state_dir>/programs/<digest>          programs that sandboxes are made with, where their own place is out of reach

A workspace outlives sandboxes and actors; deleting it is asked for. The name is a digest of tenant and program, so that
nothing of either shows in a path inside the sandbox, and no id can name a directory outside.

What a program left is hostile: it is never opened, followed or run here, only renamed and unlinked.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from pathlib import Path

from agent_program.errors import SandboxUnavailable
from agent_program.ids import ProgramId, TenantId


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
        self.programs = self._root / "programs"
        # Root's sandboxes run as other users, who must pass through but see no names.
        mode = 0o711 if self._is_root else 0o700
        try:
            for directory in (self._root, self._workspaces, self._trash, self.programs):
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

    def delete(self, tenant_id: TenantId, program_id: ProgramId) -> bool:
        """Remove the program's workspace, which no sandbox may be using; False if there is none.

        Raises:
            OSError: something in it cannot be removed; it is out of the program's way all the same.
        """
        condemned = self._trash / secrets.token_hex(8)
        try:
            self.path(tenant_id, program_id).rename(condemned)
        except FileNotFoundError:
            return False
        delete_tree(condemned)
        return True


def delete_tree(root: Path) -> None:
    """Remove a directory with whatever a hostile program left in it.

    Deep trees do not cost depth: each directory's subdirectories are moved up next to `root`'s own before they are emptied,
    so paths stay short and nothing recurses. Unreadable directories are made readable first. No link is followed.
    """
    waiting = [root]
    serial = 0
    while waiting:
        directory = waiting.pop()
        _make_writable(str(directory))
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if directory == root:
                        waiting.append(Path(entry.path))
                        continue
                    serial += 1
                    moved = root / f".condemned-{serial}-{secrets.token_hex(4)}"
                    _make_writable(entry.path)
                    os.rename(entry.path, moved)
                    waiting.append(moved)
                else:
                    os.unlink(entry.path)
        if directory != root:
            directory.rmdir()
    root.rmdir()


def _make_writable(path: str) -> None:
    # Root passes anyway. For others, listing and emptying need it, and so does moving: it rewrites the directory's `..`.
    if os.geteuid() != 0:
        os.chmod(path, 0o700)


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
