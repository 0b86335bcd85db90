"""Trees of files that a hostile program left, counted and removed from outside: nothing in them is opened, followed or run.

A name is looked up in its open parent and never through a link, so a program that rearranges its tree meanwhile has its own tree
counted or removed, and nothing else.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tool_runtime.inside.archive import DEPTH_MAX
from tool_runtime.sandbox import WorkspaceUsage


def usage_of(path: Path, *, bytes_max: int, files_max: int) -> WorkspaceUsage:
    """What a directory holds, counted until a limit is passed. Safe while its program runs and rearranges it."""
    counter = _Counter(bytes_max, files_max)
    counter.count(path, None, 0)
    return WorkspaceUsage(disk_bytes=counter.disk_bytes, entries=counter.entries, is_too_deep=counter.is_too_deep)


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
        if depth >= DEPTH_MAX:
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
