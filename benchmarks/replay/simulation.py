"""The event loop: programs arrive, turns run on replicas, tools take their time, all in virtual seconds.

    pop the earliest event ─► set the clock ─► let it act ─► start a step on every replica that is idle and has work

Two kinds of events. *Outside* events (a program arrives, a tool returns, a replica dies) bound how far a replica may jump;
*step ends* hand tokens back to a scheduler. A turn that becomes ready while a step runs enters the scheduler's queue when the step
ends, as in EngineCore, but keeps its own arrival time.

Nothing here decides anything. A run is a pure function of the workload and the replicas' settings: ties in time are
broken by the order in which events were made, and no wall clock, hash order or thread takes part.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from agent_program.errors import PlatformError
from agent_program.ids import ProgramId, ToolKey
from agent_program.tool_events import ToolEventKind, ToolOutcome
from agent_program.turn import TurnHints
from benchmarks.replay.clock import VirtualClock
from benchmarks.replay.faults import ReplicaLoss
from benchmarks.replay.lineage import ContextLineage
from benchmarks.replay.occupancy import OccupancySampler
from benchmarks.replay.records import Cause, ProgramRecord, RunRecord, TurnRecord
from benchmarks.replay.replica import Replica
from benchmarks.replay.routing import ReplayRouter
from benchmarks.replay.vllm_engine import RunningTurn, Step
from benchmarks.replay.workload import ReadyProgram, Workload
from continuum_router.config import RouterSettings

#: How often a scheduler that found nothing to run is asked again: the real engine asks at once, over and over.
IDLE_POLL_S = 0.01
#: With nothing else to happen, a scheduler that runs nothing for this long never will.
STALL_S_MAX = 3600.0
#: In a closed loop over several replicas, a jump covers at most this many seconds.
JUMP_S_MAX_IN_A_LOOP = 0.2


class ReplayStalled(PlatformError):
    """Turns wait, nothing runs, and nothing else will happen: the scheduler does not make progress."""

    code = "replay_stalled"


class _Happening(Enum):
    PROGRAM_ARRIVES = auto()
    WAIT_ENDS = auto()
    REPLICA_DIES = auto()


@dataclass(kw_only=True, slots=True)
class _Live:
    """A program that has arrived."""

    ready: ReadyProgram
    record: ProgramRecord
    lineage: ContextLineage
    #: The turn that runs or comes next.
    turn: int = 0
    turn_record: TurnRecord | None = None
    #: The tool and the sub-agents that the next turn waits for.
    waits: int = 0
    wait_began_s: float = 0.0
    preempted_since_s: float | None = None


class Simulation:
    """One run of one workload."""

    def __init__(
        self,
        *,
        workload: Workload,
        replicas: Sequence[Replica],
        clock: VirtualClock,
        block_size: int,
        alone_s: Callable[[ReadyProgram], float],
        router: RouterSettings | None = None,
        losses: Sequence[ReplicaLoss] = (),
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._workload, self._replicas, self._clock = workload, list(replicas), clock
        self._block_size, self._alone_s = block_size, alone_s
        self._router = ReplayRouter(self._replicas, clock=clock, settings=router or RouterSettings())
        self._losses = losses
        self._on_progress = on_progress
        self._sequence = itertools.count()
        #: What happens to the program, or the replica, of this index.
        self._outside: list[tuple[float, int, _Happening, int]] = []
        #: A step's end, or None for asking an idle scheduler again.
        self._step_ends: list[tuple[float, int, int, Step | None]] = []
        self._live: dict[int, _Live] = {}
        self._ended: list[ProgramRecord] = []
        self._children: dict[tuple[str, int], list[ReadyProgram]] = {}
        self._ready = workload.programs
        self._by_id = {ready.program_id: ready.index for ready in workload.programs}
        self._backlog: list[ReadyProgram] = []
        self._roots = 0
        self._roots_ended = 0
        self._occupancy = OccupancySampler(self._replicas)

    def run(self) -> RunRecord:
        """Run every program to its end.

        Raises:
            ReplayStalled: the scheduler stops making progress.
        """
        for loss in self._losses:
            self._push(loss.at_s, _Happening.REPLICA_DIES, loss.replica)
        self._enter_programs()
        # What is left when the last program has ended are faults that nobody would notice.
        while (self._outside or self._step_ends) and self._roots_ended < self._roots:
            self._clock.move_to(self._next_time_s())
            self._router.hear_reports()
            self._act()
            for index, replica in enumerate(self._replicas):
                self._start_step(index, replica)
            self._occupancy.look(self._clock.now_s())
        return RunRecord(
            programs=tuple(sorted(self._ended, key=lambda record: record.index)),
            occupancy=self._occupancy.samples,
            makespan_s=max((record.end_s or 0.0 for record in self._ended), default=0.0),
            replicas=tuple(replica.record(index) for index, replica in enumerate(self._replicas)),
            placements=dict(self._router.reasons),
        )

    # --- events --------------------------------------------------------------------------------------------------------

    def _enter_programs(self) -> None:
        for ready in self._workload.programs:
            parent = ready.program.parent
            if parent is not None:
                self._children.setdefault((parent.program_id, parent.turn), []).append(ready)
                continue
            self._roots += 1
            if ready.arrival_s is not None:
                self._push(ready.arrival_s, _Happening.PROGRAM_ARRIVES, ready.index)
            else:
                self._backlog.append(ready)
        self._backlog.reverse()
        for _ in range(self._workload.concurrency or 0):
            self._next_of_backlog(0.0)

    def _next_of_backlog(self, now_s: float) -> None:
        if self._backlog:
            self._push(now_s, _Happening.PROGRAM_ARRIVES, self._backlog.pop().index)

    def _push(self, at_s: float, happening: _Happening, index: int) -> None:
        heapq.heappush(self._outside, (at_s, next(self._sequence), happening, index))

    def _next_time_s(self) -> float:
        times = [heap[0][0] for heap in (self._outside, self._step_ends) if heap]
        return min(times)

    def _act(self) -> None:
        """Everything that is due now; step ends first, since a GPU's result is older than what its end sets free."""
        now_s = self._clock.now_s()
        while self._step_ends and self._step_ends[0][0] <= now_s:
            _, _, index, step = heapq.heappop(self._step_ends)
            if step is None:
                self._replicas[index].is_polling = False
            elif not self._replicas[index].is_lost:
                self._end_step(index, step)
        while self._outside and self._outside[0][0] <= now_s:
            _, _, happening, index = heapq.heappop(self._outside)
            match happening:
                case _Happening.PROGRAM_ARRIVES:
                    self._program_arrives(self._ready[index])
                case _Happening.WAIT_ENDS:
                    self._tool_returns(self._live[index])
                case _Happening.REPLICA_DIES:
                    self._replica_dies(index)

    def _start_step(self, index: int, replica: Replica) -> None:
        if replica.step is not None or replica.is_lost:
            return
        is_news = bool(replica.inbox)
        for enter in replica.inbox:
            enter()
        replica.inbox.clear()
        if not replica.engine.has_work or (replica.is_polling and not is_news):
            return
        now_s = self._clock.now_s()
        step = replica.engine.begin_step(self._horizon_s(now_s))
        if step is None:
            self._poll_later(index, replica)
            return
        replica.idle_since_s = None
        replica.step = step
        for turn in step.preempted:
            self._turn_preempted(turn)
        for turn in step.started:
            self._turn_scheduled(turn)
        heapq.heappush(self._step_ends, (now_s + step.duration_s, next(self._sequence), index, step))

    def _horizon_s(self, now_s: float) -> float:
        """Until when nothing from outside can reach a replica."""
        next_s = self._outside[0][0] if self._outside else float("inf")
        # In a closed loop, the end of a program on one replica sends another one to any of them.
        is_close = bool(self._backlog) and len(self._replicas) > 1
        return min(next_s, now_s + JUMP_S_MAX_IN_A_LOOP) if is_close else next_s

    def _poll_later(self, index: int, replica: Replica) -> None:
        now_s = self._clock.now_s()
        replica.idle_since_s = now_s if replica.idle_since_s is None else replica.idle_since_s
        if not self._outside and now_s - replica.idle_since_s > STALL_S_MAX:
            raise ReplayStalled(f"{replica.engine.turns} turns wait and nothing has run for {STALL_S_MAX:.0f} s")
        if not replica.is_polling:
            replica.is_polling = True
            ask_s = min(now_s + IDLE_POLL_S, replica.engine.wake_s or float("inf"))
            heapq.heappush(self._step_ends, (ask_s, next(self._sequence), index, None))

    def _end_step(self, index: int, step: Step) -> None:
        replica = self._replicas[index]
        replica.step = None
        ended = replica.engine.end_step(step)
        now_s = self._clock.now_s()
        for turn in step.scheduled:
            if turn.request_id in step.sampled:
                self._turn_got_token(turn, now_s)
        for turn in ended:
            self._turn_ends(self._live[turn.tag], turn, index)

    def _replica_dies(self, index: int) -> None:
        """Its turns are sent again, in the order in which they had come to it."""
        replica = self._replicas[index]
        now_s = self._clock.now_s()
        orphans = list(replica.sent)
        replica.lost_at_s, replica.step = now_s, None
        replica.inbox.clear()
        replica.sent.clear()
        self._router.lose(index)
        for orphan in orphans:
            live = self._live[orphan]
            self._router.turn_ended(index)
            live.preempted_since_s = None
            if live.turn_record is not None:
                live.turn_record.start_over(now_s)
                self._send(live, live.turn_record)

    # --- a turn's life -------------------------------------------------------------------------------------------------

    def _program_arrives(self, ready: ReadyProgram) -> None:
        now_s = self._clock.now_s()
        program = ready.program
        record = ProgramRecord(
            program_id=program.program_id,
            kind=program.kind,
            index=ready.index,
            arrival_s=now_s,
            is_root=program.parent is None,
            alone_s=self._alone_s(ready),
            declared_turns=ready.declared_turns,
        )
        lineage = ContextLineage(
            program.program_id,
            self._block_size,
            shared=program.shared_prefix,
            shared_tokens=program.shared_prefix_tokens,
        )
        live = self._live[ready.index] = _Live(ready=ready, record=record, lineage=lineage)
        self._turn_ready(live)

    def _turn_ready(self, live: _Live) -> None:
        record = live.turn_record = TurnRecord(turn=live.turn, ready_s=self._clock.now_s())
        live.record.turns.append(record)
        live.lineage.start_turn(live.turn, live.ready.turns[live.turn].prefix_tokens)
        self._send(live, record)

    def _send(self, live: _Live, record: TurnRecord) -> None:
        turn, ready, now_s = live.ready.turns[live.turn], live.ready, self._clock.now_s()
        hints = self._hints(live)
        record.replica = self._router.place(hints.program_id)
        self._router.turn_sent(record.replica)
        replica, request_id = self._replicas[record.replica], f"{ready.index}.{live.turn}"

        def enter() -> None:
            replica.engine.add_turn(
                request_id=request_id,
                tag=ready.index,
                hints=hints,
                lineage=live.lineage,
                input_tokens=turn.input_tokens,
                prefix_tokens=turn.prefix_tokens,
                output_tokens=turn.output_tokens,
                arrival_s=now_s,
            )

        replica.inbox.append(enter)
        replica.sent[ready.index] = None

    def _identity(self, ready: ReadyProgram) -> tuple[ProgramId, str]:
        """A sub-agent is a branch of its parent's program."""
        root, branch = ready, "0"
        while root.program.parent is not None:
            root, branch = self._ready[self._by_id[root.program.parent.program_id]], str(ready.index)
        return ProgramId(f"p{root.index}"), branch

    def _hints(self, live: _Live) -> TurnHints:
        program_id, branch = self._identity(live.ready)
        last = live.ready.turns[live.turn - 1] if live.turn else None
        return TurnHints(
            program_id=program_id,
            branch=branch,
            remaining_turns=live.ready.declared_after(live.turn),
            last_tool=ToolKey(last.tool) if last and last.tool else None,
            last_tool_s=last.tool_s if last and last.tool else None,
        )

    def _turn_scheduled(self, turn: RunningTurn) -> None:
        live = self._live[turn.tag]
        record = live.turn_record
        if record is None or record.first_scheduled_s is not None:
            return
        record.first_scheduled_s = self._clock.now_s()
        cached = turn.cached_tokens or 0
        record.load_s = turn.load_s
        record.loaded_tokens = min(turn.loaded_tokens, turn.prefix_tokens)
        record.reused_tokens = min(cached, turn.prefix_tokens) - record.loaded_tokens
        record.recomputed_tokens = max(0, turn.prefix_tokens - cached)
        record.shared_tokens = max(0, cached - turn.prefix_tokens)

    def _turn_preempted(self, turn: RunningTurn) -> None:
        live = self._live[turn.tag]
        if live.turn_record is not None:
            live.turn_record.preemptions += 1
            live.preempted_since_s = live.preempted_since_s or self._clock.now_s()

    def _turn_got_token(self, turn: RunningTurn, now_s: float) -> None:
        live = self._live[turn.tag]
        record = live.turn_record
        if record is None:
            return
        if live.preempted_since_s is not None:
            lost_s = now_s - live.preempted_since_s
            record.preempted_s += lost_s
            if record.first_token_s is None:
                record.preempted_in_prefill_s += lost_s
            live.preempted_since_s = None
        if record.first_token_s is None:
            record.first_token_s = now_s
            record.seen_s = now_s if record.seen_s is None else record.seen_s

    def _turn_ends(self, live: _Live, turn: RunningTurn, index: int) -> None:
        now_s, replica = self._clock.now_s(), self._replicas[index]
        replica.turns_ended += 1
        del replica.sent[live.ready.index]
        self._router.turn_ended(index)
        record = live.turn_record
        assert record is not None, "a turn ended that never started"
        record.recomputed_tokens += turn.recomputed_after_preemption
        live.record.close_turn(record, now_s)
        live.turn_record = None
        done = live.ready.turns[live.turn]
        is_last = live.turn + 1 == len(live.ready.turns)
        program_id, branch = self._identity(live.ready)
        tool = None if is_last else ToolKey(done.tool or "unknown")
        grant = replica.control.turn_over(program_id, branch, tool, is_last_turn=is_last)
        if is_last:
            self._program_ends(live)
            return
        if grant is not None:
            record.tool, record.ttl_s, record.ttl_reason = tool, grant.ttl_s, grant.reason
        assert tool is not None
        replica.control.tool_event(program_id, ToolEventKind.STARTED, tool, 0.0, None)
        live.waits, live.wait_began_s = 1, now_s
        self._push(now_s + done.tool_s, _Happening.WAIT_ENDS, live.ready.index)
        for child in self._children.get((live.ready.program_id, live.turn), ()):
            live.waits += 1
            self._push(now_s, _Happening.PROGRAM_ARRIVES, child.index)

    def _tool_returns(self, live: _Live) -> None:
        """The tool, or the last sub-agent, that a program waited for is done."""
        live.waits -= 1
        if live.waits > 0:
            return
        now_s = self._clock.now_s()
        waited_s = now_s - live.wait_began_s
        live.record.seconds[Cause.TOOL] += waited_s
        live.record.turns[-1].waited_s = waited_s
        program_id, _ = self._identity(live.ready)
        tool = ToolKey(live.ready.turns[live.turn].tool or "unknown")
        home = self._replicas[self._router.find(program_id)]
        home.control.tool_event(program_id, ToolEventKind.FINISHED, tool, waited_s, ToolOutcome.OK)
        live.turn += 1
        self._turn_ready(live)

    def _program_ends(self, live: _Live) -> None:
        now_s = self._clock.now_s()
        live.record.end_s = now_s
        self._ended.append(live.record)
        del self._live[live.ready.index]
        parent = live.ready.program.parent
        if parent is not None:
            self._tool_returns(self._live[self._by_id[parent.program_id]])
            return
        program_id, _ = self._identity(live.ready)
        home = self._replicas[self._router.find(program_id)]
        home.control.program_over(program_id)
        home.engine.program_over(program_id)
        self._router.program_over(program_id)
        self._roots_ended += 1
        if self._on_progress is not None:
            self._on_progress(self._roots_ended, self._roots)
        self._next_of_backlog(now_s)
