"""The router without Ray: fleet, this process's table of programs, and the store that is the authority on bindings.

    fresh copy here, replica lives        that replica; the store is not asked
    otherwise                             propose a replica, bind by compare-and-set, take what stands
    what stands is a lost replica         propose again, replacing it
    what stands is a replica not heard of wait a moment for the news of it, then treat it as lost
    the store does not answer             the copy here if its replica lives, else decide here; tell the store later

A binding is left while its replica lives only for what `placement.py` lists: draining, a suspect replica, a turn that failed there,
or the migration rule once a reply has said that the program's KV is not kept. Each is one more compare-and-set that replaces
the replica that is left, so that several routers which leave it at once agree on where to.

What a reply says (`reply`) corrects the views at once; between reports a router is thus wrong only about what others send.

A proposal counts as a bound program from the moment it is made, so that programs that arrive together, all waiting for the
store, spread over the replicas; and so that requests of one new program that arrive together propose the same replica.

While the store is away it is asked once per retry period. When it is back it is offered every binding known here, first binding
wins: what was decided meanwhile, and what it held before, for it may have come back empty. A program that two processes bound
differently in the meantime settles on one replica then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from enum import StrEnum
from functools import partial
from itertools import islice
from typing import TypeVar

from agent_program.clock import Clock
from agent_program.errors import StoreUnavailable
from agent_program.ids import ProgramId, ReplicaId
from continuum_router.affinity import Affinity
from continuum_router.bindings import Bindings
from continuum_router.config import RouterSettings
from continuum_router.migration import Verdict, Weighed, weigh
from continuum_router.placement import Fleet, Placement, Reason
from continuum_router.preference import NO_TIES, Ties, choose
from continuum_router.program_table import ProgramTable
from continuum_router.replica_view import ReplicaView
from continuum_router.routing_memory import Reply, RoutingMemory, Wish

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

#: Others may bind the program between our question and our answer; each further attempt needs another such change.
_BIND_ATTEMPTS_MAX = 4


class Intent(StrEnum):
    """What a request may do to its program's binding."""

    #: A turn or a tool call: binds its program if it has no binding.
    BIND = "bind"
    #: Goes where the program is, and binds nothing.
    FOLLOW = "follow"


class ProgramRouter:
    """Places the requests of programs. One per handle and event loop; not thread-safe."""

    def __init__(self, *, bindings: Bindings, settings: RouterSettings, clock: Clock) -> None:
        self._bindings = bindings
        self._settings = settings
        self._clock = clock
        self.fleet = Fleet(
            weights=settings.weights,
            seed=settings.seed,
            quarantine_s=settings.lost_replica_quarantine_s,
            report_period_s=settings.routing_stats_period_s,
            retries=settings.retries,
        )
        self._memory = RoutingMemory(programs_watched_max=settings.migration.programs_watched_max)
        self._table = ProgramTable(
            capacity=settings.programs_cached_max, ttl_s=settings.binding_ttl_s, now_s=clock.now_s()
        )
        self._store_away_until_s: float | None = None
        #: Programs whose binding is to be offered to the store; no more than the table holds.
        self._unconfirmed: dict[ProgramId, None] = {}
        self._replicas_changed = asyncio.Event()
        self._reconciling: asyncio.Task[None] | None = None

    # Replicas

    def replace_replicas(self, views: Iterable[ReplicaView]) -> None:
        """These are the live replicas, as last reported."""
        views = list(views)
        for view in views:
            self._memory.heard(view)
        self._memory.keep_only({view.replica_id for view in views})
        for replica_id in self.fleet.replace(views, now_s=self._clock.now_s()):
            self._recount(replica_id)
        self._replicas_changed.set()

    def lose_replica(self, replica_id: ReplicaId) -> None:
        """The replica was seen dying. Its programs are placed anew at their next request."""
        self.fleet.lose(replica_id, now_s=self._clock.now_s())
        self._replicas_changed.set()

    def reply(self, reply: Reply) -> None:
        """A turn came back: its replica is as it says, and its program's KV too."""
        now_s = self._clock.now_s()
        self._memory.heard(reply.view)
        self._memory.replied(reply, now_s=now_s)
        self.fleet.turn_answered(reply.view.replica_id, now_s=now_s)
        self.fleet.correct(reply.view, now_s=now_s)

    def turn_lost(self, program_id: ProgramId | None, replica_id: ReplicaId | None) -> None:
        """A turn did not come back, or not by its deadline; its program's next attempt leaves that replica. Whether the replica
        lives is for others to say. Where nobody knows which one had the turn, it was the one that the program is bound to."""
        entry = self._table.get(program_id) if program_id is not None else None
        replica_id = replica_id or (entry.replica_id if entry is not None else None)
        if replica_id is None:
            return
        self.fleet.turn_failed(replica_id, now_s=self._clock.now_s())
        if program_id is not None:
            self._memory.failed(program_id, replica_id)

    # Programs

    @property
    def is_store_away(self) -> bool:
        """The store did not answer when last asked."""
        return self._store_away_until_s is not None

    @property
    def programs_known(self) -> int:
        """How many bindings this process has a copy of; no more than `programs_cached_max`."""
        return len(self._table)

    @property
    def unconfirmed_count(self) -> int:
        """How many bindings known here are still to be offered to the store."""
        return len(self._unconfirmed)

    def place_unbound(self, key: str) -> Placement | None:
        """The replica for a request of no program; `key` breaks ties. None when no replica lives."""
        replica_id = self.fleet.choose(key)
        return None if replica_id is None else Placement(replica_id=replica_id, reason=Reason.UNBOUND)

    async def place(
        self,
        program_id: ProgramId,
        intent: Intent = Intent.BIND,
        *,
        affinity: Callable[[], Affinity] | None = None,
    ) -> Placement | None:
        """The replica for a request of the program. None when no replica lives. Never raises for an absent store.

        Args:
            affinity: what ties a program without a binding to replicas; asked only then.
        """
        avoid = self._memory.failed_on(program_id)
        home = self._home(program_id)
        weighed: Weighed | None = None
        there: ReplicaId | None = None
        if home is not None and home not in avoid:
            if intent is Intent.BIND:
                weighed, there = self._weigh_migration(program_id, home)
            if there is None and self._is_fresh(program_id):
                return Placement(replica_id=home, reason=Reason.BOUND, detail=_detail(weighed))
        if not len(self.fleet):
            return None
        if intent is Intent.FOLLOW:
            return await self._follow(program_id)
        wish = Wish(reason=self._reason(program_id), affinity=affinity, avoid=avoid)
        if there is not None:
            wish.reason, wish.to, wish.leaving = Reason.MIGRATED, there, home
            wish.proposal = Placement(replica_id=there, reason=Reason.MIGRATED, detail=_detail(weighed))
        elif home is not None and home in avoid:
            wish.reason, wish.leaving = Reason.TURN_FAILED, home
        elif home is not None:
            wish.proposal = Placement(replica_id=home, reason=Reason.BOUND, detail=_detail(weighed))
        try:
            return await self._bind(program_id, wish)
        except StoreUnavailable:
            return self._bind_here(program_id, wish)

    async def release(self, program_id: ProgramId) -> None:
        """The program is over: its binding ends. With the store away it lapses by its time to live."""
        entry = self._table.drop(program_id)
        self._unconfirmed.pop(program_id, None)
        self._memory.over(program_id, entry.replica_id if entry is not None else None)
        if entry is None:
            return
        self._recount(entry.replica_id)
        try:
            await self._ask(partial(self._bindings.release, program_id, entry.replica_id))
        except StoreUnavailable:
            logger.info("a finished program stays bound until its time is up: the store is away")

    async def close(self) -> None:
        """Stop reconciling and let go of the store."""
        if self._reconciling is not None:
            self._reconciling.cancel()
            await asyncio.gather(self._reconciling, return_exceptions=True)
        await self._bindings.close()

    # With the store

    def _home(self, program_id: ProgramId) -> ReplicaId | None:
        """The replica that the program is bound to by the copy here, where it may stay there."""
        entry = self._table.get(program_id)
        return entry.replica_id if entry is not None and self.fleet.keeps(entry.replica_id) else None

    def _is_fresh(self, program_id: ProgramId) -> bool:
        entry = self._table.get(program_id)
        if entry is None or entry.confirmed_s is None:
            return False
        return self._clock.now_s() - entry.confirmed_s <= self._settings.binding_fresh_s

    async def _bind(self, program_id: ProgramId, wish: Wish) -> Placement | None:
        standing_lost: ReplicaId | None = None
        if wish.affinity is not None and wish.to is None and self._table.get(program_id) is None:
            await self._find_ties(wish, wish.affinity())
        for _ in range(_BIND_ATTEMPTS_MAX):
            proposal = self._propose(program_id, wish)
            if proposal is None:
                return None
            wanted, replacing = proposal
            question = partial(self._bindings.bind, program_id, wanted, replacing=standing_lost or replacing)
            standing = await self._ask(question)
            await self._wait_until_heard_of(standing)
            if self._may_stay(standing, wanted, wish):
                self._note(program_id, standing, confirmed_s=self._clock.now_s())
                self._memory.note_prefix(wish.prefix, standing)
                if standing != wanted:
                    return Placement(replica_id=standing, reason=Reason.BOUND)
                if wish.reason is Reason.MIGRATED:
                    self._memory.moved(program_id, standing, now_s=self._clock.now_s())
                return wish.granted(standing)
            standing_lost, wish.to = standing, None
            wish.reason = Reason.TURN_FAILED if standing in wish.avoid else self._reason_to_leave(standing)
        # So many rounds mean that routers with opposite views of the replicas take turns: decide for this request alone.
        logger.warning("routers do not agree on a program's replica", extra={"action": "binding_contended"})
        return self._bind_here(program_id, wish)

    def _may_stay(self, standing: ReplicaId, wanted: ReplicaId, wish: Wish) -> bool:
        """What stands will do: it is what was wanted, or another router's choice that holds here too."""
        return self.fleet.keeps(standing) and (standing == wanted or standing not in wish.avoid)

    def _propose(self, program_id: ProgramId, wish: Wish) -> tuple[ReplicaId, ReplicaId | None] | None:
        """The replica wanted and the one to replace, noted at once so that the next proposal sees it."""
        entry = self._table.get(program_id)
        if entry is not None and entry.replica_id != wish.leaving and self.fleet.keeps(entry.replica_id):
            return entry.replica_id, None
        left = entry.replica_id if entry else None
        if wish.to is None or wish.to not in self.fleet:
            weights = self._settings.weights
            wish.proposal = choose(self.fleet, program_id, ties=wish.ties or NO_TIES, weights=weights, avoid=wish.avoid)
        if wish.proposal is None:
            return None
        wanted = wish.proposal.replica_id
        self._note(program_id, wanted, confirmed_s=None)
        return wanted, left

    async def _find_ties(self, wish: Wish, affinity: Affinity) -> None:
        """Where something of a program without a binding is. The store is asked for a parent that is not known here."""
        parent = None if affinity.parent is None else await self._home_of(affinity.parent)
        previous = None if affinity.previous is None else self._memory.was_on(affinity.previous)
        if previous is None and affinity.previous is not None:
            previous = await self._home_of(affinity.previous)
        prefix = wish.prefix = affinity.prefix
        wish.ties = Ties(
            parent=parent,
            previous=previous,
            prefix=self._memory.with_prefix(prefix),
            prefix_tokens=prefix.tokens if prefix else 0,
        )

    async def _home_of(self, program_id: ProgramId) -> ReplicaId | None:
        """Where another program is; advice, so that an absent store is no error."""
        if (entry := self._table.get(program_id)) is not None:
            return entry.replica_id
        with contextlib.suppress(StoreUnavailable):
            return await self._ask(partial(self._bindings.get, program_id))
        return None

    def _weigh_migration(self, program_id: ProgramId, home: ReplicaId) -> tuple[Weighed | None, ReplicaId | None]:
        """What was weighed, if anything, and where the program should go instead, if anywhere."""
        belief = self._memory.belief(program_id)
        now_s = self._clock.now_s()
        if belief is None or now_s < belief.kept_until_s:
            return None, None
        there = self.fleet.choose(program_id)  # where that is its home, no way elsewhere is shorter
        here_view = self.fleet.view(home)
        there_view = self.fleet.view(there) if there is not None else None
        if there is None or there == home or here_view is None or there_view is None:
            return None, None
        standing = self.fleet.standing(there)
        weighed = weigh(
            belief,
            here_view,
            there_view,
            now_s=now_s,
            sent_there=standing.sent_since if standing else 0,
            settings=self._settings.migration,
        )
        return weighed, there if weighed.verdict is Verdict.MOVE else None

    async def _wait_until_heard_of(self, replica_id: ReplicaId) -> None:
        """Wait for a replica that another router knows and this one does not; one that stays unknown is lost."""
        if self._has_heard_of(replica_id):
            return
        try:
            async with asyncio.timeout(self._settings.unknown_replica_grace_s):
                while not self._has_heard_of(replica_id):
                    self._replicas_changed.clear()
                    await self._replicas_changed.wait()
        except TimeoutError:
            self.fleet.presume_lost(replica_id, now_s=self._clock.now_s())

    def _has_heard_of(self, replica_id: ReplicaId) -> bool:
        return replica_id in self.fleet or self.fleet.is_lost(replica_id)

    async def _follow(self, program_id: ProgramId) -> Placement | None:
        entry = self._table.get(program_id)
        replica_id = entry.replica_id if entry else None
        with contextlib.suppress(StoreUnavailable):  # then the copy here, or none, is what there is to go by
            replica_id = await self._ask(partial(self._bindings.get, program_id)) or replica_id
        if replica_id is not None and replica_id in self.fleet:
            return Placement(replica_id=replica_id, reason=Reason.BOUND)
        return self.place_unbound(program_id)

    async def _ask(self, question: Callable[[], Awaitable[_T]]) -> _T:
        """Ask the store, unless it failed within the retry period.

        Raises:
            StoreUnavailable: it does not answer, or did not a moment ago.
        """
        now_s = self._clock.now_s()
        if self._store_away_until_s is not None:
            if now_s < self._store_away_until_s:
                raise StoreUnavailable
            self._store_away_until_s = now_s + self._settings.store_retry_s  # this request alone finds out
        try:
            answer = await question()
        except StoreUnavailable as exc:
            if self._store_away_until_s is None:
                logger.warning("binding without the store: %s", exc, extra={"action": "store_away"})
            self._store_away_until_s = self._clock.now_s() + self._settings.store_retry_s
            raise
        if self._store_away_until_s is not None:
            logger.info("the binding store is back", extra={"action": "store_back"})
            self._store_away_until_s = None
            self._offer(self._table.programs())
        return answer

    # Without the store

    def _bind_here(self, program_id: ProgramId, wish: Wish) -> Placement | None:
        proposal = self._propose(program_id, wish)
        if proposal is None:
            return None
        replica_id, _ = proposal
        self._note(program_id, replica_id, confirmed_s=None)
        self._offer([program_id])
        self._memory.note_prefix(wish.prefix, replica_id)
        return wish.granted(replica_id)

    def _offer(self, program_ids: Iterable[ProgramId]) -> None:
        room = self._settings.programs_cached_max - len(self._unconfirmed)
        self._unconfirmed.update(dict.fromkeys(islice(program_ids, room)))
        if self._unconfirmed and (self._reconciling is None or self._reconciling.done()):
            self._reconciling = asyncio.create_task(self._reconcile_until_done())

    async def reconcile(self) -> bool:
        """Offer the store the bindings that it may not know; returns whether none is left. (When the first of them finds the store
        back, all known bindings join, and a second pass is due.)"""
        for program_id in list(self._unconfirmed):
            if self._table.get(program_id) is None:
                self._unconfirmed.pop(program_id, None)
                continue
            try:
                await self._bind(program_id, Wish(reason=self._reason(program_id)))
            except StoreUnavailable:
                return False
        return not self._unconfirmed

    async def _reconcile_until_done(self) -> None:
        while True:
            if await self.reconcile():
                return
            await asyncio.sleep(self._settings.store_retry_s)

    # Book-keeping

    def _reason(self, program_id: ProgramId) -> Reason:
        entry = self._table.get(program_id)
        if entry is not None and self.fleet.keeps(entry.replica_id):
            return Reason.BOUND
        return self._reason_to_leave(entry.replica_id if entry else None)

    def _reason_to_leave(self, replica_id: ReplicaId | None) -> Reason:
        if replica_id is None:
            return Reason.NEW
        if replica_id not in self.fleet:
            return Reason.REPLICA_LOST
        return Reason.DRAINING if self.fleet.is_draining(replica_id) else Reason.SUSPECT

    def _note(self, program_id: ProgramId, replica_id: ReplicaId, *, confirmed_s: float | None) -> None:
        before = self._table.put(program_id, replica_id, confirmed_s=confirmed_s)
        if confirmed_s is not None:
            self._unconfirmed.pop(program_id, None)
        if before != replica_id:
            self._recount(replica_id)
            if before is not None:
                self._recount(before)
        for changed in self._table.rotate(now_s=self._clock.now_s()):
            self._recount(changed)

    def _recount(self, replica_id: ReplicaId) -> None:
        self.fleet.set_programs(replica_id, self._table.programs_on(replica_id))


def _detail(weighed: Weighed | None) -> dict[str, float | str] | None:
    return weighed.to_detail() if weighed is not None else None
