"""Makes what a tar archive says, in a directory of its own where no program is.

`tar_reader` has refused what may not be. Here each name is made in its open parent, no link is followed and nothing that exists
is written to, so that even an entry that it should have refused could not reach out of the directory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from tool_runtime.tar_reader import EntryKind, TarEntry, TarLimits, entries_of, shown
from tool_runtime.workspace_content import WorkspaceContent
from tool_runtime.workspace_errors import ArchiveRefused

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def unpack(read: Callable[[int], bytes], root: Path, limits: TarLimits, *, uid: int | None) -> WorkspaceContent:
    """Make the archive's content below `root`, an empty directory, all of it owned by `uid` if that is given.

    Raises:
        ArchiveRefused, WorkspaceTooLarge: the archive may not be; `root` holds a part of it.
        OSError: the disk does not take it.
    """
    entries, content_bytes = 0, 0
    top = os.open(root, _OPEN_DIRECTORY)
    try:
        maker = _Maker(top, uid)
        for entry, content in entries_of(read, limits):
            maker.make(entry, content)
            entries += 1
            content_bytes += entry.size
        maker.finish()
    finally:
        os.close(top)
    return WorkspaceContent(entries=entries, bytes=content_bytes)


class _Maker:
    def __init__(self, top: int, uid: int | None) -> None:
        self._top = top
        self._uid = uid
        #: Set at the end, the deepest first: making something in a directory changes its time.
        self._directories: dict[tuple[bytes, ...], TarEntry] = {}

    def make(self, entry: TarEntry, content: Iterator[bytes]) -> None:
        if entry.kind is EntryKind.DIRECTORY:
            with self._directory(entry.path):
                self._directories[entry.path] = entry
            for _ in content:
                raise AssertionError("a directory has no content")
            return
        *above, name = entry.path
        with self._directory(tuple(above)) as parent:
            try:
                self._make_in(parent, name, entry, content)
            except FileExistsError as exc:
                raise ArchiveRefused(f"{entry.name} is in the archive twice") from exc

    def finish(self) -> None:
        for path in sorted(self._directories, key=len, reverse=True):
            entry = self._directories[path]
            with self._directory(path) as directory:
                os.fchmod(directory, entry.mode | 0o700)
                os.utime(directory, (entry.mtime_s, entry.mtime_s))

    def _make_in(self, parent: int, name: bytes, entry: TarEntry, content: Iterator[bytes]) -> None:
        if entry.kind is EntryKind.SYMLINK:
            os.symlink(entry.target, name, dir_fd=parent)
            if self._uid is not None:
                os.chown(name, self._uid, self._uid, dir_fd=parent, follow_symlinks=False)
        elif entry.kind is EntryKind.HARDLINK:
            *above, linked = entry.linked
            with self._directory(tuple(above)) as there:
                os.link(linked, name, src_dir_fd=there, dst_dir_fd=parent, follow_symlinks=False)
        else:
            with open(os.open(name, _NEW_FILE, 0o600, dir_fd=parent), "wb", buffering=0) as file:
                for piece in content:
                    file.write(piece)
                self._give(file.fileno())
                os.fchmod(file.fileno(), entry.mode | 0o600)
                os.utime(file.fileno(), (entry.mtime_s, entry.mtime_s))
            return
        for _ in content:
            raise AssertionError("a link has no content")

    @contextlib.contextmanager
    def _directory(self, path: tuple[bytes, ...]) -> Iterator[int]:
        """The directory, made if need be."""
        here = os.dup(self._top)
        try:
            for name in path:
                try:
                    os.mkdir(name, 0o700, dir_fd=here)
                    is_new = True
                except FileExistsError:
                    is_new = False
                try:
                    below = os.open(name, _OPEN_DIRECTORY, dir_fd=here)
                except OSError as exc:
                    raise ArchiveRefused(
                        f"{shown(b'/'.join(path))} lies below something that is not a directory"
                    ) from exc
                os.close(here)
                here = below
                if is_new:
                    self._give(here)
            yield here
        finally:
            os.close(here)

    def _give(self, fd: int) -> None:
        if self._uid is not None:
            os.fchown(fd, self._uid, self._uid)
