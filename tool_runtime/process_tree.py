"""Processes below a process, and what memory they hold, from /proc. Standard library only: the launcher uses it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

_PR_SET_CHILD_SUBREAPER = 36
_TABLE_LINES = (b"VmPTE:",)
_STATUS_LINES = (b"RssAnon:", b"RssShmem:", b"VmSwap:", *_TABLE_LINES)
_ROLLUP_LINES = (b"Pss_Anon:", b"Pss_Shmem:", b"SwapPss:")


def become_subreaper() -> None:
    """What loses its parent below this process becomes its child, not that of the machine's init."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill(pid: int) -> None:
    """SIGKILL, if it still exists."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_descendants(root: int) -> None:
    """SIGKILL to everything below `root`, until nothing is left.

    `root` must be a subreaper, so that what loses its parent stays below it; a fork bomb is outrun, not caught in one step.
    """
    for _ in range(50):
        found = descendants(root)
        if not found:
            return
        for pid in found:
            kill(pid)


def children_of(parent: int) -> list[int]:
    """Living processes that `parent` started or inherited."""
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{parent}/task")
    except (FileNotFoundError, ProcessLookupError):
        return found
    for thread in threads:
        path = f"/proc/{parent}/task/{thread}/children"
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(path, "rb") as children:
            found += map(int, children.read().split())
    return [pid for pid in found if not _is_zombie(pid)]


def descendants(root: int) -> list[int]:
    """Living processes below `root`, parents before children."""
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = children_of(waiting.pop())
        found += below
        waiting += below
    return found


def holds_more_than(limit_bytes: int, pids: list[int]) -> bool:
    """Whether these processes together hold more memory than that.

    Counted are anonymous and shared pages, page tables, swap, and memory files that are open but need not be mapped; not
    counted are pages of executables and libraries. Pages that several processes share count once, but finding out who shares
    what is slow, so it is done only where counting them several times passes the limit.
    """
    quickly = sum(_lines_bytes(f"/proc/{pid}/status", _STATUS_LINES) for pid in pids)
    memory_files: dict[tuple[int, int], int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            _add_memory_files(pid, memory_files)
    files = sum(memory_files.values())
    if quickly + files <= limit_bytes:
        return False
    # A process that went away meanwhile, or whose shares we may not see, counts nothing: the next look comes soon.
    shared = sum(_lines_bytes(f"/proc/{pid}/smaps_rollup", _ROLLUP_LINES) for pid in pids)
    tables = sum(_lines_bytes(f"/proc/{pid}/status", _TABLE_LINES) for pid in pids)
    return shared + tables + files > limit_bytes


def files_in_memory(pids: list[int]) -> int:
    """The most files that one of these processes' own /tmp or /dev/shm holds; 0 where that cannot be seen."""
    most = 0
    for pid in pids:
        for place in ("tmp", "dev/shm"):
            with contextlib.suppress(OSError):
                path = f"/proc/{pid}/root/{place}"
                # A sandbox that is still being made sees the host's.
                if os.stat(path).st_dev != os.stat(f"/{place}").st_dev:
                    found = os.statvfs(path)
                    most = max(most, found.f_files - found.f_ffree)
    return most


def threads(pids: list[int]) -> int:
    """Processes and threads, as the kernel counts them for a limit."""
    total = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total += len(os.listdir(f"/proc/{pid}/task"))
    return total


def threads_of_user(uid: int) -> int:
    """Processes and threads that a user has on this machine now."""
    mine = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if entry.isdigit() and os.stat(f"/proc/{entry}").st_uid == uid:
                mine.append(int(entry))
    return threads(mine)


def _lines_bytes(path: str, names: tuple[bytes, ...]) -> int:
    """The sum of the named lines of a file in /proc, which are in KiB."""
    total = 0
    with contextlib.suppress(OSError, ValueError), open(path, "rb") as lines:
        for line in lines:
            if line.startswith(names):
                total += int(line.split()[1]) * 1024
    return total


def _add_memory_files(pid: int, found: dict[tuple[int, int], int]) -> None:
    directory = f"/proc/{pid}/fd"
    for fd in os.listdir(directory):
        with contextlib.suppress(OSError):
            path = f"{directory}/{fd}"
            if os.readlink(path).startswith("/memfd:"):
                state = os.stat(path)
                found[(state.st_dev, state.st_ino)] = state.st_blocks * 512


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The name in brackets may hold anything, so the fields are counted from its last bracket.
            return stat.read().rsplit(b")", 1)[1].split()[0] == b"Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
