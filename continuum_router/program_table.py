"""One process's own copy of the bindings: bounded, and forgetting without a sweep.

Two generations of entries, young and old. What is used moves to (or enters) the young one. When the young one is half the
capacity, or a time to live old, it becomes the old one and what the old one still held is forgotten at once: those programs
were idle for at least a whole generation. So every operation is O(1), at most `capacity` entries exist, and an entry that is
not used is gone after between one and two times to live. Counts per replica are kept per generation for the same reason.

Forgetting is safe: the store remembers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from agent_program.ids import ProgramId, ReplicaId


@dataclass(slots=True)
class Entry:
    """What this process believes about one program."""

    replica_id: ReplicaId
    #: When the store last said so; None when it was decided here and the store does not know yet.
    confirmed_s: float | None


class _Generation:
    __slots__ = ("entries", "per_replica", "since_s")

    def __init__(self, since_s: float) -> None:
        self.entries: dict[ProgramId, Entry] = {}
        self.per_replica: Counter[ReplicaId] = Counter()
        self.since_s = since_s

    def take(self, program_id: ProgramId) -> Entry | None:
        entry = self.entries.pop(program_id, None)
        if entry is not None:
            self._count(entry.replica_id, -1)
        return entry

    def add(self, program_id: ProgramId, entry: Entry) -> None:
        self.entries[program_id] = entry
        self._count(entry.replica_id, +1)

    def move(self, entry: Entry, replica_id: ReplicaId) -> None:
        self._count(entry.replica_id, -1)
        entry.replica_id = replica_id
        self._count(replica_id, +1)

    def _count(self, replica_id: ReplicaId, change: int) -> None:
        self.per_replica[replica_id] += change
        if not self.per_replica[replica_id]:
            del self.per_replica[replica_id]


class ProgramTable:
    """Programs and the replicas that they are bound to, as one process knows them. Not thread-safe."""

    def __init__(self, *, capacity: int, ttl_s: float, now_s: float = 0.0) -> None:
        if capacity < 2:
            raise ValueError("a table of two generations holds at least two entries")
        self._generation_max = capacity // 2
        self._ttl_s = ttl_s
        self._young = _Generation(now_s)
        self._old = _Generation(now_s)

    def __len__(self) -> int:
        return len(self._young.entries) + len(self._old.entries)

    def programs_on(self, replica_id: ReplicaId) -> int:
        """How many of the known programs are bound to the replica."""
        return self._young.per_replica[replica_id] + self._old.per_replica[replica_id]

    def programs(self) -> Iterator[ProgramId]:
        """The known programs, the recently used ones first. The table must not change while this is iterated."""
        return chain(self._young.entries, self._old.entries)

    def get(self, program_id: ProgramId) -> Entry | None:
        """The program's entry, which counts as a use of it."""
        entry = self._young.entries.get(program_id)
        if entry is None and (entry := self._old.take(program_id)) is not None:
            self._young.add(program_id, entry)
        return entry

    def put(self, program_id: ProgramId, replica_id: ReplicaId, *, confirmed_s: float | None) -> ReplicaId | None:
        """Bind the program to the replica here; returns the replica that it was bound to before, if any."""
        entry = self.get(program_id)
        if entry is None:
            self._young.add(program_id, Entry(replica_id, confirmed_s))
            return None
        before = entry.replica_id
        if before != replica_id:
            self._young.move(entry, replica_id)
        entry.confirmed_s = confirmed_s
        return before

    def drop(self, program_id: ProgramId) -> Entry | None:
        """Forget the program; returns what was known. Dropping an unknown program changes nothing."""
        return self._young.take(program_id) or self._old.take(program_id)

    def rotate(self, *, now_s: float) -> set[ReplicaId]:
        """Start a new generation if it is time; returns the replicas whose count changed by that."""
        is_full = len(self._young.entries) >= self._generation_max
        if not is_full and now_s - self._young.since_s < self._ttl_s:
            return set()
        forgotten, self._old, self._young = self._old, self._young, _Generation(now_s)
        return set(forgotten.per_replica)
