"""The REST API as a FastAPI app over plain objects, so that tests drive it without Ray.

Every error leaves as OpenAI's shape, through one handler (`http_errors.py`). Routes parse, call one method, and shape the
answer; what programs do is in `program_service.py`, what chat does in `chat_api.py`, what the platform is made of in
`health.py`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from agent_program.errors import InvalidRequest, Overloaded, ProgramNotFound
from agent_program.ids import ProgramId, TenantId, parse_program_id
from agent_program.tool_events import ToolEvent, ToolEventKind
from deployments.access import AccessPolicy, Caller, Scope, bearer, require
from deployments.chat_api import ChatApi
from deployments.explanation import Explainer
from deployments.health import Health
from deployments.http_body import read_json
from deployments.http_errors import Refusals, install_error_handlers
from deployments.http_etag import tagged_response
from deployments.ports import ReleasedProgram
from deployments.program_service import ProgramService
from deployments.replica_api import ReplicaApi
from deployments.request_ids import RequestIds
from deployments.settings import HttpSettings
from deployments.steps import Step
from deployments.tool_catalog import ToolCatalog
from deployments.wire_client_tools import parse_tool_event
from deployments.wire_values import parse_whole_number
from deployments.workspace_api import WorkspaceApi, WorkspaceClient
from tool_runtime.workspace_errors import WorkspaceNotFound

_LIST_LIMIT_DEFAULT = 20
_SEQ_MAX = 2**53
_INCLUDES = ("journal", "turns")


class ProgramEngine(Protocol):
    """What the API asks of the replica that a program is bound to."""

    async def tool_event(self, event: ToolEvent) -> None: ...

    async def release(self, program_id: str) -> ReleasedProgram | None: ...


class Api:
    """What the routes call."""

    def __init__(
        self,
        *,
        programs: ProgramService,
        chat: ChatApi,
        engine: ProgramEngine,
        explainer: Explainer,
        tools: ToolCatalog,
        workspaces: WorkspaceClient,
        health: Health,
        replicas: ReplicaApi,
        model: str,
        settings: HttpSettings,
    ) -> None:
        self._access = AccessPolicy(settings.api_keys, open_without_keys=settings.open_without_keys)
        self._programs = programs
        self._chat = chat
        self._engine = engine
        self._explainer = explainer
        self._replicas = replicas
        self._tools = tools
        self._workspaces = WorkspaceApi(
            workspaces,
            archive_bytes_max=settings.archive_bytes_max,
            piece_timeout_s=settings.body_read_timeout_s,
        )
        self._health = health
        self._model = model
        self._settings = settings
        self._event_streams = 0
        self._refusals = Refusals()

    def build(self) -> FastAPI:
        """The ASGI app."""
        app = FastAPI(title="Continuum agents", version="1", docs_url="/docs", redoc_url=None)
        install_error_handlers(app, self._refusals)
        app.add_middleware(RequestIds)
        public, read, submit, admin = None, Scope.READ, Scope.SUBMIT, Scope.ADMIN
        routes: list[tuple[Scope | None, str, str, Callable[..., Awaitable[Response]]]] = [
            (submit, "POST", "/v1/chat/completions", self.chat_completion),
            (read, "GET", "/v1/models", self.models),
            (admin, "GET", "/v1/replicas", self.list_replicas),
            (admin, "POST", "/v1/replicas/{replica_id}/drain", self.drain_replica),
            (admin, "DELETE", "/v1/replicas/{replica_id}/drain", self.keep_replica),
            (submit, "POST", "/v1/programs", self.submit),
            (read, "GET", "/v1/programs", self.list_programs),
            (read, "GET", "/v1/programs/{program_id}", self.get_program),
            (submit, "DELETE", "/v1/programs/{program_id}", self.delete_program),
            (submit, "POST", "/v1/programs/{program_id}/cancel", self.cancel),
            (read, "GET", "/v1/programs/{program_id}/events", self.events),
            (submit, "POST", "/v1/programs/{program_id}/tool_outputs", self.tool_outputs),
            (submit, "POST", "/v1/programs/{program_id}/tool_events", self.tool_event),
            (read, "GET", "/v1/programs/{program_id}/explain", self.explain),
            (read, "GET", "/v1/programs/{program_id}/trace", self.trace),
            (read, "GET", "/v1/programs/{program_id}/workspace", self.read_workspace),
            (submit, "PUT", "/v1/programs/{program_id}/workspace", self.replace_workspace),
            (submit, "POST", "/v1/programs/{program_id}/workspace/snapshots", self.snapshot_workspace),
            (submit, "POST", "/v1/programs/{program_id}/workspace/restore", self.restore_workspace),
            (read, "GET", "/v1/tools", self.list_tools),
            (read, "GET", "/v1/tools/latency", self.tool_latencies),
            (read, "GET", "/v1/tools/{name}/latency", self.tool_latency),
            (public, "GET", "/healthz", self.healthz),
            (public, "GET", "/readyz", self.readyz),
            (public, "GET", "/metrics", self.metrics),
        ]
        for scope, method, path, endpoint in routes:
            guards = [] if scope is None else [Depends(self._guard(scope))]
            app.add_api_route(
                path, endpoint, methods=[method], response_model=None, name=endpoint.__name__, dependencies=guards
            )
        return app

    def status(self) -> dict[str, Any]:
        """What this process does and has refused, for metrics."""
        return {"event_streams": self._event_streams, "refusals": self._refusals.by_code()}

    def _guard(self, scope: Scope) -> Callable[[Request], Awaitable[None]]:
        """Lets nobody in without the scope; runs before the body is read."""

        async def check(request: Request) -> None:
            address = request.client.host if request.client is not None else None
            caller = self._access.caller(key=bearer(request.headers.get("authorization")), address=address)
            require(caller, scope)
            request.state.caller = caller

        return check

    async def _body(self, request: Request) -> Any:
        return await read_json(
            request, bytes_max=self._settings.body_bytes_max, timeout_s=self._settings.body_read_timeout_s
        )

    # Chat

    async def chat_completion(self, request: Request) -> Response:
        """One turn, as OpenAI's chat completions; a program id keeps it on its program's replica."""
        return await self._chat.answer(request, await self._body(request), caller_of(request))

    async def models(self) -> Response:
        """The model that is served."""
        card = {"id": self._model, "object": "model", "created": 0, "owned_by": "continuum"}
        return JSONResponse({"object": "list", "data": [card]})

    # Engine replicas

    async def list_replicas(self) -> Response:
        """The engine replicas: what each reports to routers, and how far it has drained."""
        return await self._replicas.everyone()

    async def drain_replica(self, request: Request, replica_id: str) -> Response:
        """No new programs for an engine replica; its programs move with their next turns, and then it leaves."""
        return await self._replicas.drain(replica_id, await self._body(request) if await request.body() else None)

    async def keep_replica(self, replica_id: str) -> Response:
        """An engine replica that was told to drain stays."""
        return await self._replicas.stay(replica_id)

    # Programs

    async def submit(self, request: Request) -> Response:
        """Submit a program; it runs on its own from here on."""
        body = await self._body(request)
        record = await self._programs.submit(
            body, caller=caller_of(request), idempotency_key=request.headers.get("idempotency-key")
        )
        return JSONResponse(record.to_wire(), status_code=202, headers={"location": f"/v1/programs/{record.id}"})

    async def get_program(self, request: Request, program_id: str) -> Response:
        """Where a program stands; `include=journal` adds its steps, `include=turns` its finished turns."""
        includes = [name for name in request.query_params.get("include", "").split(",") if name]
        if unknown := sorted(set(includes) - set(_INCLUDES)):
            raise InvalidRequest(f"include: one of {', '.join(_INCLUDES)}, not {unknown[0][:100]!r}", param="include")
        wire = (await self._programs.get(program_id, caller_of(request))).to_wire()
        if includes:
            steps = await self._programs.steps(program_id)
            if "journal" in includes:
                wire["journal"] = [step.to_wire() for step in steps]
            if "turns" in includes:
                wire["turn_list"] = [dict(step.data) for step in steps if step.kind == "turn.finished"]
        return tagged_response(request, wire)

    async def list_programs(self, request: Request) -> Response:
        """Programs, newest first."""
        query = request.query_params
        limit = parse_whole_number(
            query.get("limit"),
            what="limit",
            default=min(_LIST_LIMIT_DEFAULT, self._settings.list_limit_max),
            least=1,
            most=self._settings.list_limit_max,
        )
        page = await self._programs.list(
            caller=caller_of(request), state=query.get("state"), limit=limit, after=query.get("after")
        )
        data = [record.to_wire() for record in page.records]
        last_id = data[-1]["id"] if data else None
        return tagged_response(request, {"object": "list", "data": data, "has_more": page.has_more, "last_id": last_id})

    async def cancel(self, request: Request, program_id: str) -> Response:
        """Ask for a program's end. The answer may still say `running`; `cancel_requested` is true then."""
        return JSONResponse((await self._programs.cancel(program_id, caller_of(request))).to_wire())

    async def delete_program(self, request: Request, program_id: str) -> Response:
        """Forget a program that has ended. For a client-run program: its KV and binding are released."""
        try:
            await self._programs.delete(program_id, caller_of(request))
        except ProgramNotFound:
            engine_id = caller_of(request).engine_id(parse_program_id(program_id))
            if (await self._explainer.explain(engine_id)).latest is None or await self._is_journaled(engine_id):
                raise
            await self._engine.release(engine_id)
        return JSONResponse({"id": program_id, "object": "program.deleted", "deleted": True})

    async def events(self, request: Request, program_id: str) -> Response:
        """A program's steps as server-sent events, from the first or from behind `Last-Event-ID`, until it ends."""
        after = parse_whole_number(
            request.headers.get("last-event-id"), what="Last-Event-ID", default=0, least=0, most=_SEQ_MAX
        )
        await self._programs.get(program_id, caller_of(request))
        if self._event_streams >= self._settings.event_streams_max:
            raise Overloaded(f"{self._event_streams} event streams are open", retry_after_s=5)
        return StreamingResponse(
            self._event_stream(program_id, after),
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )

    async def _event_stream(self, program_id: str, after_seq: int) -> AsyncIterator[str]:
        self._event_streams += 1
        try:
            async for step in self._programs.follow(program_id, after_seq=after_seq):
                yield ": heartbeat\n\n" if step is None else _event(program_id, step)
        finally:
            self._event_streams -= 1

    async def tool_outputs(self, request: Request, program_id: str) -> Response:
        """What a program in `requires_action` waits for: outputs of the client's own tools, consent to calls. In any number of
        requests; the same answer again changes nothing."""
        answered = await self._programs.answer(program_id, await self._body(request), caller_of(request))
        if answered.wait is not None:
            await self._tell_of_client_tool(
                ToolEvent(
                    program_id=parse_program_id(program_id),
                    kind=ToolEventKind.FINISHED,
                    tool=answered.wait.tool_key,
                    elapsed_s=answered.wait.seconds,
                    outcome=answered.wait.outcome,
                )
            )
        return JSONResponse(answered.record.to_wire())

    async def tool_event(self, request: Request, program_id: str) -> Response:
        """A client that runs its own tools reports that one starts or has finished."""
        engine_id = await self._engine_id(program_id, caller_of(request))
        await self._tell_of_client_tool(parse_tool_event(engine_id, await self._body(request)))
        return JSONResponse({"object": "tool_event", "accepted": True}, status_code=202)

    async def _tell_of_client_tool(self, event: ToolEvent) -> None:
        """A tool that the platform does not run started or finished: the scheduler hears of it as of any other."""
        self._tools.record(event)
        await self._engine.tool_event(event)

    async def _engine_id(self, program_id: str, caller: Caller) -> ProgramId:
        """What the engines call a program: one that the platform runs has its own id, one that its client runs the caller's.

        Raises:
            ProgramNotFound: it is another tenant's.
        """
        if caller.key_name is None:
            return parse_program_id(program_id)  # one id for everybody, and no store that has to answer
        try:
            return ProgramId((await self._programs.get(program_id, caller)).id)
        except ProgramNotFound:
            engine_id = caller.engine_id(parse_program_id(program_id))
            if await self._is_journaled(engine_id):
                raise
            return engine_id

    async def _is_journaled(self, program_id: str) -> bool:
        try:
            await self._programs.get(program_id)
        except (ProgramNotFound, InvalidRequest):
            return False
        return True

    async def trace(self, request: Request, program_id: str) -> Response:
        """The program's timeline as Chrome trace JSON, for Perfetto."""
        return JSONResponse(await self._programs.trace(program_id, caller_of(request)))

    async def explain(self, request: Request, program_id: str) -> Response:
        """Why the program's KV was kept or dropped, and where the program is."""
        caller = caller_of(request)
        explained = await self._explainer.explain(await self._engine_id(program_id, caller))
        try:
            record: dict[str, Any] | None = (await self._programs.get(program_id, caller)).to_wire()
        except ProgramNotFound:
            record = None
        if record is None and explained.latest is None:
            raise ProgramNotFound(f"no program {program_id!r}", param="program_id")
        return JSONResponse(
            {
                "object": "program.explanation",
                "id": program_id,
                "program": record,
                "scheduler": explained.latest,
                "placement": explained.placement,
                "earlier_replicas": explained.earlier,
            }
        )

    # Files

    async def read_workspace(self, request: Request, program_id: str) -> Response:
        """The program's files as a tar."""
        async with self._owner(request, program_id) as owner:
            return await self._workspaces.read(*owner)

    async def replace_workspace(self, request: Request, program_id: str) -> Response:
        """The program's files become those of a tar, all or nothing; also before the program is submitted under its id."""
        async with self._owner(request, program_id) as owner:
            return await self._workspaces.replace(request, *owner)

    async def snapshot_workspace(self, request: Request, program_id: str) -> Response:
        """Keep the program's files as they are."""
        async with self._owner(request, program_id) as owner:
            return await self._workspaces.snapshot(*owner)

    async def restore_workspace(self, request: Request, program_id: str) -> Response:
        """Put the files of a snapshot back."""
        body = await self._body(request)
        async with self._owner(request, program_id) as owner:
            return await self._workspaces.restore(body, *owner)

    @asynccontextmanager
    async def _owner(self, request: Request, program_id: str) -> AsyncIterator[tuple[ProgramId, TenantId]]:
        """The program and its tenant. Files may be there before their program: then they are those of the caller's tenant.

        Raises:
            ProgramNotFound: it is another tenant's, or there are neither program nor files.
        """
        caller = caller_of(request)
        try:
            record = await self._programs.get(program_id, caller)
            owner = ProgramId(record.id), TenantId(record.tenant_id)
        except ProgramNotFound:
            if await self._is_journaled(program_id):
                raise
            record, owner = None, (parse_program_id(program_id), caller.tenant_id)
        try:
            yield owner
        except WorkspaceNotFound as error:
            if record is not None:
                raise
            raise ProgramNotFound(
                f"no program {program_id!r}, and no files that were put there for one", param="program_id"
            ) from error

    # Tools

    async def list_tools(self) -> Response:
        """The tools that programs may name."""
        return JSONResponse(await self._tools.list())

    async def tool_latencies(self) -> Response:
        """How long everything took that has been measured."""
        return JSONResponse(await self._tools.latencies())

    async def tool_latency(self, request: Request, name: str) -> Response:
        """How long a tool takes, by what has been measured, and how long a context of `context_tokens` would be kept for it."""
        asked = request.query_params.get("context_tokens")
        tokens = parse_whole_number(asked, what="context_tokens", default=0, least=1, most=_SEQ_MAX)
        return JSONResponse(await self._tools.latency(name, context_tokens=tokens or None))

    # Health

    async def healthz(self) -> Response:
        """The API process lives."""
        return JSONResponse({"status": "ok"})

    async def readyz(self) -> Response:
        """Programs can be submitted and will run; otherwise 503, and which part is missing."""
        readiness = await self._health.readiness()
        return JSONResponse(readiness.to_wire(), status_code=200 if readiness.is_ready else 503)

    async def metrics(self) -> Response:
        """Prometheus text of the whole platform."""
        page = await self._health.metrics_page()
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")


def caller_of(request: Request) -> Caller:
    """Who sends a request that has passed its guard."""
    caller: Caller = request.state.caller
    return caller


def _event(program_id: str, step: Step) -> str:
    data = {"program_id": program_id, "seq": step.seq, "type": step.kind.value, "at": step.at, **step.data}
    return f"id: {step.seq}\nevent: {step.kind.value}\ndata: {json.dumps(data)}\n\n"
