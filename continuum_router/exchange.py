"""What the caller of a deployment handle tells the router inside of it: how turns came back.

Serve makes a router for each handle and keeps it to itself, on a thread of its own; it sees requests go and end, but not what a
reply says. The caller sees that. They meet here, in a module that both import (the router's own module is pickled by value, so its
globals are copies). A note that nobody listens to is lost, which costs no more than waiting for the next report.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from agent_program.ids import ProgramId, ReplicaId

ENGINE_NAMESPACE, TOOLS_NAMESPACE = "engine", "tools"


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnReplied:
    """A turn of a program came back, with its replica's report as of then."""

    program_id: ProgramId
    replica_id: ReplicaId
    #: As `record_routing_stats` returns it.
    report: Mapping[str, object]
    #: Seconds for which a lease keeps the program's KV there; 0 where none does.
    kept_s: float
    context_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnLost:
    """A turn did not come back, or not by its deadline."""

    #: None for a turn of no program.
    program_id: ProgramId | None
    #: The replica that had taken it; None where none had said so.
    replica_id: ReplicaId | None


Note = TurnReplied | TurnLost


class Listener(Protocol):
    """A router, as those who have news for it see it."""

    def hear(self, note: Note) -> None:
        """Take a note, from any thread; returns at once."""
        ...


class Exchange:
    """Notes by namespace. Holds no router alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[str, weakref.WeakSet[Listener]] = {}

    def listen(self, namespace: str, listener: Listener) -> None:
        """From now on, and for as long as it lives, the listener hears the notes of the namespace."""
        with self._lock:
            self._listeners.setdefault(namespace, weakref.WeakSet()).add(listener)

    def tell(self, namespace: str, note: Note) -> None:
        """Pass a note to whoever listens now."""
        with self._lock:
            listeners = list(self._listeners.get(namespace, ()))
        for listener in listeners:
            listener.hear(note)


#: The exchange of this process; namespaces are those of deployments, two. By its functions only: a router's module that named
#: the object itself would take a copy of it along.
_HERE = Exchange()


def listen(namespace: str, listener: Listener) -> None:
    """`Exchange.listen` in this process."""
    _HERE.listen(namespace, listener)


def tell(namespace: str, note: Note) -> None:
    """`Exchange.tell` in this process."""
    _HERE.tell(namespace, note)
