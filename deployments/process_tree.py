"""Leave no process behind. Used when the command that started the platform ends.

Ray, its workers, the engines, the store and the sandboxes are a tree below this process. Each part stops its own children;
this is the check that they did, and the last resort where one did not: by process id, and only below this process.
"""

from __future__ import annotations

import ctypes
import logging
import time

import psutil

logger = logging.getLogger(__name__)

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on, a descendant whose parent ends becomes a child of this process instead of init's, so it stays visible.

    For shutdown only: a long-lived process would have to reap every orphan that it adopts.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        logger.warning("cannot adopt orphans: errno %d", ctypes.get_errno())


def end_descendants(*, grace_s: float) -> list[str]:
    """Wait `grace_s` for every descendant to end by itself, then terminate, then kill.

    Returns:
        One line for each process that had to be ended; empty where all ended by themselves.
    """
    deadline_s = time.monotonic() + grace_s
    remaining = _living()
    while remaining and time.monotonic() < deadline_s:
        psutil.wait_procs(remaining, timeout=0.2)
        remaining = _living()
    ended = [_describe(process) for process in remaining]
    for stop in (psutil.Process.terminate, psutil.Process.kill):
        for process in remaining:
            try:
                stop(process)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(remaining, timeout=5.0)
        remaining = _living()
    return ended


def _living() -> list[psutil.Process]:
    """Descendants that are not zombies."""
    return [process for process in psutil.Process().children(recursive=True) if not _is_zombie(process)]


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:120] or process.name()}"
    except psutil.Error:
        return str(process.pid)
