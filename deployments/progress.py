"""Tell people who wait that something is still going on, and what: a line when it begins, and one every few seconds after.

The work blocks its thread (Ray's and Serve's calls do), so the reminders come from another one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Long enough for whatever is quick to need no reminder.
REMIND_S = 5.0


@contextmanager
def told(
    stage: str, tell: Callable[[str], None], *, detail: Callable[[], str] | None = None, remind_s: float = REMIND_S
) -> Iterator[None]:
    """Say `stage` now, and again with the seconds that have passed for as long as the `with` lasts.

    Args:
        detail: what is still missing, asked for with each reminder; called on another thread, and an error of its own only
            leaves it out.
    """
    tell(stage)
    is_over = threading.Event()
    reminder = threading.Thread(target=_remind, args=(stage, tell, detail, remind_s, is_over), daemon=True)
    reminder.start()
    try:
        yield
    finally:
        is_over.set()
        reminder.join()


def _remind(
    stage: str,
    tell: Callable[[str], None],
    detail: Callable[[], str] | None,
    remind_s: float,
    is_over: threading.Event,
) -> None:
    began_s = time.monotonic()
    while not is_over.wait(remind_s):
        more = _detail(detail)
        tell(f"{stage}, for {time.monotonic() - began_s:.0f} s now" + (f": {more}" if more else ""))


def _detail(detail: Callable[[], str] | None) -> str:
    try:
        return detail() if detail is not None else ""
    except Exception:  # noqa: BLE001 - a line for people; the part that is asked may be the one that is starting or gone
        return ""
