"""Ends an engine core whose replica is gone.

vLLM stops its engine core when the replica exits in any orderly way. A replica that is killed outright (out of memory,
SIGKILL) cannot, and the core would live on with the model and all KV in memory, where a replacement needs the room. So the
core watches its parent and ends itself: politely at first, which also stops its workers, and by force if that takes long.
Its workers watch the core in the same way, by vLLM's own doing.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time

PERIOD_S = 1.0
GRACE_S = 5.0
#: What vLLM calls the engine core's process; with data parallelism a rank follows.
_CORE_NAME = "EngineCore"

logger = logging.getLogger(__name__)


def end_with_parent() -> None:
    """In an engine core: start watching its parent. In any other process: nothing. A second call changes nothing."""
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith(_CORE_NAME):
        return
    if any(thread.name == __name__ for thread in threading.enumerate()):
        return
    threading.Thread(target=_watch, args=(parent.pid,), name=__name__, daemon=True).start()


def _watch(parent_pid: int) -> None:
    # The kernel gives an orphan another parent, whatever killed the old one.
    while os.getppid() == parent_pid:
        time.sleep(PERIOD_S)
    logger.warning("the replica (pid %d) is gone: ending its engine core", parent_pid, extra={"action": "orphan_ends"})
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
