"""What ties a new program to a replica before anything of it is there: its relatives, and how its prompt begins.

A program's first turn can find KV in two ways. A *relative* left it: the program that started this one as a sub-program (its
`parent`), or the one that it goes on with (its `previous`). Or some unrelated program began with the same text: system prompt and
tool schemas, which chat templates put first. That beginning is known by its *mark*, a fingerprint and how many tokens it is
worth, so that replicas can say in a few bytes which beginnings they have seen.

Engines share KV between tenants only where a tenant's cache salt agrees, so the salt is part of the fingerprint.
"""

from __future__ import annotations

import json
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from agent_program.ids import ProgramId, ReplicaId
from agent_program.turn import TurnHints

#: So many characters make a token in the languages and code that agents write. Only load weighs with it, no limit does.
CHARS_PER_TOKEN = 4
#: Characters of a beginning that are read; longer ones are told apart by their length besides.
_CHARS_READ_MAX = 65_536
_LEADING_ROLES = ("system", "developer")


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixMark:
    """How a prompt begins."""

    #: Of the text; equal beginnings have equal ones.
    fingerprint: int
    #: About so many tokens need not be computed where the beginning's KV is.
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Affinity:
    """What is known of a program before it is placed."""

    #: The program that started it as a sub-program.
    parent: ProgramId | None = None
    #: The ended program whose conversation it goes on with.
    previous: ProgramId | None = None
    #: How its prompt begins; None where it has no system prompt and no tools.
    prefix: PrefixMark | None = None


def affinity_of(body: object, hints: object) -> Affinity:
    """Read it off a turn's request. What is missing or malformed ties to nothing; the engine will say what is wrong with it."""
    parent = hints.parent_program_id if isinstance(hints, TurnHints) else None
    previous = hints.previous_program_id if isinstance(hints, TurnHints) else None
    prefix = prefix_mark(body) if isinstance(body, Mapping) else None
    return Affinity(parent=parent, previous=previous, prefix=prefix)


def prefix_mark(body: Mapping[str, object]) -> PrefixMark | None:
    """The mark of a chat request's beginning: its leading system messages and its tools."""
    messages = body.get("messages")
    leading: list[object] = []
    for message in messages if isinstance(messages, Sequence) and not isinstance(messages, str) else ():
        if not isinstance(message, Mapping) or message.get("role") not in _LEADING_ROLES:
            break
        leading.append(message.get("content"))
    tools = body.get("tools")
    if not leading and not tools:
        return None
    try:
        text = json.dumps([leading, tools, body.get("cache_salt")])
    except (TypeError, ValueError, RecursionError):
        return None
    return PrefixMark(
        fingerprint=zlib.crc32(f"{len(text)}:{text[:_CHARS_READ_MAX]}".encode()), tokens=len(text) // CHARS_PER_TOKEN
    )


class RecentPrefixes:
    """The beginnings that one replica computed last, for its reports. Bounded; the least recently used one goes."""

    def __init__(self, *, capacity: int = 64) -> None:
        self._capacity = capacity
        self._marks: OrderedDict[int, None] = OrderedDict()

    def note(self, mark: PrefixMark | None) -> None:
        """A turn that begins so was taken."""
        if mark is None:
            return
        self._marks[mark.fingerprint] = None
        self._marks.move_to_end(mark.fingerprint)
        if len(self._marks) > self._capacity:
            self._marks.popitem(last=False)

    def fingerprints(self) -> list[int]:
        """Oldest first."""
        return list(self._marks)


class PrefixIndex:
    """Which replicas have which beginnings, as one router knows. Bounded in beginnings, and in replicas for each."""

    def __init__(self, *, capacity: int = 4096, replicas_max: int = 8) -> None:
        self._capacity = capacity
        self._replicas_max = replicas_max
        #: fingerprint → its replicas; the least recently noted ones first, in both.
        self._replicas: OrderedDict[int, OrderedDict[ReplicaId, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replicas)

    def note(self, fingerprints: Iterable[int], replica_id: ReplicaId) -> None:
        """The replica has these beginnings."""
        for fingerprint in fingerprints:
            replicas = self._replicas.setdefault(fingerprint, OrderedDict())
            self._replicas.move_to_end(fingerprint)
            replicas[replica_id] = None
            replicas.move_to_end(replica_id)
            if len(replicas) > self._replicas_max:
                replicas.popitem(last=False)
        while len(self._replicas) > self._capacity:
            self._replicas.popitem(last=False)

    def replicas(self, mark: PrefixMark | None) -> tuple[ReplicaId, ...]:
        """Those that have the beginning, some of which may be gone by now."""
        return tuple(self._replicas.get(mark.fingerprint, ())) if mark is not None else ()
