"""Any sequence of events, against a model of the ledger that is nothing but its promises.

The model remembers every lease that ever began and how it ended. After each event: a lease has ended at most once, what the
ledger holds is the union of the live leases' blocks, no cap is exceeded, and the books add up.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agent_program.ids import ProgramId, TenantId, ToolKey
from engine_replicas.retention.lease import BranchKey, Lease, LeaseEnd, LeaseEndReason, LeaseOutcome, LeaseState
from engine_replicas.retention.ledger import Ledger, RetentionCaps
from engine_replicas.retention.reclaim import LatestArrival

KEYS = st.builds(BranchKey, st.sampled_from("abcd").map(ProgramId), st.sampled_from("01"))
# Runs of blocks from a small pool, so that leases overlap and caps bind.
BLOCKS = st.tuples(st.integers(0, 30), st.integers(0, 12)).map(lambda run: frozenset(range(run[0], run[0] + run[1])))
SECONDS = st.floats(0.0, 20.0)


class LedgerMachine(RuleBasedStateMachine):
    @initialize(blocks=st.integers(0, 40), tenant=st.integers(0, 40), program=st.integers(0, 40))
    def begin(self, blocks: int, tenant: int, program: int) -> None:
        self.caps = RetentionCaps(
            blocks_max=blocks, tenant_blocks_max=tenant, program_blocks_max=program, queued_turn_hold_max_s=10.0
        )
        self.ledger = Ledger(self.caps)
        self.now_s = 0.0
        self.live: dict[int, Lease] = {}
        self.outcomes: dict[int, LeaseOutcome] = {}
        #: (branch, lease id) of turns in the queue, as the ledger told them.
        self.queued: list[tuple[BranchKey, int | None]] = []

    def _ended(self, *ends: LeaseEnd | None) -> None:
        for end in ends:
            if end is None:
                continue
            begun = self.live.pop(end.lease.lease_id)  # KeyError: it ended twice, or never began
            assert begun.blocks == end.lease.blocks
            self.outcomes[end.lease.lease_id] = end.reason.outcome

    @rule(
        key=KEYS,
        blocks=BLOCKS,
        ttl_s=SECONDS,
        state=st.sampled_from(LeaseState),
        tenant=st.sampled_from("xy").map(TenantId),
    )
    def turn_finished(
        self, key: BranchKey, blocks: frozenset[int], ttl_s: float, state: LeaseState, tenant: TenantId
    ) -> None:
        had = self.ledger.get(key)
        lease, ended = self.ledger.open(
            key=key,
            tenant_id=tenant,
            program_arrival_s=float(ord(key.program_id)),
            blocks=blocks,
            tokens=16 * len(blocks),
            now_s=self.now_s,
            ttl_s=ttl_s,
            state=state,
        )
        self._ended(*ended)
        assert [end.lease.lease_id for end in ended] == ([had.lease_id] if had is not None else [])
        if lease is not None:
            assert lease.lease_id not in self.outcomes
            self.live[lease.lease_id] = lease
        elif blocks:
            assert self._would_exceed_a_cap(blocks)

    def _would_exceed_a_cap(self, blocks: frozenset[int]) -> bool:
        # Whoever is charged, no tenant and no program is charged more than all that is held.
        held = frozenset().union(*(lease.blocks for lease in self.live.values()))
        smallest = min(self.caps.blocks_max, self.caps.tenant_blocks_max, self.caps.program_blocks_max)
        return len(held | blocks) > smallest

    @rule(key=KEYS, ttl_s=SECONDS)
    def armed(self, key: BranchKey, ttl_s: float) -> None:
        lease = self.ledger.arm(key, ttl_s=ttl_s, tool=ToolKey("t"))
        assert (lease is None) == (self._live_of(key) is None)
        assert lease is None or lease.deadline_s == lease.started_s + ttl_s

    @rule(key=KEYS, by_s=SECONDS)
    def extended(self, key: BranchKey, by_s: float) -> None:
        before = self.ledger.get(key)
        after = self.ledger.extend(key, self.now_s + by_s, ttl_max_s=15.0)
        if before is not None:
            assert after is not None
            assert before.deadline_s <= after.deadline_s <= max(before.deadline_s, before.started_s + 15.0)

    @rule(key=KEYS)
    def turn_arrived(self, key: BranchKey) -> None:
        self.queued.append((key, self.ledger.turn_arrived(key, now_s=self.now_s)))

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def turn_scheduled(self, data: st.DataObject) -> None:
        key, lease_id = self.queued.pop(data.draw(st.integers(0, len(self.queued) - 1)))
        was_live = lease_id in self.live
        end = self.ledger.turn_scheduled(key, lease_id)
        self._ended(end)
        assert (end is not None) == was_live
        assert end is None or end.reason.outcome is LeaseOutcome.REUSED

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def turn_abandoned(self, data: st.DataObject) -> None:
        self.ledger.turn_abandoned(*self.queued.pop(data.draw(st.integers(0, len(self.queued) - 1))))

    @rule(by_s=SECONDS)
    def time_passes(self, by_s: float) -> None:
        self.now_s += by_s
        ended = self.ledger.expire(self.now_s)
        self._ended(*ended)
        for end in ended:
            assert end.lease.deadline_s < self.now_s
            assert end.reason.outcome is LeaseOutcome.EXPIRED
        for lease in self.ledger.leases():
            has_queued_turn = any(lease_id == lease.lease_id for _, lease_id in self.queued)
            assert lease.deadline_s >= self.now_s or has_queued_turn
        assert self.ledger.expire(self.now_s) == ()

    @rule(spare=st.none() | KEYS)
    def memory_is_short(self, spare: BranchKey | None) -> None:
        before = len(self.ledger)
        victim = LatestArrival().victim(self.ledger.live(), spare=spare, now_s=self.now_s)
        end = self.ledger.reclaim(victim, LeaseEndReason.NOTHING_RUNS) if victim is not None else None
        self._ended(end)
        assert (end is None) == (before == 0)
        assert end is None or end.lease.key != spare or before == 1

    @rule(program=st.sampled_from("abcd").map(ProgramId))
    def program_over(self, program: ProgramId) -> None:
        self._ended(*self.ledger.release_program(program, LeaseEndReason.PROGRAM_OVER))
        assert self.ledger.of_program(program) == ()

    @rule()
    def cache_reset(self) -> None:
        self._ended(*self.ledger.release_all(LeaseEndReason.CACHE_RESET))
        assert self.ledger.blocks_held == 0

    @invariant()
    def the_books_add_up(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.ledger.check_integrity()
        assert {lease.lease_id for lease in self.ledger.leases()} == self.live.keys()
        assert self.ledger.blocks_held == len(frozenset().union(*(lease.blocks for lease in self.live.values())))
        assert not self.live.keys() & self.outcomes.keys()

    @invariant()
    def however_much_is_held_all_of_it_can_be_had_back(self) -> None:
        # Progress: reclaiming never refuses while there is a lease. Checked on the count, without spoiling the state.
        if hasattr(self, "ledger"):
            assert (len(self.ledger) == 0) == (self.ledger.blocks_held == 0)

    def _live_of(self, key: BranchKey) -> Lease | None:
        return next((lease for lease in self.live.values() if lease.key == key), None)


LedgerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestLedger = LedgerMachine.TestCase
