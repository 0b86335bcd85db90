"""The books of leases: how one begins, and each of the ways it ends."""

from collections.abc import Iterable

import pytest

from agent_program.ids import ProgramId, TenantId, ToolKey
from engine_replicas.retention.lease import BranchKey, Lease, LeaseEnd, LeaseEndReason, LeaseOutcome, LeaseState
from engine_replicas.retention.ledger import Cap, Ledger, RetentionCaps

ALICE, BOB = BranchKey(ProgramId("alice"), "0"), BranchKey(ProgramId("bob"), "0")
TENANT = TenantId("default")


def ledger(*, blocks: int = 100, tenant: int = 100, program: int = 100, queued_hold_s: float = 60.0) -> Ledger:
    return Ledger(
        RetentionCaps(
            blocks_max=blocks,
            tenant_blocks_max=tenant,
            program_blocks_max=program,
            queued_turn_hold_max_s=queued_hold_s,
        )
    )


def opened(
    books: Ledger,
    key: BranchKey = ALICE,
    blocks: Iterable[int] = range(10),
    *,
    now_s: float = 0.0,
    ttl_s: float = 5.0,
    arrival_s: float = 0.0,
    tenant: TenantId = TENANT,
    state: LeaseState = LeaseState.ARMED,
) -> tuple[Lease | None, tuple[LeaseEnd, ...]]:
    return books.open(
        key=key,
        tenant_id=tenant,
        program_arrival_s=arrival_s,
        blocks=blocks,
        tokens=160,
        now_s=now_s,
        ttl_s=ttl_s,
        state=state,
    )


def reasons(ended: Iterable[LeaseEnd]) -> list[LeaseEndReason]:
    return [end.reason for end in ended]


# --- beginning ---------------------------------------------------------------------------------------------------------


def test_a_lease_holds_its_blocks_until_its_deadline() -> None:
    books = ledger()
    lease, ended = opened(books, now_s=100.0, ttl_s=5.0)
    assert lease is not None
    assert (lease.deadline_s, books.blocks_held, ended) == (105.0, 10, ())


def test_a_newer_turn_of_a_branch_supersedes_its_lease() -> None:
    books = ledger()
    opened(books, blocks=range(5))
    lease, ended = opened(books, blocks=range(8))
    assert lease is not None
    assert reasons(ended) == [LeaseEndReason.SUPERSEDED]
    assert (len(books), books.blocks_held) == (1, 8)


def test_branches_of_one_program_have_a_lease_each() -> None:
    books = ledger()
    opened(books, BranchKey(ALICE.program_id, "left"), range(5))
    opened(books, BranchKey(ALICE.program_id, "right"), range(5, 10))
    assert len(books.of_program(ALICE.program_id)) == 2


def test_a_context_without_a_full_block_gets_no_lease() -> None:
    books = ledger()
    assert opened(books, blocks=()) == (None, ())


def test_blocks_that_leases_share_count_once() -> None:
    books = ledger(blocks=12)
    opened(books, ALICE, range(10))
    lease, _ = opened(books, BOB, range(2, 12))
    assert lease is not None
    assert books.blocks_held == 12


@pytest.mark.parametrize("cap", ["blocks", "tenant", "program"])
def test_no_cap_is_ever_exceeded(cap: str) -> None:
    books = ledger(**{cap: 15})
    opened(books, BranchKey(ALICE.program_id, "left"), range(10))
    lease, ended = opened(books, BranchKey(ALICE.program_id, "right"), range(10, 20))
    assert (lease, ended, books.blocks_held) == (None, (), 10)


def test_caps_of_a_tenant_and_a_program_are_their_own() -> None:
    books = ledger(tenant=10, program=10)
    opened(books, ALICE, range(10), tenant=TenantId("one"))
    lease, _ = opened(books, BOB, range(10, 20), tenant=TenantId("other"))
    assert lease is not None


# --- arming ------------------------------------------------------------------------------------------------------------


def test_arming_counts_from_the_end_of_the_turn() -> None:
    books = ledger()
    opened(books, now_s=100.0, ttl_s=1.5, state=LeaseState.PROVISIONAL)
    lease = books.arm(ALICE, ttl_s=30.0, tool=ToolKey("pytest"))
    assert lease is not None
    assert (lease.state, lease.deadline_s, lease.tool) == (LeaseState.ARMED, 130.0, "pytest")


def test_arming_or_extending_what_is_gone_changes_nothing() -> None:
    books = ledger()
    assert books.arm(ALICE, ttl_s=3.0, tool=None) is None
    assert books.extend(ALICE, 3.0, ttl_max_s=10.0) is None


def test_extending_never_shortens_and_never_passes_the_longest_lease() -> None:
    books = ledger()
    opened(books, now_s=0.0, ttl_s=5.0)
    deadlines = []
    for deadline_s in (3.0, 8.0, 100.0):
        lease = books.extend(ALICE, deadline_s, ttl_max_s=20.0)
        assert lease is not None
        deadlines.append(lease.deadline_s)
    assert deadlines == [5.0, 8.0, 20.0]


# --- reused ------------------------------------------------------------------------------------------------------------


def test_the_next_turn_ends_the_lease_when_it_is_scheduled() -> None:
    books = ledger()
    opened(books)
    lease_id = books.turn_arrived(ALICE, now_s=1.0)
    end = books.turn_scheduled(ALICE, lease_id)
    assert end is not None
    assert (end.reason.outcome, books.blocks_held) == (LeaseOutcome.REUSED, 0)


def test_a_turn_that_arrived_before_the_lease_does_not_use_it() -> None:
    books = ledger()
    earlier = books.turn_arrived(ALICE, now_s=0.0)
    opened(books, now_s=1.0)
    assert books.turn_scheduled(ALICE, earlier) is None
    assert len(books) == 1


def test_a_turn_that_arrived_on_a_superseded_lease_does_not_use_the_newer_one() -> None:
    books = ledger()
    opened(books)
    stale = books.turn_arrived(ALICE, now_s=1.0)
    opened(books, now_s=2.0)
    assert books.turn_scheduled(ALICE, stale) is None
    assert len(books) == 1


# --- expired -----------------------------------------------------------------------------------------------------------


def test_a_lease_expires_after_its_deadline_and_not_at_it() -> None:
    books = ledger()
    opened(books, now_s=0.0, ttl_s=5.0)
    assert books.expire(5.0) == ()
    assert reasons(books.expire(5.001)) == [LeaseEndReason.DEADLINE_PASSED]


def test_a_lease_that_nobody_armed_says_so_when_it_expires() -> None:
    books = ledger()
    opened(books, ttl_s=1.5, state=LeaseState.PROVISIONAL)
    assert reasons(books.expire(2.0)) == [LeaseEndReason.NEVER_ARMED]


def test_every_lapsed_lease_expires_at_once() -> None:
    books = ledger(blocks=1000)
    for index in range(20):
        opened(books, BranchKey(ProgramId(f"p{index}"), "0"), range(index * 5, index * 5 + 5), ttl_s=1.0)
    assert len(books.expire(2.0)) == 20


def test_a_queued_next_turn_suspends_expiry() -> None:
    books = ledger()
    opened(books, ttl_s=5.0)
    books.turn_arrived(ALICE, now_s=4.0)
    assert books.expire(30.0) == ()


def test_but_not_for_ever() -> None:
    books = ledger(queued_hold_s=60.0)
    opened(books, ttl_s=5.0)
    books.turn_arrived(ALICE, now_s=4.0)
    assert books.expire(64.0) == ()
    assert reasons(books.expire(64.1)) == [LeaseEndReason.QUEUED_TOO_LONG]


def test_further_arrivals_do_not_prolong_the_suspension() -> None:
    books = ledger(queued_hold_s=60.0)
    opened(books, ttl_s=5.0)
    for second in range(60):
        books.turn_arrived(ALICE, now_s=4.0 + second)
    assert len(books.expire(64.1)) == 1


def test_a_next_turn_that_leaves_the_queue_lets_the_lease_expire_again() -> None:
    books = ledger()
    opened(books, ttl_s=5.0)
    lease_id = books.turn_arrived(ALICE, now_s=4.0)
    books.turn_abandoned(ALICE, lease_id)
    assert len(books.expire(6.0)) == 1


def test_abandoning_is_counted_by_turn() -> None:
    books = ledger()
    opened(books, ttl_s=5.0)
    first = books.turn_arrived(ALICE, now_s=1.0)
    books.turn_arrived(ALICE, now_s=2.0)
    books.turn_abandoned(ALICE, first)
    assert books.expire(6.0) == ()
    books.turn_abandoned(ALICE, first)
    books.turn_abandoned(ALICE, first)
    assert len(books.expire(6.0)) == 1


# --- reclaimed ---------------------------------------------------------------------------------------------------------


def test_a_lease_can_be_taken_away_at_any_time_once() -> None:
    books = ledger()
    lease, _ = opened(books, ALICE, range(5))
    assert lease is not None
    books.turn_arrived(ALICE, now_s=1.0)
    end = books.reclaim(lease, LeaseEndReason.NOTHING_RUNS)
    assert end is not None
    assert (end.lease.key, books.blocks_held) == (ALICE, 0)
    assert books.reclaim(lease, LeaseEndReason.NOTHING_RUNS) is None


def test_the_narrowest_cap_that_would_be_exceeded_is_named() -> None:
    books = ledger(blocks=30, tenant=20, program=10)
    opened(books, ALICE, range(8))
    assert books.exceeded_cap(ALICE.program_id, TENANT, 2) is None
    assert books.exceeded_cap(ALICE.program_id, TENANT, 3) is Cap.PROGRAM
    assert books.exceeded_cap(BOB.program_id, TENANT, 13) is Cap.PROGRAM
    opened(books, BOB, range(8, 18))
    assert books.exceeded_cap(ProgramId("carol"), TENANT, 3) is Cap.TENANT
    assert books.exceeded_cap(ProgramId("carol"), TenantId("other"), 10) is None
    opened(books, BranchKey(ProgramId("carol"), "0"), range(18, 27), tenant=TenantId("other"))
    assert books.exceeded_cap(ProgramId("dave"), TenantId("third"), 4) is Cap.ALL


# --- released ----------------------------------------------------------------------------------------------------------


def test_releasing_a_program_ends_all_its_branches_and_no_other() -> None:
    books = ledger()
    opened(books, BranchKey(ALICE.program_id, "left"), range(5))
    opened(books, BranchKey(ALICE.program_id, "right"), range(5, 10))
    opened(books, BOB, range(10, 15))
    assert len(books.release_program(ALICE.program_id, LeaseEndReason.PROGRAM_OVER)) == 2
    assert [lease.key for lease in books.leases()] == [BOB]


def test_releasing_all_leaves_nothing() -> None:
    books = ledger()
    opened(books, ALICE, range(5))
    opened(books, BOB, range(5, 10))
    assert len(books.release_all(LeaseEndReason.CACHE_RESET)) == 2
    assert (len(books), books.blocks_held) == (0, 0)
    books.check_integrity()


def test_every_reason_belongs_to_one_of_the_four_outcomes() -> None:
    assert {reason.outcome for reason in LeaseEndReason} == set(LeaseOutcome)


def test_a_shared_block_stays_held_until_its_last_lease_ends() -> None:
    books = ledger()
    opened(books, ALICE, range(10))
    opened(books, BOB, range(5, 15))
    books.release(ALICE, LeaseEndReason.NOT_WORTH_IT)
    assert books.blocks_held == 10
    books.check_integrity()
