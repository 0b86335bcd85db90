"""Ray Serve's request router for programs: a thin layer over `ProgramRouter`.

Serve makes one instance of the class below per deployment handle and process, on a thread and event loop of its own. It hands
us the live replicas with their last reports (`update_replicas`), asks for a ranking per request (`choose_replicas`), and tells
of sends, ends and deaths. A request's program is the handle call's `session_id`; Serve does not carry it from one handle call to
the next, so each caller sets it.

Two things to know when editing:
- Serve pickles the class *by value*: globals of this module are copies. State shared by routers belongs in an imported module.
- Inside one rank Serve picks the shortest queue, so a ranking that must be obeyed consists of ranks of one replica.

What a reply says comes by the process's exchange (`exchange.py`), from whoever holds the handle.

A turn's call (`turn_methods`) has the request's body and its hints as arguments, from which the program's relatives and the beginning
of its prompt are read. One keyword is the router's to add: `placement`, why the turn went where it went, so that the replica can say
so when it is asked to explain.

A program's rank is its replica and nothing else: when that is full, the request waits for it (with back-off) and is not sent
elsewhere, where its KV is not. For that reason a deployment's `max_ongoing_requests` should be well above the engine's batch.

Serve matches a chosen replica to its request by `internal_request_id`, which concurrent handle calls made inside one
HTTP request share; the second of two such calls would wait for ever. The three overrides marked below match by the
request's own metadata object instead.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from ray.util.metrics import Counter, Gauge

from agent_program.clock import SystemClock
from agent_program.ids import ProgramId, ReplicaId
from continuum_router.affinity import affinity_of
from continuum_router.config import RouterSettings
from continuum_router.exchange import Note, TurnReplied, listen
from continuum_router.placement import Placement
from continuum_router.program_router import Intent, ProgramRouter
from continuum_router.redis_bindings import RedisBindings
from continuum_router.replica_view import ReplicaView
from continuum_router.router_counters import counters_of
from continuum_router.routing_memory import Reply


def router_config(store_url: str, *, namespace: str, settings: RouterSettings | None = None) -> RequestRouterConfig:
    """What `serve.deployment(request_router_config=...)` takes; `namespace` is "engine" or "tools"."""
    chosen = settings or RouterSettings()
    return RequestRouterConfig(
        request_router_class="continuum_router.ray_router.ProgramAffinityRouter",
        request_router_kwargs={
            "store_url": store_url,
            "namespace": namespace,
            "settings": chosen.model_dump(mode="json"),
        },
        request_routing_stats_period_s=chosen.routing_stats_period_s,
    )


class ProgramAffinityRouter(RequestRouter):
    """Keeps each program on its replica."""

    def initialize_state(self, *, store_url: str, namespace: str, settings: Mapping[str, Any] | None = None) -> None:
        """Called by Serve with the deployment's `request_router_kwargs`.

        Raises:
            pydantic.ValidationError: a setting that does not exist or has a bad value.
            ValueError: a bad namespace or store URL.
        """
        self._settings = RouterSettings.model_validate(settings or {})
        self._programs = ProgramRouter(
            bindings=RedisBindings(
                store_url,
                namespace=namespace,
                ttl_s=self._settings.binding_ttl_s,
                timeout_s=self._settings.store_timeout_s,
                connections_max=self._settings.store_connections_max,
            ),
            settings=self._settings,
            clock=SystemClock(),
        )
        self._closer: weakref.finalize[Any, Any] | None = None
        self._releases: set[asyncio.Task[None]] = set()
        self._pending_by_metadata: dict[int, PendingRequest] = {}
        self._reserved: dict[int, ReplicaId] = {}
        self._counters = counters_of(namespace)
        listen(namespace, self)
        tags = {"namespace": namespace, "deployment": self._deployment_id.name}
        self._placements = Counter(
            "continuum_router_placements",
            description="Requests for which a replica was chosen, by reason.",
            tag_keys=("namespace", "deployment", "reason"),
        )
        self._placements.set_default_tags(tags)
        self._unconfirmed = Gauge(
            "continuum_router_unconfirmed_bindings",
            description="Bindings made while the store was away that it has not confirmed.",
            tag_keys=("namespace", "deployment"),
        )
        self._unconfirmed.set_default_tags(tags)

    # What Serve asks

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas] if candidate_replicas else []
        self._close_when_dropped()
        # Without this Serve asks again in a tight loop while the replica is full.
        pending_request.routing_context.should_backoff = True
        session_id = pending_request.metadata.session_id
        if session_id:
            placement = await self._place(ProgramId(session_id), pending_request)
        else:
            placement = self._programs.place_unbound(pending_request.metadata.internal_request_id)
        if placement is None:
            return []
        self._count(placement)
        replica = self._replica(placement.replica_id)
        if replica is None:
            return []  # it left while we asked the store; Serve asks again
        if self._is_turn(pending_request):
            detail = dict(placement.detail or {})
            pending_request.kwargs["placement"] = {"reason": placement.reason.value, **detail}
        self._reserve(pending_request, placement.replica_id)
        return [[replica]] if session_id else [[replica], self._replicas_list]

    @property
    def max_num_routing_tasks(self) -> int:
        # Serve allows two tasks a replica. A request that waits for its own full replica occupies one, so a few programs of one
        # busy replica would stop requests to idle ones.
        return self._settings.routing_tasks_max

    async def _place(self, program_id: ProgramId, pending_request: PendingRequest) -> Placement | None:
        intent = self._intent(pending_request)
        if not self._is_turn(pending_request):
            return await self._programs.place(program_id, intent)
        arguments: list[Any] = [*list(pending_request.args), None, None]
        body, hints = arguments[:2]
        return await self._programs.place(program_id, intent, affinity=partial(affinity_of, body, hints))

    # What callers tell

    def hear(self, note: Note) -> None:
        """A note of the exchange; comes on any thread."""
        if not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(self._take, note)

    def _take(self, note: Note) -> None:
        if not isinstance(note, TurnReplied):
            self._programs.turn_lost(note.program_id, note.replica_id)
        elif (replica := self._replica(note.replica_id)) is not None:
            view = ReplicaView.from_report(note.replica_id, replica.max_ongoing_requests, note.report)
            self._programs.reply(
                Reply(program_id=note.program_id, view=view, kept_s=note.kept_s, context_tokens=note.context_tokens)
            )

    # What Serve tells

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._refresh()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._programs.lose_replica(ReplicaId(replica_id.unique_id))
        # Serve reports a death on the safe side. Should the controller still list the replica when the quarantine is over, it
        # lives, and no broadcast need follow to say so.
        self._event_loop.call_later(self._settings.lost_replica_quarantine_s, self._refresh)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._programs.fleet.turn_sent(ReplicaId(replica_id.unique_id))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        self._programs.fleet.turn_ended(ReplicaId(replica_id.unique_id))

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        super().on_request_routed(pending_request, replica_id, result)
        session_id = pending_request.metadata.session_id
        if session_id and pending_request.metadata.call_method in self._settings.releasing_methods:
            task = self._event_loop.create_task(self._programs.release(ProgramId(session_id)))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    # Requests are matched by their own metadata object (see the top)

    def _add_pending_request_to_indices(self, pending_request: PendingRequest) -> None:
        self._pending_by_metadata[id(pending_request.metadata)] = pending_request

    def _remove_pending_request_from_indices(self, pending_request: PendingRequest) -> None:
        self._pending_by_metadata.pop(id(pending_request.metadata), None)
        # Serve wakes the request that got its replica before it comes to this callback, and the request sends itself then.
        self._event_loop.call_soon(self._unreserve, id(pending_request.metadata))

    def _get_pending_request_matching_internal_request_id(self, request_metadata: Any = None) -> PendingRequest | None:
        pending = self._pending_by_metadata.get(id(request_metadata))
        return pending if pending is not None and not pending.future.done() else None

    # Between choice and sending, requests that arrive together pass through; a choice counts as a turn meanwhile, so that they
    # do not all choose the same replica.

    def _reserve(self, pending_request: PendingRequest, replica_id: ReplicaId) -> None:
        key = id(pending_request.metadata)
        self._unreserve(key)
        if key in self._pending_by_metadata:
            self._reserved[key] = replica_id
            self._programs.fleet.turn_sent(replica_id)

    def _unreserve(self, key: int) -> None:
        if (replica_id := self._reserved.pop(key, None)) is not None:
            self._programs.fleet.turn_ended(replica_id)

    # Details

    def _close_when_dropped(self) -> None:
        # Serve drops a router without a word when its handle goes. (At the process's end the system closes connections.)
        if self._closer is None:
            self._closer = weakref.finalize(self, _close_on_loop, self._programs, self._event_loop)
            self._closer.atexit = False

    def _refresh(self) -> None:
        self._programs.replace_replicas(
            ReplicaView.from_report(
                ReplicaId(replica.replica_id.unique_id), replica.max_ongoing_requests, replica.routing_stats
            )
            for replica in self._replicas_list
        )

    def _intent(self, pending_request: PendingRequest) -> Intent:
        method = pending_request.metadata.call_method
        is_follower = method in self._settings.follow_only_methods or method in self._settings.releasing_methods
        return Intent.FOLLOW if is_follower else Intent.BIND

    def _is_turn(self, pending_request: PendingRequest) -> bool:
        return pending_request.metadata.call_method in self._settings.turn_methods

    def _replica(self, replica_id: ReplicaId) -> RunningReplica | None:
        return self.curr_replicas.get(ReplicaID(replica_id, deployment_id=self._deployment_id))

    def _count(self, placement: Placement) -> None:
        self._placements.inc(tags={"reason": placement.reason.value})
        self._counters.placed(
            placement.reason,
            bindings=self._programs.programs_known,
            unconfirmed=self._programs.unconfirmed_count,
            is_store_away=self._programs.is_store_away,
        )
        self._unconfirmed.set(self._programs.unconfirmed_count)


def _close_on_loop(programs: ProgramRouter, loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_closed():
        asyncio.run_coroutine_threadsafe(programs.close(), loop)
