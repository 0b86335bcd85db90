"""What the routers of this process count, where the process's metrics page finds it.

Serve makes a router for each deployment handle, keeps it to itself, and pickles its class by value, so that globals of the class's
own module are copies. These counters are in a module of their own for that reason: it is the one place in a process that a
router and the part that holds its handle share. Counts outlive a router, as a counter of a process should.
"""

from __future__ import annotations

from typing import Any

from continuum_router.placement import Reason


class RouterCounters:
    """Of all routers with one namespace in this process. Written on the routers' thread, read on others: the keys are there
    from the start, so that reading never sees them change."""

    def __init__(self) -> None:
        self._placements = dict.fromkeys((reason.value for reason in Reason), 0)
        self._bindings = 0
        self._unconfirmed = 0
        self._is_store_away = False

    def placed(self, reason: Reason, *, bindings: int, unconfirmed: int, is_store_away: bool) -> None:
        """A request got its replica; the router now knows so many bindings, of which the store lacks so many."""
        self._placements[reason.value] += 1
        self._bindings, self._unconfirmed, self._is_store_away = bindings, unconfirmed, is_store_away

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for metrics."""
        return {
            "placements": dict(self._placements),
            "bindings": self._bindings,
            "unconfirmed_bindings": self._unconfirmed,
            "store_away": self._is_store_away,
        }


#: Namespaces are those of deployments: two.
_BY_NAMESPACE: dict[str, RouterCounters] = {}


def counters_of(namespace: str) -> RouterCounters:
    """The counters of a namespace in this process."""
    return _BY_NAMESPACE.setdefault(namespace, RouterCounters())


def all_counters() -> dict[str, dict[str, Any]]:
    """Plain values by namespace; empty in a process that has routed nothing."""
    return {namespace: counters.to_plain() for namespace, counters in sorted(_BY_NAMESPACE.items())}
