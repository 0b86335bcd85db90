"""A second retention policy beside the one that acts: what it would have held, saved and lost on the same stream of turns.

An operator can so try a policy on real load. The shadow is told the same events as the `RetentionController`, keeps books of its
own of leases that exist on paper only, and never touches the engine: it only reads what the engine has learned of tools, delays
and program lengths, and fits costs of its own, since reading a fit may renew it.

Three things decide how long a paper lease lasts: its policy's deadline; the caps of the settings; and memory. Paper leases must fit
beside what really runs; where they do not, they are reclaimed by the shadow's own rule. What a waiting turn would have paid for
is not played through, for then it would have run, and everything after it would be another world. For the same reason turns come
and go as they really did, and shared prefixes count once for each lease: the numbers say what would change first, not where the
engine would end up. The replay says that.

    agreement                of the turns that came back: a lease held their context by both policies, neither, only one
    block_seconds            KV blocks times seconds that leases held, on paper and really
    would_save_tokens        of the turns that came back: context that was computed again and lay in a paper lease
    would_recompute_tokens   at most: context that was found, that a real lease held and no paper lease did

Pure and bounded: one lease a branch, as in the real ledger.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from agent_program.ids import ProgramId, TenantId, ToolKey
from engine_replicas.config import SchedulingSettings
from engine_replicas.retention.events import FinishedTurn, TurnEnding
from engine_replicas.retention.lease import BranchKey, Lease, LeaseEnd, LeaseEndReason, LeaseState
from engine_replicas.retention.ledger import Ledger, RetentionCaps
from engine_replicas.retention.policy import EndedTurn, Estimates, RetentionPolicy
from engine_replicas.retention.reclaim import Reclaiming
from engine_replicas.retention.room import make_room


class Shadow:
    """Leases on paper."""

    def __init__(
        self,
        *,
        settings: SchedulingSettings,
        policy: RetentionPolicy,
        reclaiming: Reclaiming,
        estimates: Estimates,
        blocks_total: int,
        block_tokens: int,
    ) -> None:
        """Start with no lease.

        Args:
            settings: limits and caps, with the shadow's policy named in them.
            policy: how long KV would be kept.
            reclaiming: whose lease would give way.
            estimates: what the policy looks at; `prefill`, `decode` and `reload` belong to the shadow and are fed with what the
                real ones are fed with.
            blocks_total: KV blocks of the engine.
            block_tokens: tokens in a block.
        """
        self.estimates = estimates
        self._settings = settings
        self._policy = policy
        self._reclaiming = reclaiming
        self._blocks_total = blocks_total
        self._block_tokens = block_tokens
        fraction_max = 1.0 if reclaiming.is_priced else settings.retained_fraction_max
        self._ttl_max_s = settings.priced_ttl_max_s if reclaiming.is_priced else settings.ttl_max_s
        self._ledger = Ledger(
            RetentionCaps(
                blocks_max=int(fraction_max * blocks_total),
                tenant_blocks_max=int(settings.tenant_retained_fraction_max * blocks_total),
                program_blocks_max=int(settings.program_retained_fraction_max * blocks_total),
                queued_turn_hold_max_s=settings.queued_turn_hold_max_s,
            )
        )
        #: Names for blocks on paper; no two leases share any.
        self._next_block = 0
        #: The paper lease that each turn in the queue would run on.
        self._queued: dict[str, tuple[BranchKey, int]] = {}
        self._agreement: Counter[str] = Counter({"both": 0, "neither": 0, "only_real": 0, "only_shadow": 0})
        self._ends: Counter[str] = Counter()
        self._block_seconds = {"shadow": 0.0, "real": 0.0}
        self._would_save = self._would_recompute = 0

    # --- events --------------------------------------------------------------------------------------------------------

    def turn_arrived(self, turn_id: str, key: BranchKey, now_s: float) -> None:
        """A turn of the branch entered the queue."""
        lease_id = self._ledger.turn_arrived(key, now_s=now_s)
        if lease_id is not None:
            self._queued[turn_id] = (key, lease_id)

    def turn_scheduled(
        self,
        turn_id: str,
        *,
        context_tokens: int | None,
        hit_tokens: int,
        loaded_tokens: int,
        had_lease: bool,
        now_s: float,
    ) -> None:
        """A turn got its first blocks, and found `hit_tokens`, `loaded_tokens` of them loaded from a tier below; `had_lease` says
        whether a real lease held its context, which had `context_tokens`: None for a first turn."""
        key, lease_id = self._queued.pop(turn_id, (None, 0))
        end = self._ledger.turn_scheduled(key, lease_id) if key is not None else None
        if context_tokens is None:
            return
        self.estimates.reload.returned(context_tokens - hit_tokens + loaded_tokens, loaded_tokens)
        self._agreement[_AGREEMENT[had_lease, end is not None]] += 1
        found = min(hit_tokens, context_tokens)
        if end is not None:
            self._note((end,), now_s)
            self._would_save += max(0, min(end.lease.tokens, context_tokens) - found)
        elif had_lease:
            self._would_recompute += found

    def turn_left(self, turn_id: str) -> None:
        """A turn left the engine; if it never ran, its lease goes on waiting for the next."""
        queued = self._queued.pop(turn_id, None)
        if queued is not None:
            self._ledger.turn_abandoned(*queued)

    def turn_ended(
        self,
        finished: FinishedTurn,
        key: BranchKey,
        *,
        tenant_id: TenantId,
        program_arrival_s: float,
        tool: ToolKey | None,
        now_s: float,
    ) -> None:
        """A turn left its context behind."""
        tokens = finished.context_tokens // self._block_tokens * self._block_tokens
        is_open = self._policy.depends_on_tool and tool is None
        ttl_s = self._settings.provisional_ttl_s
        if not is_open:
            ended = EndedTurn(tool=tool, context_tokens=finished.context_tokens, other_tokens=finished.other_tokens)
            ttl_s = self._policy.decide(ended).ttl_s
        is_sure = finished.ending is TurnEnding.ENDED and not is_open
        if not is_sure:
            ttl_s = min(ttl_s, self._settings.provisional_ttl_s)
        ttl_s = min(ttl_s, self._ttl_max_s)
        if ttl_s > 0 and tokens:
            self._open(
                key,
                tenant_id=tenant_id,
                program_arrival_s=program_arrival_s,
                tokens=tokens,
                other_tokens=finished.other_tokens,
                state=LeaseState.ARMED if is_sure else LeaseState.PROVISIONAL,
                ttl_s=ttl_s,
                tool=tool,
                now_s=now_s,
            )
        else:
            self._release(key, LeaseEndReason.SUPERSEDED, now_s)

    def _open(
        self,
        key: BranchKey,
        *,
        tenant_id: TenantId,
        program_arrival_s: float,
        tokens: int,
        other_tokens: int,
        state: LeaseState,
        ttl_s: float,
        tool: ToolKey | None,
        now_s: float,
    ) -> None:
        count = tokens // self._block_tokens
        blocks = frozenset(range(self._next_block, self._next_block + count))
        self._release(key, LeaseEndReason.SUPERSEDED, now_s)
        if self._reclaiming.is_priced:
            self._note(make_room(self._ledger, self._reclaiming, key.program_id, tenant_id, blocks, now_s), now_s)
        self._next_block += count
        self._ledger.open(
            key=key,
            tenant_id=tenant_id,
            program_arrival_s=program_arrival_s,
            blocks=blocks,
            tokens=tokens,
            now_s=now_s,
            ttl_s=ttl_s,
            state=state,
            tool=tool,
            other_tokens=other_tokens,
        )

    def armed(self, key: BranchKey, tool: ToolKey | None, now_s: float) -> None:
        """The tool that the branch waits for is known."""
        lease = self._ledger.get(key)
        if lease is None:
            return
        decision = self._policy.decide(
            EndedTurn(tool=tool, context_tokens=lease.tokens, other_tokens=lease.other_tokens)
        )
        ttl_s = min(decision.ttl_s, self._ttl_max_s)
        if ttl_s <= 0:
            self._release(key, LeaseEndReason.NOT_WORTH_IT, now_s)
        else:
            self._ledger.arm(key, ttl_s=ttl_s, tool=tool)

    def tool_started(self, program_id: ProgramId, started_s: float) -> None:
        """A tool of the program started then: deadlines count from there."""
        for lease in self._ledger.of_program(program_id):
            if lease.state is LeaseState.ARMED:
                self._ledger.extend(lease.key, started_s + lease.ttl_s, ttl_max_s=self._ttl_max_s)

    def tools_finished(self, program_id: ProgramId, now_s: float) -> None:
        """The program's next turn is on its way."""
        for lease in self._ledger.of_program(program_id):
            hold_s = now_s + self._settings.expected_turn_hold_s
            self._ledger.extend(lease.key, hold_s, ttl_max_s=self._ttl_max_s)
            self._ledger.expect(lease.key, now_s)

    def program_over(self, program_id: ProgramId, now_s: float) -> None:
        """Nothing of the program will come any more."""
        self._note(self._ledger.release_program(program_id, LeaseEndReason.PROGRAM_OVER), now_s)

    def cache_lost(self, reason: LeaseEndReason, now_s: float) -> None:
        """The cache goes away, and with it what paper leases would hold."""
        self._note(self._ledger.release_all(reason), now_s)

    def time_passed(self, *, blocks_running: int, now_s: float) -> None:
        """A step: leases lapse, and those go that would not fit beside the `blocks_running` that turns hold."""
        self._note(self._ledger.expire(now_s), now_s)
        while self._ledger.blocks_held > self._blocks_total - blocks_running:
            victim = self._reclaiming.victim(self._ledger.live(), spare=None, now_s=now_s)
            if victim is None:
                return
            self._reclaim(victim, LeaseEndReason.RUNNING_TURN_NEEDS_BLOCKS, now_s)

    def real_lease_ended(self, end: LeaseEnd, now_s: float) -> None:
        """A lease of the policy that acts has ended."""
        self._block_seconds["real"] += len(end.lease.blocks) * (now_s - end.lease.started_s)

    # --- what can be asked ---------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """What the shadow would have done so far, plain values only."""
        return {
            "retention": self._settings.retention_name.value,
            "live_leases": len(self._ledger),
            "retained_blocks": self._ledger.blocks_held,
            "agreement": dict(self._agreement),
            "leases": dict(self._ends),
            "block_seconds": dict(self._block_seconds),
            "would_save_tokens": self._would_save,
            "would_recompute_tokens": self._would_recompute,
        }

    # --- inside --------------------------------------------------------------------------------------------------------

    def _release(self, key: BranchKey, reason: LeaseEndReason, now_s: float) -> None:
        end = self._ledger.release(key, reason)
        self._note((end,) if end is not None else (), now_s)

    def _reclaim(self, lease: Lease, reason: LeaseEndReason, now_s: float) -> None:
        end = self._ledger.reclaim(lease, reason)
        self._note((end,) if end is not None else (), now_s)

    def _note(self, ended: tuple[LeaseEnd, ...], now_s: float) -> None:
        for end in ended:
            self._ends[end.reason.outcome.value] += 1
            self._block_seconds["shadow"] += len(end.lease.blocks) * (now_s - end.lease.started_s)


#: (held really, on paper) → what it is counted as.
_AGREEMENT = {
    (True, True): "both",
    (False, False): "neither",
    (True, False): "only_real",
    (False, True): "only_shadow",
}
