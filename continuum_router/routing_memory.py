"""What one router remembers of programs beside their bindings, each within a bound: whose KV is kept, where a turn has just failed, where
programs were that have ended, and which replicas have the beginning of which prompt. Advice all of it: forgetting costs a
worse placement and nothing else."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from agent_program.ids import ProgramId, ReplicaId
from continuum_router.affinity import Affinity, PrefixIndex, PrefixMark
from continuum_router.migration import KvBelief, KvBeliefs
from continuum_router.placement import Placement, Reason
from continuum_router.preference import Ties
from continuum_router.replica_view import ReplicaView

#: Programs that ended, whose replica is remembered for those that go on with them.
_ENDED_MAX = 65_536
#: Programs whose turn failed and has not come back: those that never come back must not pile up.
_FAILED_MAX = 10_000
_FAILED_ON_MAX = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What a turn that came back says about its program and its replica."""

    program_id: ProgramId
    #: The replica as it stands now.
    view: ReplicaView
    #: Seconds for which a lease keeps the program's KV there; 0 where none does.
    kept_s: float
    #: Tokens of the program's context.
    context_tokens: int


@dataclass(slots=True)
class Wish:
    """One request for a replica, on its way through the rounds with the store."""

    reason: Reason
    affinity: Callable[[], Affinity] | None = None
    #: Replicas where this very turn has failed.
    avoid: tuple[ReplicaId, ...] = ()
    #: The program is to go there; None for wherever is best.
    to: ReplicaId | None = None
    #: The replica that lives and is left.
    leaving: ReplicaId | None = None
    #: Known once `affinity` was asked.
    ties: Ties | None = None
    prefix: PrefixMark | None = None
    #: What was weighed for the latest proposal.
    proposal: Placement | None = None

    def granted(self, replica_id: ReplicaId) -> Placement:
        """The placement, with its reason, and what was weighed where it is the one that was proposed."""
        if self.proposal is None or self.proposal.replica_id != replica_id:
            return Placement(replica_id=replica_id, reason=self.reason)
        reason = self.proposal.reason if self.reason is Reason.NEW else self.reason
        return Placement(replica_id=replica_id, reason=reason, detail=self.proposal.detail)


class RoutingMemory:
    """The memory of one router. Not thread-safe."""

    def __init__(self, *, programs_watched_max: int) -> None:
        self._prefixes = PrefixIndex()
        self._kv = KvBeliefs(capacity=programs_watched_max)
        self._ended: OrderedDict[ProgramId, ReplicaId] = OrderedDict()
        self._failed_on: OrderedDict[ProgramId, tuple[ReplicaId, ...]] = OrderedDict()
        #: Each replica's beginnings as it last told them, so that an unchanged report costs a comparison.
        self._told: dict[ReplicaId, frozenset[int]] = {}

    def heard(self, view: ReplicaView) -> None:
        """A replica reported."""
        if view.recent_prefixes and self._told.get(view.replica_id) != view.recent_prefixes:
            self._told[view.replica_id] = view.recent_prefixes
            self._prefixes.note(view.recent_prefixes, view.replica_id)

    def keep_only(self, living: set[ReplicaId]) -> None:
        """Other replicas are gone, with what they told."""
        for gone in [replica_id for replica_id in self._told if replica_id not in living]:
            del self._told[gone]

    def replied(self, reply: Reply, *, now_s: float) -> None:
        """A turn came back."""
        self._failed_on.pop(reply.program_id, None)
        self._kv.replied(
            reply.program_id,
            reply.view.replica_id,
            kept_until_s=now_s + reply.kept_s,
            context_tokens=reply.context_tokens,
        )

    def failed(self, program_id: ProgramId, replica_id: ReplicaId) -> None:
        """The program's turn did not come back from the replica."""
        before = [name for name in self._failed_on.pop(program_id, ()) if name != replica_id]
        self._failed_on[program_id] = (*before[1 - _FAILED_ON_MAX :], replica_id)
        if len(self._failed_on) > _FAILED_MAX:
            self._failed_on.popitem(last=False)

    def failed_on(self, program_id: ProgramId) -> tuple[ReplicaId, ...]:
        """Where the program's present turn has failed."""
        return self._failed_on.get(program_id, ())

    def belief(self, program_id: ProgramId) -> KvBelief | None:
        """What is believed of the program's KV."""
        return self._kv.get(program_id)

    def moved(self, program_id: ProgramId, to: ReplicaId, *, now_s: float) -> None:
        """The migration rule has moved the program."""
        self._kv.moved(program_id, to, now_s=now_s)

    def over(self, program_id: ProgramId, replica_id: ReplicaId | None) -> None:
        """The program has ended; it was on that replica, as far as is known."""
        self._kv.forget(program_id)
        self._failed_on.pop(program_id, None)
        if replica_id is not None:
            self._ended[program_id] = replica_id
            self._ended.move_to_end(program_id)
            if len(self._ended) > _ENDED_MAX:
                self._ended.popitem(last=False)

    def was_on(self, program_id: ProgramId) -> ReplicaId | None:
        """Where a program was when it ended."""
        return self._ended.get(program_id)

    def note_prefix(self, mark: PrefixMark | None, replica_id: ReplicaId) -> None:
        """A prompt with that beginning goes to the replica."""
        if mark is not None:
            self._prefixes.note((mark.fingerprint,), replica_id)

    def with_prefix(self, mark: PrefixMark | None) -> tuple[ReplicaId, ...]:
        """The replicas that have the beginning, some of which may be gone."""
        return self._prefixes.replicas(mark)
