"""The journal: the one place that knows every program. What it promises, whatever stores it:

- A step is journaled all or nothing, together with the record that it makes, and steps of a program have no gap.
- At most one runner at a time writes to a program: the one that holds its *lease*. While a program waits for its client no
  runner writes, and what the client does is journaled if it follows the last step (`act`). Each claim carries a fencing token larger
  than every earlier one, and a write with an old token is refused. A runner that stops extending its leases loses its
  programs to whoever claims next; nothing else ends a program that was accepted.
- Programs are claimed in the order in which they were accepted; interrupted ones first.
- Everything is bounded: the queue, the steps of a program (by its limits), finished programs (by count and age).

Signals (`listen`) only spare people from polling: a lost signal delays, never breaks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from agent_program.errors import InvalidRequest, PlatformError
from agent_program.states import ProgramState
from deployments import journal_histograms
from deployments.program import ProgramRecord, ProgramSpec
from deployments.signals import Signal
from deployments.steps import Step, StepKind


class ProgramExists(InvalidRequest):
    """A program with this id exists."""

    status, code = 409, "program_exists"


class IdempotencyMismatch(InvalidRequest):
    """The idempotency key was used for another request."""

    status, code = 409, "idempotency_mismatch"


class LeaseLost(PlatformError):
    """Another runner has the program now, or it is gone; whoever holds the old claim must stop."""

    code = "lease_lost"


class LeaseStatus(Enum):
    """What an extension says about one claim."""

    HELD = "held"
    #: Held, and someone asked to cancel the program.
    CANCEL_REQUESTED = "cancel_requested"
    LOST = "lost"


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """The right to write to a program until the lease runs out."""

    program_id: str
    #: The fencing token.
    token: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredProgram:
    """All that is known about a program."""

    spec: ProgramSpec
    record: ProgramRecord
    steps: tuple[Step, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class IdempotencyKey:
    """`Idempotency-Key` of a submission and what it was used for."""

    tenant_id: str
    key: str
    #: A digest of the request; the same key with another digest is a mistake of the client.
    fingerprint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """A part of a list, newest program first."""

    records: tuple[ProgramRecord, ...]
    has_more: bool


class Journal(Protocol):
    """See the module's promises. Every method may raise `StoreUnavailable`."""

    async def create(
        self, spec: ProgramSpec, *, queued_max: int, idempotency: IdempotencyKey | None = None
    ) -> ProgramRecord:
        """Accept a program and queue it. With a known idempotency key: the record of the program made then.

        Raises:
            ProgramExists: the id is taken.
            IdempotencyMismatch: the key was used for another request.
            Overloaded: `queued_max` programs wait already.
        """
        ...

    async def get(self, program_id: str) -> ProgramRecord:
        """Raises ProgramNotFound."""
        ...

    async def load(self, program_id: str) -> StoredProgram:
        """Raises ProgramNotFound."""
        ...

    async def steps(self, program_id: str, *, after_seq: int = 0, limit: int = 1000) -> tuple[Step, ...]:
        """Steps with a larger `seq`, in order. Raises ProgramNotFound."""
        ...

    async def list(
        self, *, state: ProgramState | None, limit: int, after: str | None, tenant_id: str | None = None
    ) -> Page:
        """Newest first, of one tenant or of all, starting behind the program `after`. Raises InvalidRequest where `after` is
        not known."""
        ...

    async def claim(self, runner: str, *, lease_s: float, take_lapsed: bool = True) -> Claim | None:
        """Take the next program that nobody runs: one whose lease ran out, else the head of the queue; None if there is none.
        Without `take_lapsed` only from the queue; nor is a lapsed one taken by a call that was on its way for longer than half
        a lease, for the store stood still then, and nobody could extend anything."""
        ...

    async def extend(self, claims: Sequence[Claim], *, lease_s: float) -> dict[str, LeaseStatus]:
        """Keep the leases alive; says for each program id how its claim stands."""
        ...

    async def append(self, claim: Claim, steps: Sequence[Step], record: ProgramRecord) -> None:
        """Journal the steps and the record that they lead to. A final record also ends the lease. Appending the very same
        steps again (after an answer got lost) changes nothing.

        Raises:
            LeaseLost: the token is not the program's latest.
        """
        ...

    async def hand_back(self, claim: Claim, *, after_s: float = 0.0) -> None:
        """Give the program to another runner at once (a clean shutdown), or put one that waits for its client down: it is
        claimed again after `after_s`, or when its client has answered. An old claim changes nothing, and a program that no
        longer waits is given away at once."""
        ...

    async def act(self, program_id: str, steps: Sequence[Step], record: ProgramRecord) -> bool:
        """Journal what the client of a waiting program did, and the record that it leads to; if that is not waiting any more, a
        runner goes on with it at once.

        Returns:
            False, with nothing changed, where the program does not wait, or the steps do not follow its last one.

        Raises:
            ProgramNotFound.
        """
        ...

    async def request_cancel(self, program_id: str) -> ProgramRecord:
        """A queued program is cancelled at once, a claimed one by its runner, one that waits for its client by the next runner,
        which takes it at once. Again on a cancelled one: no change.

        Raises:
            ProgramNotFound, or IllegalTransition where the program has ended otherwise.
        """
        ...

    async def delete(self, program_id: str) -> None:
        """Forget a program that has ended.

        Raises:
            ProgramNotFound, or IllegalTransition where the program has not ended.
        """
        ...

    async def forget_finished(self, *, keep_s: float, keep_count: int) -> int:
        """Forget finished programs older than `keep_s` or beyond the newest `keep_count`, a bounded number a call."""
        ...

    async def totals(self) -> JournalTotals:
        """What the metrics page shows."""
        ...

    def listen(self, topic: str) -> AbstractAsyncContextManager[Signal]:
        """A signal that fires when something happens on the topic: `queued`, `cancels`, or `program_topic(id)`."""
        ...

    async def check(self) -> None:
        """Raises StoreUnavailable where the store does not answer."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalTotals:
    """Sums over the journal's whole life, and how many programs are in which state now."""

    by_state: Mapping[str, int]
    counters: Mapping[str, float]


QUEUED_TOPIC = "queued"
CANCELS_TOPIC = "cancels"


def program_topic(program_id: str) -> str:
    return f"program:{program_id}"


#: Finished programs forgotten by one call of `forget_finished`.
FORGET_BATCH = 50


def counter_increments(steps: Sequence[Step], record: ProgramRecord) -> dict[str, float]:
    """How steps move the journal's counters; counted where they are stored, so each step counts exactly once."""
    moves: dict[str, float] = {}

    def add(name: str, amount: float) -> None:
        if amount:
            moves[name] = moves.get(name, 0) + amount

    for step in steps:
        data = step.data
        if step.kind is StepKind.TURN_FINISHED:
            add("turns", 1)
            for name in ("prompt_tokens", "cached_tokens", "recomputed_tokens", "output_tokens"):
                add(name, data[name])
            for outcome, count in data["lease_ends"].items():
                add(f"leases:{outcome}", count)
        elif step.kind is StepKind.TURN_REPLAYED:
            add("turns_replayed", 1)
        elif step.kind is StepKind.TOOL_FINISHED:
            add(f"tool_calls:{data['outcome']}", 1)
        elif step.kind is StepKind.TOOLS_FINISHED:
            add("tool_seconds", data["seconds"])
        elif step.kind is StepKind.PROGRAM_CLAIMED and data["resumed"]:
            add("resumed", 1)
        elif step.kind is StepKind.PROGRAM_ENDED:
            add(f"ended:{record.state.value}:{data['end_reason']}", 1)
            for outcome, count in data["lease_ends"].items():
                add(f"leases:{outcome}", count)
    for name, amount in journal_histograms.increments(steps, record):
        add(name, amount)
    return moves
