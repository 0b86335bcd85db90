"""Everything that happens to the turns of programs in one engine, and what follows for their KV.

The engine's adapter reports events (a turn arrived, was scheduled, ended; a tool finished; memory is short) and is told which
leases began and ended; it moves the blocks accordingly. A lease takes two steps: when a turn ends its tool is not known yet,
because an engine sees token ids only, so the lease is provisional for a second or so; the replica, which parses the answer,
then arms it with the tool. A policy that does not look at tools arms at once.

Any event may come twice, late, or for something unknown; it then changes nothing. Turns without a program never get here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from agent_program.errors import InvalidRequest
from agent_program.ids import ProgramId, ToolKey
from agent_program.tool_events import ToolEventKind, ToolOutcome
from agent_program.turn import TurnHints
from engine_replicas.config import SchedulingSettings
from engine_replicas.declared_work import DeclaredWork
from engine_replicas.retention import report
from engine_replicas.retention.events import Armed, ArmReason, Changes, FinishedTurn, NoLease, TurnEnding
from engine_replicas.retention.lease import BranchKey, Lease, LeaseEnd, LeaseEndReason, LeaseState
from engine_replicas.retention.ledger import Ledger, RetentionCaps
from engine_replicas.retention.policy import EndedTurn, Estimates, RetentionDecision, RetentionPolicy
from engine_replicas.retention.programs import Branch, LiveTurn, Program, ProgramTable, ToolWait
from engine_replicas.retention.reclaim import LatestArrival, Reclaiming, WaitingNeed
from engine_replicas.retention.room import make_room
from engine_replicas.retention.standing import Standing, idle_tokens, remaining_s, standing_of
from engine_replicas.retention.waits import WaitCounter


class RetentionController:
    """Programs, leases and estimates of one engine."""

    def __init__(
        self,
        *,
        settings: SchedulingSettings,
        policy: RetentionPolicy,
        estimates: Estimates,
        blocks_total: int,
        reclaiming: Reclaiming | None = None,
        is_caching: bool = True,
        when_program_ended: Callable[[ProgramId], None] = lambda _: None,
    ) -> None:
        """Start with no program.

        Args:
            settings: windows, limits and caps.
            policy: how long KV is worth keeping.
            estimates: what the policy looks at; fed from here.
            blocks_total: KV blocks that the caps are shares of.
            reclaiming: whose lease gives way where memory is short; the paper's rule by default.
            is_caching: whether the engine finds KV again by its content; without that nothing is worth retaining.
            when_program_ended: told of each program that ends, is released or forgotten.
        """
        self._settings = settings
        self._policy = policy
        self._estimates = estimates
        self._reclaiming = reclaiming or LatestArrival()
        self._is_caching = is_caching
        self._work = DeclaredWork()
        self._waits = WaitCounter(estimates.tools)
        self._programs = ProgramTable(
            programs_max=settings.programs_max,
            idle_max_s=settings.program_idle_max_s,
            when_ended=when_program_ended,
        )
        self._turns: dict[str, LiveTurn] = {}
        #: Ids of each program's turns that are in the engine, in order of arrival.
        self._turns_of: dict[ProgramId, dict[str, None]] = {}
        # What can be outbid at any time need not be kept from holding everything.
        fraction_max = 1.0 if self._reclaiming.is_priced else settings.retained_fraction_max
        self._ttl_max_s = settings.priced_ttl_max_s if self._reclaiming.is_priced else settings.ttl_max_s
        self._ledger = Ledger(
            RetentionCaps(
                blocks_max=int(fraction_max * blocks_total),
                tenant_blocks_max=int(settings.tenant_retained_fraction_max * blocks_total),
                program_blocks_max=int(settings.program_retained_fraction_max * blocks_total),
                queued_turn_hold_max_s=settings.queued_turn_hold_max_s,
            )
        )
        self._lease_ends: Counter[LeaseEndReason] = Counter()
        self._not_retained: Counter[NoLease] = Counter()
        self._counts: Counter[str] = Counter()
        self._is_paused = False
        #: Raised whenever the order of turns may have changed; the adapter lowers it when it has sorted.
        self.is_order_stale = False
        #: Turns in the engine whose `standing` may have changed since the adapter last cleared this.
        self.changed_turns: set[str] = set()
        #: Some program has declared its turns: from then on time alone moves the standing of every turn.
        self.is_work_declared = False

    # --- a turn's way through the engine -----------------------------------------------------------------------------

    def turn_arrived(self, turn_id: str, hints: TurnHints, now_s: float, *, has_stop_strings: bool = False) -> None:
        """A turn of a program entered the queue; with stop strings its end may be seen outside before it is seen here."""
        if turn_id in self._turns:
            return
        program, forgotten = self._programs.arrived(hints.program_id, hints.tenant_id, now_s)
        for gone in forgotten:
            self._estimates.eta.program_finished(gone.turns_finished)
        key = BranchKey(hints.program_id, hints.branch)
        branch = program.branches.get(hints.branch)
        if branch is not None:
            self._waits.next_turn_arrived(branch, hints, now_s)
        program.live_turns += 1
        program.tools = ToolWait()
        if hints.remaining_turns is not None:
            self.is_work_declared = True
            program.declared_turns = program.turns_finished + 1 + hints.remaining_turns
            self._work.declared(remaining_s(program, self._work))
        self._turns[turn_id] = LiveTurn(
            program=program,
            hints=hints,
            key=key,
            arrived_s=now_s,
            lease_id=self._ledger.turn_arrived(key, now_s=now_s),
            context_tokens=branch.context_tokens if branch is not None else None,
            has_stop_strings=has_stop_strings,
            is_last=hints.is_last_turn,
        )
        self._turns_of.setdefault(hints.program_id, {})[turn_id] = None
        self.changed_turns.add(turn_id)
        self.is_order_stale = True

    def turn_loads(self, turn_id: str, tokens: int, now_s: float) -> tuple[LeaseEnd, ...]:
        """A turn got its blocks, and `tokens` of its context are on their way from a tier below. What was on the GPU already
        it holds itself from now on."""
        turn = self._turns.get(turn_id)
        if turn is None or turn.is_scheduled:
            return ()
        turn.loaded_tokens += tokens
        return self._take_over(turn, now_s)

    def _take_over(self, turn: LiveTurn, now_s: float) -> tuple[LeaseEnd, ...]:
        end = self._ledger.turn_scheduled(turn.key, turn.lease_id)
        turn.had_lease |= end is not None
        turn.lease_id = None
        return self._note(end, now_s)

    def turn_scheduled(self, turn_id: str, hit_tokens: int, now_s: float) -> tuple[LeaseEnd, ...]:
        """A turn got its first blocks, `hit_tokens` of its context already computed: it holds them itself from now on."""
        turn = self._turns.get(turn_id)
        if turn is None or turn.is_scheduled:
            return ()
        turn.is_scheduled, turn.scheduled_s = True, now_s
        self.changed_turns.add(turn_id)
        ended = self._take_over(turn, now_s)
        if turn.context_tokens is not None:
            waited_s = now_s - turn.arrived_s
            if not turn.had_lease:
                self._estimates.queueing_delay.evicted_turn_waited(waited_s)
            self._estimates.reload.returned(turn.context_tokens - hit_tokens + turn.loaded_tokens, turn.loaded_tokens)
            reused = min(hit_tokens, turn.context_tokens)
            self._counts["reused_tokens"] += reused
            self._counts["recomputed_tokens"] += turn.context_tokens - reused
            turn.program.decided(
                "turn_scheduled",
                now_s,
                waited_s=waited_s,
                had_lease=turn.had_lease,
                context_tokens=turn.context_tokens,
                reused_tokens=reused,
            )
        return ended

    def turn_finished(self, finished: FinishedTurn, now_s: float) -> Changes:
        """A turn left the engine."""
        turn = self._turns.pop(finished.turn_id, None)
        if turn is None:
            return Changes()
        program = turn.program
        program.live_turns -= 1
        self._turn_left(finished.turn_id, program.program_id)
        if turn.is_scheduled:
            program.attained_s += now_s - turn.scheduled_s
            self._work.turn_ran(now_s - turn.scheduled_s)
        else:
            self._ledger.turn_abandoned(turn.key, turn.lease_id)
        is_ended = turn.is_armed_early or finished.ending is TurnEnding.ENDED
        if program.is_over or not (is_ended or finished.ending is TurnEnding.MAYBE_ENDED):
            return Changes()
        self._programs.active(program, now_s)
        tool = turn.early_tool or turn.hints.next_tool
        program.turn_ended(
            turn.hints.branch, Branch(finished_s=now_s, context_tokens=finished.context_tokens, tool=tool)
        )
        if turn.is_last:
            return Changes(ended=self._end_program(program, LeaseEndReason.LAST_TURN, now_s))
        is_tool_open = self._policy.depends_on_tool and tool is None and not turn.is_armed_early
        ended_turn = EndedTurn(tool=tool, context_tokens=finished.context_tokens, other_tokens=finished.other_tokens)
        decision = None if is_tool_open else self._policy.decide(ended_turn)
        is_sure = is_ended and decision is not None
        return self._retain(
            turn, finished, tool, decision, LeaseState.ARMED if is_sure else LeaseState.PROVISIONAL, now_s
        )

    def _turn_left(self, turn_id: str, program_id: ProgramId) -> None:
        others = self._turns_of[program_id]
        del others[turn_id]
        self.changed_turns.discard(turn_id)
        self.changed_turns.update(others)
        if not others:
            del self._turns_of[program_id]

    def _retain(
        self,
        turn: LiveTurn,
        finished: FinishedTurn,
        tool: ToolKey | None,
        decision: RetentionDecision | None,
        state: LeaseState,
        now_s: float,
    ) -> Changes:
        """Begin a lease. The branch's older one, if any, ends either way: a newer turn has left more behind."""
        ttl_s = self._settings.provisional_ttl_s if decision is None else decision.ttl_s
        if state is LeaseState.PROVISIONAL:
            ttl_s = min(ttl_s, self._settings.provisional_ttl_s)
        ttl_s = min(ttl_s, self._ttl_max_s)
        why_not = self._why_not(ttl_s)
        lease = None
        if why_not is not None:
            older = self._ledger.release(turn.key, LeaseEndReason.SUPERSEDED)
            ended: tuple[LeaseEnd, ...] = (older,) if older is not None else ()
        else:
            held = finished.collect()
            outbid: tuple[LeaseEnd, ...] = ()
            if self._reclaiming.is_priced:
                whose = (turn.key.program_id, turn.program.tenant_id)
                outbid = make_room(self._ledger, self._reclaiming, *whose, held.blocks, now_s)
            lease, ended = self._ledger.open(
                key=turn.key,
                tenant_id=turn.program.tenant_id,
                program_arrival_s=turn.program.arrived_s,
                blocks=held.blocks,
                tokens=held.tokens,
                now_s=now_s,
                ttl_s=ttl_s,
                state=state,
                tool=tool,
                other_tokens=finished.other_tokens,
            )
            if lease is None:
                why_not = NoLease.OVER_CAP if held.blocks else NoLease.NOTHING_TO_RETAIN
            ended += outbid
        self._note_all(ended, now_s)
        if why_not is not None:
            self._not_retained[why_not] += 1
            outcome: dict[str, Any] = {"lease": None, "why_not": why_not.value}
        else:
            self._counts["leases_begun"] += 1
            outcome = {"lease": state.value, "tool": tool, "ttl_s": ttl_s}
        outcome |= {"context_tokens": finished.context_tokens, **report.decision_inputs(decision)}
        turn.program.decided("turn_finished", now_s, **outcome)
        return Changes(begun=lease, ended=ended)

    def _why_not(self, ttl_s: float) -> NoLease | None:
        if not self._is_caching:
            return NoLease.PREFIX_CACHING_OFF
        if self._is_paused:
            return NoLease.PAUSED
        return NoLease.NOT_WORTH_IT if ttl_s <= 0 else None

    # --- what the replica tells --------------------------------------------------------------------------------------

    def arm(self, program_id: ProgramId, branch: str, tool: ToolKey | None, is_last_turn: bool, now_s: float) -> Armed:
        """The tool that the branch now waits for is known, or that there is none, or that the program ends here."""
        program = self._programs.get(program_id)
        if program is None:
            return Armed(reason=ArmReason.UNKNOWN_PROGRAM)
        key = BranchKey(program_id, branch)
        lease = self._ledger.get(key)
        if lease is None and self._arm_early(key, tool, is_last_turn):
            return Armed(reason=ArmReason.TURN_NOT_ENDED)
        if is_last_turn:
            return Armed(reason=ArmReason.LAST_TURN, ended=self._end_program(program, LeaseEndReason.LAST_TURN, now_s))
        known = program.branches.get(branch)
        if known is not None:
            # An answer without a tool call does not unsay what the client declared.
            tool = known.tool = tool or known.tool
        if lease is None:
            return Armed(reason=ArmReason.NO_LEASE)
        decision = self._policy.decide(
            EndedTurn(tool=tool, context_tokens=lease.tokens, other_tokens=lease.other_tokens)
        )
        ttl_s = min(decision.ttl_s, self._ttl_max_s)
        program.decided("armed", now_s, tool=tool, ttl_s=ttl_s, **report.decision_inputs(decision))
        if ttl_s <= 0:
            ended = self._note(self._ledger.release(key, LeaseEndReason.NOT_WORTH_IT), now_s)
            return Armed(reason=decision.reason, ended=ended)
        self._ledger.arm(key, ttl_s=ttl_s, tool=tool, return_probability=decision.return_probability)
        return Armed(ttl_s=ttl_s, blocks=len(lease.blocks), reason=decision.reason)

    def _arm_early(self, key: BranchKey, tool: ToolKey | None, is_last_turn: bool) -> bool:
        """The front end sees a stop string before the engine hears of it: keep the request for when the turn's end gets
        here. False where no such turn of the branch runs."""
        for turn_id in reversed(self._turns_of.get(key.program_id, {})):
            turn = self._turns[turn_id]
            if turn.key == key and turn.is_scheduled and turn.has_stop_strings:
                turn.early_tool, turn.is_armed_early = tool, True
                turn.is_last = turn.is_last or is_last_turn
                return True
        return False

    def tool_event(
        self,
        program_id: ProgramId,
        kind: ToolEventKind,
        tool: ToolKey,
        elapsed_s: float,
        outcome: ToolOutcome | None,
        now_s: float,
    ) -> None:
        """A tool of the program started, finished, or told how far it is, exactly `elapsed_s` after its start.

        The TTL then counts from the tool's own start instead of the turn's end; and once the last tool has finished, leases
        are kept a little for the next turn to arrive. Neither goes beyond the longest lease.

        Raises:
            InvalidRequest: `elapsed_s` is not a duration.
        """
        if not 0 <= elapsed_s < math.inf:
            raise InvalidRequest("elapsed_s must be finite and not negative", param="elapsed_s")
        program = self._programs.get(program_id)
        if program is None:
            return
        self._programs.active(program, now_s)
        if kind is ToolEventKind.PROGRESS:
            return  # it runs still, which is all that is made of it
        if kind is ToolEventKind.STARTED:
            self._waits.tool_started(program)
            for lease in self._ledger.of_program(program_id):
                if lease.state is LeaseState.ARMED:
                    self._extend(lease, now_s - elapsed_s + lease.ttl_s)
        elif self._waits.tool_finished(program, tool, elapsed_s, outcome):
            for lease in self._ledger.of_program(program_id):
                self._extend(lease, now_s + self._settings.expected_turn_hold_s)
                self._ledger.expect(lease.key, now_s)
            program.decided("tools_finished", now_s, tool=tool, elapsed_s=elapsed_s)

    def release_program(self, program_id: ProgramId, now_s: float) -> tuple[LeaseEnd, ...]:
        """The program is over: completed, failed or cancelled."""
        program = self._programs.get(program_id)
        if program is not None:
            return self._end_program(program, LeaseEndReason.PROGRAM_OVER, now_s)
        return self._note_all(self._ledger.release_program(program_id, LeaseEndReason.PROGRAM_OVER), now_s)

    def take_snapshot(self, snapshot: dict[str, Any]) -> int:
        """Adopt the shared tool-latency history; see `ToolLatencyView.take_snapshot`."""
        return self._estimates.tools.take_snapshot(snapshot)

    # --- memory --------------------------------------------------------------------------------------------------------

    def expire(self, now_s: float) -> tuple[LeaseEnd, ...]:
        """End the leases whose time is up."""
        return self._note_all(self._ledger.expire(now_s), now_s)

    def reclaim(self, turn_id: str, reason: LeaseEndReason, now_s: float) -> tuple[LeaseEnd, ...]:
        """Take one lease for the turn that needs memory; empty where none is left."""
        victim = self._reclaiming.victim(self._ledger.live(), spare=self._key_of(turn_id), now_s=now_s)
        return self._take(turn_id, () if victim is None else (victim,), reason, None, now_s)

    def outbid(self, turn_id: str, need: WaitingNeed, now_s: float) -> tuple[LeaseEnd, ...]:
        """Take the leases that are worth less than what a waiting turn brings; empty where they are worth more."""
        taken = self._reclaiming.worth_taking(self._ledger.live(), need, spare=self._key_of(turn_id), now_s=now_s)
        return self._take(turn_id, taken, LeaseEndReason.OUTBID, need, now_s)

    def _take(
        self, turn_id: str, taken: tuple[Lease, ...], reason: LeaseEndReason, need: WaitingNeed | None, now_s: float
    ) -> tuple[LeaseEnd, ...]:
        report.leases_taken(self._turns.get(turn_id), taken, self._reclaiming, need, now_s)
        ends = [self._ledger.reclaim(lease, reason) for lease in taken]
        return self._note_all(tuple(end for end in ends if end is not None), now_s)

    def _key_of(self, turn_id: str) -> BranchKey | None:
        turn = self._turns.get(turn_id)
        return turn.key if turn is not None else None

    def release_all(self, reason: LeaseEndReason, now_s: float) -> tuple[LeaseEnd, ...]:
        """The cache goes away."""
        return self._note_all(self._ledger.release_all(reason), now_s)

    def pause(self, is_paused: bool, now_s: float) -> tuple[LeaseEnd, ...]:
        """While the engine is paused nothing is retained."""
        self._is_paused = is_paused
        return self.release_all(LeaseEndReason.PAUSED, now_s) if is_paused else ()

    # --- what can be asked ---------------------------------------------------------------------------------------------

    @property
    def has_turns(self) -> bool:
        """Whether any turn of a program is in the engine."""
        return bool(self._turns)

    @property
    def has_leases(self) -> bool:
        """Whether anything is retained."""
        return len(self._ledger) > 0

    @property
    def has_prices(self) -> bool:
        """Whether waiting turns may outbid leases."""
        return self._reclaiming.is_priced

    def standing(self, turn_id: str) -> Standing | None:
        """What an order may look at; None for a turn without a program."""
        turn = self._turns.get(turn_id)
        return standing_of(turn, self._ledger, self._work) if turn is not None else None

    def prefill_s(self, tokens: int) -> float:
        """Seconds to compute a context of so many tokens; 0 before anything is known."""
        return self._estimates.prefill.reload_s(tokens)

    def admit(self, turn_id: str) -> None:
        """The turn's program has started for good."""
        turn = self._turns.get(turn_id)
        if turn is not None and not turn.program.is_admitted:
            turn.program.is_admitted = True
            self.changed_turns.update(self._turns_of[turn.program.program_id])

    def idle_tokens(self, now_s: float) -> float:
        """Context tokens of paused programs, each weighted with how likely it is to be back soon."""
        return idle_tokens(self._ledger.live(), now_s)

    def explain(self, program_id: ProgramId, now_s: float) -> dict[str, Any]:
        """The program's leases and last decisions with their inputs, plain values only."""
        return report.explain(self._programs.recall(program_id), program_id, self._ledger, self._reclaiming, now_s)

    def lease_outcomes(self, program_id: ProgramId) -> dict[str, int]:
        """How the program's leases have ended so far: outcome → count; empty for an unknown program."""
        program = self._programs.recall(program_id)
        return dict(program.lease_outcomes) if program is not None else {}

    def stats(self) -> dict[str, Any]:
        """Counters and estimates, plain values only."""
        return {
            "retention": self._settings.retention_name.value,
            "ttl_max_s": self._ttl_max_s,
            "ordering": self._settings.ordering_name.value,
            "programs": len(self._programs),
            "live_turns": len(self._turns),
            "leases_begun": self._counts["leases_begun"],
            **report.leases(self._ledger, self._lease_ends, self._not_retained),
            "reused_tokens": self._counts["reused_tokens"],
            "recomputed_tokens": self._counts["recomputed_tokens"],
            **report.estimates(self._estimates),
        }

    # --- inside --------------------------------------------------------------------------------------------------------

    def _extend(self, lease: Lease, deadline_s: float) -> None:
        self._ledger.extend(lease.key, deadline_s, ttl_max_s=self._ttl_max_s)

    def _end_program(self, program: Program, reason: LeaseEndReason, now_s: float) -> tuple[LeaseEnd, ...]:
        ended = self._note_all(self._ledger.release_program(program.program_id, reason), now_s)
        self._programs.end(program)
        if program.declared_turns is not None:
            self._work.program_ended(
                program.tenant_id, declared_turns=program.declared_turns, turns=program.turns_finished
            )
        self._estimates.eta.program_finished(program.turns_finished)
        return ended

    def _note(self, end: LeaseEnd | None, now_s: float) -> tuple[LeaseEnd, ...]:
        return self._note_all((end,) if end is not None else (), now_s)

    def _note_all(self, ended: tuple[LeaseEnd, ...], now_s: float) -> tuple[LeaseEnd, ...]:
        for end in ended:
            self.is_order_stale = True
            self._lease_ends[end.reason] += 1
            self.changed_turns.update(self._turns_of.get(end.lease.key.program_id, ()))
            program = self._programs.get(end.lease.key.program_id)
            if program is not None:
                report.lease_ended(program, end, self._reclaiming, now_s)
        return ended
