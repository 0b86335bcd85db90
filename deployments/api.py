"""The REST API as a FastAPI app over plain objects, so that tests drive it without Ray.

Every error leaves as OpenAI's shape, through one handler (`http_errors.py`). Routes parse, call one method, and shape the
answer; what programs do is in `program_service.py`, what chat does in `chat_api.py`, what the platform is made of in
`health.py`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from agent_program.errors import InvalidRequest, Overloaded, ProgramNotFound
from agent_program.ids import parse_program_id
from agent_program.tool_events import ToolEvent
from deployments.chat_api import ChatApi
from deployments.explanation import Explainer
from deployments.health import Health
from deployments.http_body import read_json
from deployments.http_errors import install_error_handlers
from deployments.program_service import ProgramService
from deployments.settings import HttpSettings
from deployments.steps import Step
from deployments.tool_catalog import ToolCatalog
from deployments.wire import parse_tool_event, parse_whole_number

_LIST_LIMIT_DEFAULT = 20
_SEQ_MAX = 2**53
_INCLUDES = ("journal", "turns")


class ProgramEngine(Protocol):
    """What the API asks of the replica that a program is bound to."""

    async def tool_event(self, event: ToolEvent) -> None: ...

    async def release(self, program_id: str) -> None: ...


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
        health: Health,
        model: str,
        settings: HttpSettings,
    ) -> None:
        self._programs = programs
        self._chat = chat
        self._engine = engine
        self._explainer = explainer
        self._tools = tools
        self._health = health
        self._model = model
        self._settings = settings
        self._event_streams = 0

    def build(self) -> FastAPI:
        """The ASGI app."""
        app = FastAPI(title="Continuum agents", version="1", docs_url="/docs", redoc_url=None)
        install_error_handlers(app)
        routes: list[tuple[str, str, Callable[..., Awaitable[Response]]]] = [
            ("POST", "/v1/chat/completions", self.chat_completion),
            ("GET", "/v1/models", self.models),
            ("POST", "/v1/programs", self.submit),
            ("GET", "/v1/programs", self.list_programs),
            ("GET", "/v1/programs/{program_id}", self.get_program),
            ("DELETE", "/v1/programs/{program_id}", self.delete_program),
            ("POST", "/v1/programs/{program_id}/cancel", self.cancel),
            ("GET", "/v1/programs/{program_id}/events", self.events),
            ("POST", "/v1/programs/{program_id}/tool_events", self.tool_event),
            ("GET", "/v1/programs/{program_id}/explain", self.explain),
            ("GET", "/v1/tools", self.list_tools),
            ("GET", "/v1/tools/latency", self.tool_latencies),
            ("GET", "/v1/tools/{name}/latency", self.tool_latency),
            ("GET", "/healthz", self.healthz),
            ("GET", "/readyz", self.readyz),
            ("GET", "/metrics", self.metrics),
        ]
        for method, path, endpoint in routes:
            app.add_api_route(path, endpoint, methods=[method], response_model=None, name=endpoint.__name__)
        return app

    async def _body(self, request: Request) -> Any:
        return await read_json(
            request, bytes_max=self._settings.body_bytes_max, timeout_s=self._settings.body_read_timeout_s
        )

    # Chat

    async def chat_completion(self, request: Request) -> Response:
        """One turn, as OpenAI's chat completions; a program id keeps it on its program's replica."""
        return await self._chat.answer(request, await self._body(request))

    async def models(self) -> Response:
        """The model that is served."""
        card = {"id": self._model, "object": "model", "created": 0, "owned_by": "continuum"}
        return JSONResponse({"object": "list", "data": [card]})

    # Programs

    async def submit(self, request: Request) -> Response:
        """Submit a program; it runs on its own from here on."""
        body = await self._body(request)
        record = await self._programs.submit(body, idempotency_key=request.headers.get("idempotency-key"))
        return JSONResponse(record.to_wire(), status_code=202, headers={"location": f"/v1/programs/{record.id}"})

    async def get_program(self, request: Request, program_id: str) -> Response:
        """Where a program stands; `include=journal` adds its steps, `include=turns` its finished turns."""
        includes = [name for name in request.query_params.get("include", "").split(",") if name]
        if unknown := sorted(set(includes) - set(_INCLUDES)):
            raise InvalidRequest(f"include: one of {', '.join(_INCLUDES)}, not {unknown[0][:100]!r}", param="include")
        wire = (await self._programs.get(program_id)).to_wire()
        if includes:
            steps = await self._programs.steps(program_id)
            if "journal" in includes:
                wire["journal"] = [step.to_wire() for step in steps]
            if "turns" in includes:
                wire["turn_list"] = [dict(step.data) for step in steps if step.kind == "turn.finished"]
        return JSONResponse(wire)

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
        page = await self._programs.list(state=query.get("state"), limit=limit, after=query.get("after"))
        data = [record.to_wire() for record in page.records]
        last_id = data[-1]["id"] if data else None
        return JSONResponse({"object": "list", "data": data, "has_more": page.has_more, "last_id": last_id})

    async def cancel(self, program_id: str) -> Response:
        """Ask for a program's end. The answer may still say `running`; `cancel_requested` is true then."""
        return JSONResponse((await self._programs.cancel(program_id)).to_wire())

    async def delete_program(self, program_id: str) -> Response:
        """Forget a program that has ended. For a client-run program: its KV and binding are released."""
        try:
            await self._programs.delete(program_id)
        except ProgramNotFound:
            if (await self._explainer.explain(parse_program_id(program_id))).latest is None:
                raise
            await self._engine.release(program_id)
        return JSONResponse({"id": program_id, "object": "program.deleted", "deleted": True})

    async def events(self, request: Request, program_id: str) -> Response:
        """A program's steps as server-sent events, from the first or from behind `Last-Event-ID`, until it ends."""
        after = parse_whole_number(
            request.headers.get("last-event-id"), what="Last-Event-ID", default=0, least=0, most=_SEQ_MAX
        )
        await self._programs.get(program_id)
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

    async def tool_event(self, request: Request, program_id: str) -> Response:
        """A client that runs its own tools reports that one starts or has finished."""
        await self._engine.tool_event(parse_tool_event(program_id, await self._body(request)))
        return JSONResponse({"object": "tool_event", "accepted": True}, status_code=202)

    async def explain(self, program_id: str) -> Response:
        """Why the program's KV was kept or dropped, and where the program is."""
        explained = await self._explainer.explain(parse_program_id(program_id))
        try:
            record: dict[str, Any] | None = (await self._programs.get(program_id)).to_wire()
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
                "earlier_replicas": explained.earlier,
            }
        )

    # Tools

    async def list_tools(self) -> Response:
        """The tools that programs may name."""
        return JSONResponse(self._tools.list())

    async def tool_latencies(self) -> Response:
        """How long everything took that has been measured."""
        return JSONResponse(await self._tools.latencies())

    async def tool_latency(self, name: str) -> Response:
        """How long a tool takes, by what has been measured."""
        return JSONResponse(await self._tools.latency(name))

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


def _event(program_id: str, step: Step) -> str:
    data = {"program_id": program_id, "seq": step.seq, "type": step.kind.value, "at": step.at, **step.data}
    return f"id: {step.seq}\nevent: {step.kind.value}\ndata: {json.dumps(data)}\n\n"
