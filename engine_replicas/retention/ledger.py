"""Who holds which KV until when: the books of all leases.

A lease begins with `open`, when a turn has ended, and ends in exactly one of four ways (`lease.py`): the next turn is
scheduled on it (`turn_scheduled`), its deadline passes (`expire`), others need the memory (`reclaim`), or there is nothing
left to wait for (`release…`). Every method that ends leases returns them; the caller gives their blocks back, once.

What never happens, whatever comes in and in whatever order:
- a branch with two leases: a newer one supersedes the older;
- a lease that blocks progress: any lease can be reclaimed at any time, also one whose next turn is queued;
- more blocks held than the caps allow: over all, by a tenant, by a program;
- an unknown, repeated or stale event that raises: it finds no lease and changes nothing.

Blocks are opaque integers. Leases may share them (a common system prompt): a block counts once over all, and is charged to
the lease that held it first.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from agent_program.ids import ProgramId, TenantId, ToolKey
from engine_replicas.retention.lease import BranchKey, Lease, LeaseEnd, LeaseEndReason, LeaseState


class Cap(Enum):
    """Whose leases a cap counts."""

    PROGRAM = auto()
    TENANT = auto()
    ALL = auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionCaps:
    """The most KV blocks that leases may hold."""

    #: All leases together, shared blocks counted once.
    blocks_max: int
    #: The leases of one tenant.
    tenant_blocks_max: int
    #: The leases of one program.
    program_blocks_max: int
    #: How long past its deadline a lease is kept for a next turn that waits in the queue, counted from that turn's arrival.
    queued_turn_hold_max_s: float


class Ledger:
    """All live leases of one engine."""

    def __init__(self, caps: RetentionCaps) -> None:
        self._caps = caps
        self._leases: dict[BranchKey, Lease] = {}
        #: The branches with a lease, of each program that has one, in the order in which their leases began.
        self._branches: dict[ProgramId, dict[BranchKey, None]] = {}
        self._held: set[int] = set()
        #: Block → leases that hold it beyond the first. Most blocks are not shared, so most work is on whole sets.
        self._extra_holders: dict[int, int] = {}
        self._charged: dict[int, int] = {}
        self._tenant_blocks: Counter[TenantId] = Counter()
        self._program_blocks: Counter[ProgramId] = Counter()
        self._next_id = 1
        #: (when a lease may lapse, its id, its branch), a heap; entries that a lease has outlived are dropped when they come up.
        self._lapses: list[tuple[float, int, BranchKey]] = []

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def blocks_held(self) -> int:
        """Distinct blocks that any lease holds."""
        return len(self._held)

    def get(self, key: BranchKey) -> Lease | None:
        """The branch's live lease."""
        return self._leases.get(key)

    def live(self) -> Collection[Lease]:
        """Every live lease, oldest first; a view, not to be kept while leases begin or end."""
        return self._leases.values()

    def leases(self) -> tuple[Lease, ...]:
        """Every live lease, oldest first."""
        return tuple(self._leases.values())

    def of_program(self, program_id: ProgramId) -> tuple[Lease, ...]:
        """The program's live leases, one per branch."""
        return tuple(self._leases[key] for key in self._branches.get(program_id, ()))

    def exceeded_cap(self, program_id: ProgramId, tenant_id: TenantId, blocks: int) -> Cap | None:
        """The first cap that `blocks` more would exceed, the narrowest first."""
        if self._program_blocks[program_id] + blocks > self._caps.program_blocks_max:
            return Cap.PROGRAM
        if self._tenant_blocks[tenant_id] + blocks > self._caps.tenant_blocks_max:
            return Cap.TENANT
        return Cap.ALL if self.blocks_held + blocks > self._caps.blocks_max else None

    def not_held(self, blocks: frozenset[int]) -> int:
        """How many of `blocks` no lease holds: what a lease on them would be charged."""
        return len(blocks - self._held)

    # --- a lease begins and is armed -------------------------------------------------------------------------------

    def open(
        self,
        *,
        key: BranchKey,
        tenant_id: TenantId,
        program_arrival_s: float,
        blocks: Iterable[int],
        tokens: int,
        now_s: float,
        ttl_s: float,
        state: LeaseState,
        tool: ToolKey | None = None,
        other_tokens: int = 0,
    ) -> tuple[Lease | None, tuple[LeaseEnd, ...]]:
        """Begin a lease at the end of a turn.

        Returns the lease, or None where there is nothing to hold or a cap would be exceeded; and the branch's older lease,
        which ends either way: what it held is a prefix of what the newer turn left behind.
        """
        ended = self._end_key(key, LeaseEndReason.SUPERSEDED)
        held = frozenset(blocks)
        charge = len(held - self._held)
        if not held or self.exceeded_cap(key.program_id, tenant_id, charge) is not None:
            return None, ended
        lease = Lease(
            lease_id=self._next_id,
            key=key,
            tenant_id=tenant_id,
            program_arrival_s=program_arrival_s,
            blocks=held,
            tokens=tokens,
            started_s=now_s,
            away_since_s=now_s,
            ttl_s=ttl_s,
            deadline_s=now_s + ttl_s,
            state=state,
            tool=tool,
            other_tokens=other_tokens,
        )
        self._next_id += 1
        self._put(lease)
        for block in held & self._held:
            self._extra_holders[block] = self._extra_holders.get(block, 0) + 1
        self._held |= held
        self._charged[lease.lease_id] = charge
        self._tenant_blocks[tenant_id] += charge
        self._program_blocks[key.program_id] += charge
        return lease, ended

    def arm(
        self, key: BranchKey, *, ttl_s: float, tool: ToolKey | None, return_probability: float | None = None
    ) -> Lease | None:
        """Grant `ttl_s` from the end of the turn, as the policy chose. None where the branch has no lease any more."""
        lease = self._leases.get(key)
        if lease is None:
            return None
        deadline_s = lease.started_s + ttl_s
        return self._put(
            replace(
                lease,
                state=LeaseState.ARMED,
                ttl_s=ttl_s,
                deadline_s=deadline_s,
                tool=tool,
                return_probability=return_probability,
            )
        )

    def expect(self, key: BranchKey, now_s: float) -> Lease | None:
        """The branch's next turn is due from now on. None where it has no lease."""
        lease = self._leases.get(key)
        return self._put(replace(lease, away_since_s=now_s)) if lease is not None else None

    def extend(self, key: BranchKey, deadline_s: float, *, ttl_max_s: float) -> Lease | None:
        """Move the deadline to `deadline_s` if that is later, but never beyond `ttl_max_s` from the end of the turn. None
        where the branch has no lease."""
        lease = self._leases.get(key)
        if lease is None:
            return None
        deadline_s = min(deadline_s, lease.started_s + ttl_max_s)
        return self._put(replace(lease, deadline_s=max(lease.deadline_s, deadline_s)))

    # --- the next turn -----------------------------------------------------------------------------------------------

    def turn_arrived(self, key: BranchKey, *, now_s: float) -> int | None:
        """A turn of the branch entered the queue. Returns the id of the lease that it will run on, if there is one."""
        lease = self._leases.get(key)
        if lease is None:
            return None
        since_s = now_s if lease.queued_since_s is None else lease.queued_since_s
        self._put(replace(lease, queued_turns=lease.queued_turns + 1, queued_since_s=since_s))
        return lease.lease_id

    def turn_abandoned(self, key: BranchKey, lease_id: int | None) -> None:
        """A turn left the queue without having been scheduled."""
        lease = self._same(key, lease_id)
        if lease is not None and lease.queued_turns:
            queued = lease.queued_turns - 1
            self._put(replace(lease, queued_turns=queued, queued_since_s=lease.queued_since_s if queued else None))

    def turn_scheduled(self, key: BranchKey, lease_id: int | None) -> LeaseEnd | None:
        """The turn that arrived on `lease_id` runs and holds its blocks itself: the lease has served."""
        lease = self._same(key, lease_id)
        return self._end(lease, LeaseEndReason.NEXT_TURN_SCHEDULED) if lease is not None else None

    # --- a lease ends ------------------------------------------------------------------------------------------------

    def expire(self, now_s: float) -> tuple[LeaseEnd, ...]:
        """End every lease whose deadline lies before `now_s`, except those whose next turn waits in the queue, and not
        for too long."""
        due: dict[int, Lease] = {}
        while self._lapses and self._lapses[0][0] < now_s:
            _, lease_id, key = heapq.heappop(self._lapses)
            lease = self._same(key, lease_id)
            # A lease that was extended has a later entry too.
            if lease is not None and self._lapses_s(lease) < now_s:
                due[lease_id] = lease
        return tuple(self._end(lease, _why_expired(lease)) for _, lease in sorted(due.items()))

    def reclaim(self, lease: Lease, reason: LeaseEndReason) -> LeaseEnd | None:
        """Take a lease away for somebody who needs its memory; None where it has ended already."""
        return self._end(lease, reason) if self._same(lease.key, lease.lease_id) is not None else None

    def release(self, key: BranchKey, reason: LeaseEndReason) -> LeaseEnd | None:
        """End the branch's lease."""
        ended = self._end_key(key, reason)
        return ended[0] if ended else None

    def release_program(self, program_id: ProgramId, reason: LeaseEndReason) -> tuple[LeaseEnd, ...]:
        """End all leases of a program."""
        return tuple(self._end(lease, reason) for lease in self.of_program(program_id))

    def release_all(self, reason: LeaseEndReason) -> tuple[LeaseEnd, ...]:
        """End every lease: afterwards no block is held."""
        return tuple(self._end(lease, reason) for lease in self.leases())

    def check_integrity(self) -> None:
        """Recompute all sums from the leases. For tests.

        Raises:
            AssertionError: the books do not add up.
        """
        holders: Counter[int] = Counter()
        for lease in self._leases.values():
            holders.update(lease.blocks)
            assert lease.queued_turns >= 0
            assert (lease.queued_turns == 0) == (lease.queued_since_s is None)
        assert {key for keys in self._branches.values() for key in keys} == self._leases.keys()
        scheduled = {(at_s, lease_id) for at_s, lease_id, _ in self._lapses}
        assert all((self._lapses_s(lease), lease.lease_id) in scheduled for lease in self._leases.values())
        assert holders.keys() == self._held
        assert {block: count - 1 for block, count in holders.items() if count > 1} == self._extra_holders
        assert self._charged.keys() == {lease.lease_id for lease in self._leases.values()}
        tenant: Counter[TenantId] = Counter()
        program: Counter[ProgramId] = Counter()
        for lease in self._leases.values():
            tenant[lease.tenant_id] += self._charged[lease.lease_id]
            program[lease.key.program_id] += self._charged[lease.lease_id]
        assert +tenant == +self._tenant_blocks
        assert +program == +self._program_blocks
        assert self.blocks_held <= self._caps.blocks_max
        assert all(blocks <= self._caps.tenant_blocks_max for blocks in tenant.values())
        assert all(blocks <= self._caps.program_blocks_max for blocks in program.values())

    # --- inside --------------------------------------------------------------------------------------------------------

    def _put(self, lease: Lease) -> Lease:
        before = self._leases.get(lease.key)
        self._leases[lease.key] = lease
        if before is None:
            self._branches.setdefault(lease.key.program_id, {})[lease.key] = None
        if before is None or self._lapses_s(before) != self._lapses_s(lease):
            heapq.heappush(self._lapses, (self._lapses_s(lease), lease.lease_id, lease.key))
            if len(self._lapses) > 64 + 4 * len(self._leases):
                self._lapses = [(self._lapses_s(live), live.lease_id, key) for key, live in self._leases.items()]
                heapq.heapify(self._lapses)
        return lease

    def _same(self, key: BranchKey, lease_id: int | None) -> Lease | None:
        lease = self._leases.get(key)
        return lease if lease is not None and lease.lease_id == lease_id else None

    def _lapses_s(self, lease: Lease) -> float:
        if lease.queued_since_s is None:
            return lease.deadline_s
        return max(lease.deadline_s, lease.queued_since_s + self._caps.queued_turn_hold_max_s)

    def _end_key(self, key: BranchKey, reason: LeaseEndReason) -> tuple[LeaseEnd, ...]:
        lease = self._leases.get(key)
        return (self._end(lease, reason),) if lease is not None else ()

    def _end(self, lease: Lease, reason: LeaseEndReason) -> LeaseEnd:
        del self._leases[lease.key]
        branches = self._branches[lease.key.program_id]
        del branches[lease.key]
        if not branches:
            del self._branches[lease.key.program_id]
        shared = lease.blocks & self._extra_holders.keys()
        for block in shared:
            if self._extra_holders[block] == 1:
                del self._extra_holders[block]
            else:
                self._extra_holders[block] -= 1
        self._held -= lease.blocks - shared
        charge = self._charged.pop(lease.lease_id)
        _subtract(self._tenant_blocks, lease.tenant_id, charge)
        _subtract(self._program_blocks, lease.key.program_id, charge)
        return LeaseEnd(lease=lease, reason=reason)


def _why_expired(lease: Lease) -> LeaseEndReason:
    if lease.queued_since_s is not None:
        return LeaseEndReason.QUEUED_TOO_LONG
    if lease.state is LeaseState.PROVISIONAL:
        return LeaseEndReason.NEVER_ARMED
    return LeaseEndReason.DEADLINE_PASSED


def _subtract(counts: Counter[Any], key: object, amount: int) -> None:
    counts[key] -= amount
    if counts[key] <= 0:
        del counts[key]
