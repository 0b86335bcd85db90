"""Whose lease ends when memory is short, and for whom.

A *running* turn that cannot grow always takes a lease: the alternative is to preempt somebody. What a *waiting* turn may
take while others run is the policy's:

- `LatestArrival`, the paper's: nothing. Running turns will end and leases will lapse; yielding to every newcomer would make
  leases worthless. The victim of a running turn is the program that came last (paper, section 4.3).
- `CheapestFirst`: whatever is worth less than what the turn brings. A paused program that has been away for t seconds
  returns in the next one with a probability of about h = 1 / t (the hazard of a time without a scale; no history is needed
  for it, and measured histories add little to it). If its KV is gone then, the whole batch waits for its prefill, R seconds
  (`ReloadCost.stall_s`). So holding it is worth h · R seconds a second, and per block that is its price. On the other side, one more turn in the
  batch raises the engine's rate (`DecodeCost.gain_rate`), also in seconds a second.

Pure: leases in, a choice out; the ledger and the adapter carry it out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from engine_replicas.retention.decode_cost import DecodeCost
from engine_replicas.retention.lease import BranchKey, Lease
from engine_replicas.retention.reload_cost import ReloadCost

#: A tool that has just been started may return at once; below this age the hazard does not grow any more.
HAZARD_AGE_S_MIN = 0.5
_STALL_S_PER_TOKEN_UNKNOWN = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingNeed:
    """A waiting turn that does not fit while others run."""

    #: Blocks that it lacks.
    blocks_missing: int
    #: Tokens that it will hold when it runs.
    own_tokens: int
    #: Tokens that the running turns hold.
    running_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """What a lease was worth when it was looked at."""

    #: The program's chance to be back within the next second.
    hazard_per_s: float
    #: Seconds that everybody would wait if it came back and its KV were gone.
    benefit_s: float
    #: The product of the two: seconds saved a second.
    value_rate: float
    #: That for each block that it holds: the smallest gives way first.
    per_block: float


class Reclaiming(Protocol):
    """An order of leases to take, and what a waiting turn may take of them."""

    #: Whether leases have a price at all: then they need no deadline.
    is_priced: bool

    def victim(self, leases: Iterable[Lease], *, spare: BranchKey | None, now_s: float) -> Lease | None:
        """The lease that a running turn takes, or anybody when nothing runs; `spare`'s own only as the last one."""
        ...

    def worth_taking(
        self, leases: Iterable[Lease], need: WaitingNeed, *, spare: BranchKey | None, now_s: float
    ) -> tuple[Lease, ...]:
        """The leases that a waiting turn may take while others run; empty where it has to wait."""
        ...


class LatestArrival:
    """The paper's victim: first those whose next turn is not queued, then the program that arrived last."""

    is_priced = False

    def victim(self, leases: Iterable[Lease], *, spare: BranchKey | None, now_s: float) -> Lease | None:
        return max(
            leases,
            key=lambda lease: (lease.key != spare, lease.queued_turns == 0, lease.program_arrival_s, lease.lease_id),
            default=None,
        )

    def worth_taking(
        self, leases: Iterable[Lease], need: WaitingNeed, *, spare: BranchKey | None, now_s: float
    ) -> tuple[Lease, ...]:
        return ()


class CheapestFirst:
    """The least valuable block first, and only for what is worth more."""

    is_priced = True

    def __init__(self, reload: ReloadCost, decode: DecodeCost) -> None:
        self._reload = reload
        self._decode = decode

    def value_rate(self, lease: Lease, now_s: float) -> float:
        """What the lease is worth now, in seconds a second."""
        # Before anything is known about prefill, the age alone makes the price.
        stall_s = self._reload.stall_s(lease.tokens) or _STALL_S_PER_TOKEN_UNKNOWN * lease.tokens
        return hazard_per_s(lease, now_s) * stall_s

    def price(self, lease: Lease, now_s: float) -> Price:
        """What the lease is worth now, and why; for people."""
        hazard, value = hazard_per_s(lease, now_s), self.value_rate(lease, now_s)
        return Price(
            hazard_per_s=hazard, benefit_s=value / hazard, value_rate=value, per_block=value / len(lease.blocks)
        )

    def offer(self, need: WaitingNeed) -> float:
        """What a waiting turn brings, in the unit of `Price.value_rate`."""
        return self._decode.gain_rate(own_tokens=need.own_tokens, running_tokens=need.running_tokens)

    def victim(self, leases: Iterable[Lease], *, spare: BranchKey | None, now_s: float) -> Lease | None:
        return min(leases, key=lambda lease: self._rank(lease, spare, now_s), default=None)

    def worth_taking(
        self, leases: Iterable[Lease], need: WaitingNeed, *, spare: BranchKey | None, now_s: float
    ) -> tuple[Lease, ...]:
        gain = self.offer(need)
        taken: list[Lease] = []
        blocks, loss = 0, 0.0
        for lease in sorted(leases, key=lambda lease: self._rank(lease, spare, now_s)):
            if blocks >= need.blocks_missing or lease.key == spare:
                break
            loss += self.value_rate(lease, now_s)
            if loss >= gain:
                return ()
            blocks += len(lease.blocks)
            taken.append(lease)
        return tuple(taken) if blocks >= need.blocks_missing else ()

    def _rank(self, lease: Lease, spare: BranchKey | None, now_s: float) -> tuple[bool, float, int]:
        return (lease.key == spare, self.value_rate(lease, now_s) / len(lease.blocks), -lease.lease_id)


def hazard_per_s(lease: Lease, now_s: float) -> float:
    """How likely the program is to come back within the next second, by how long it has been away."""
    if lease.queued_turns:
        return 1.0 / HAZARD_AGE_S_MIN
    return 1.0 / max(now_s - lease.away_since_s, HAZARD_AGE_S_MIN)
