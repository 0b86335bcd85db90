"""Whether a bound program should leave its replica for another one: the only reason to, while both live, is a shorter way.

    its KV is kept here                              STAY: strict, whatever the queue (the lease has been paid for)
    not known whether it is kept, or what waits cost STAY: a move on a guess loses KV on a guess
    wait here <= wait there + having it again there  STAY
    by less than the margin                          STAY: estimates are no better than that
    otherwise                                        MOVE

Waits are Little's law: turns that wait, divided by turns that the replica ends in a second. Having the context again costs its
tokens over the rate at which the other replica computes or, where it keeps copies below the GPU, reloads them. What
remains here of a context whose lease is over counts as all of it: the prefix cache may still have it, and staying is then right.

A program that moved stays for `min_stay_s`, so that two replicas with equal queues do not pass programs to and fro.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from agent_program.ids import ProgramId, ReplicaId
from continuum_router.replica_view import ReplicaView

if TYPE_CHECKING:
    from continuum_router.config import MigrationSettings


class Verdict(StrEnum):
    """What the rule says, and why."""

    MOVE = "move"
    KV_KEPT = "kv_kept"
    KV_UNKNOWN = "kv_unknown"
    COST_UNKNOWN = "cost_unknown"
    HERE_IS_SHORTER = "here_is_shorter"
    WITHIN_MARGIN = "within_margin"
    MOVED_RECENTLY = "moved_recently"


@dataclass(frozen=True, kw_only=True, slots=True)
class KvBelief:
    """What the last reply said of a program's KV on its replica."""

    replica_id: ReplicaId
    #: Until when a lease keeps it; in the past where none does.
    kept_until_s: float
    #: Tokens of the context: what would have to be computed again.
    context_tokens: int
    #: When the program was last moved by the rule; None for never, as far as is known.
    moved_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Weighed:
    """A verdict with what was weighed, in seconds; None where it was not needed or not known."""

    verdict: Verdict
    wait_here_s: float | None = None
    wait_there_s: float | None = None
    again_there_s: float | None = None

    def to_detail(self) -> dict[str, float | str]:
        """For the placement's explanation."""
        seconds = {
            "wait_here_s": self.wait_here_s,
            "wait_there_s": self.wait_there_s,
            "again_there_s": self.again_there_s,
        }
        known = {name: value for name, value in seconds.items() if value is not None}
        return {"migration": self.verdict.value, **known}


def expected_wait_s(view: ReplicaView, *, turns_more: int = 0) -> float | None:
    """Until a turn that arrives now starts: Little's law. `turns_more`: sent since the view. None where the rate is unknown."""
    waiting = view.waiting + turns_more
    if waiting == 0:
        return 0.0
    return waiting / view.turns_per_s if view.turns_per_s else None


def weigh(
    belief: KvBelief | None,
    here: ReplicaView,
    there: ReplicaView,
    *,
    now_s: float,
    sent_there: int = 0,
    settings: MigrationSettings,
) -> Weighed:
    """Should a program that is bound to `here` take its next turn `there`?"""
    if belief is None or belief.replica_id != here.replica_id:
        return Weighed(verdict=Verdict.KV_UNKNOWN)
    if now_s < belief.kept_until_s:
        return Weighed(verdict=Verdict.KV_KEPT)
    if belief.moved_s is not None and now_s - belief.moved_s < settings.min_stay_s:
        return Weighed(verdict=Verdict.MOVED_RECENTLY)
    wait_here_s, wait_there_s = expected_wait_s(here), expected_wait_s(there, turns_more=sent_there)
    if wait_here_s is None or wait_there_s is None or not there.context_tokens_per_s:
        return Weighed(verdict=Verdict.COST_UNKNOWN, wait_here_s=wait_here_s, wait_there_s=wait_there_s)
    again_s = belief.context_tokens / there.context_tokens_per_s
    gain_s = wait_here_s - (wait_there_s + again_s)
    if gain_s <= 0:
        verdict = Verdict.HERE_IS_SHORTER
    elif gain_s < settings.margin_s:
        verdict = Verdict.WITHIN_MARGIN
    else:
        verdict = Verdict.MOVE
    return Weighed(verdict=verdict, wait_here_s=wait_here_s, wait_there_s=wait_there_s, again_there_s=again_s)


class KvBeliefs:
    """The beliefs of one router: bounded, the least recently replied program goes. One that is not here is never moved."""

    def __init__(self, *, capacity: int) -> None:
        self._capacity = capacity
        self._beliefs: OrderedDict[ProgramId, KvBelief] = OrderedDict()

    def __len__(self) -> int:
        return len(self._beliefs)

    def get(self, program_id: ProgramId) -> KvBelief | None:
        """What is believed; None where nothing is."""
        return self._beliefs.get(program_id)

    def replied(
        self, program_id: ProgramId, replica_id: ReplicaId, *, kept_until_s: float, context_tokens: int
    ) -> None:
        """A turn of the program came back from the replica."""
        before = self._beliefs.pop(program_id, None)
        self._beliefs[program_id] = KvBelief(
            replica_id=replica_id,
            kept_until_s=kept_until_s,
            context_tokens=context_tokens,
            moved_s=before.moved_s if before else None,
        )
        if len(self._beliefs) > self._capacity:
            self._beliefs.popitem(last=False)

    def moved(self, program_id: ProgramId, to: ReplicaId, *, now_s: float) -> None:
        """The rule has moved the program."""
        before = self._beliefs.pop(program_id, None)
        if before is not None:
            self._beliefs[program_id] = KvBelief(
                replica_id=to, kept_until_s=before.kept_until_s, context_tokens=before.context_tokens, moved_s=now_s
            )

    def forget(self, program_id: ProgramId) -> None:
        """The program is over."""
        self._beliefs.pop(program_id, None)
