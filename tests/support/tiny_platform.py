"""A server that speaks the programs API from a table, over real HTTP: what the client and the command line are tested with.

It holds what a test puts into it and records what was asked of it. It decides nothing.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse


def program_object(program_id: str, *, state: str = "completed", **changes: Any) -> dict[str, Any]:
    """A program as the API shows it."""
    return {
        "id": program_id,
        "object": "program",
        "state": state,
        "end_reason": "answer" if state == "completed" else None,
        "model": "small",
        "created_at": 1_700_000_000.0,
        "updated_at": 1_700_000_008.0,
        "finished_at": 1_700_000_008.0,
        "turns": 2,
        "current_tool": None,
        "tools": ["shell"],
        "limits": {"max_turns": 4, "max_tokens_per_turn": 64, "max_seconds": 60.0},
        "metadata": {},
        "usage": {"prompt_tokens": 400, "cached_tokens": 300, "recomputed_tokens": 0, "output_tokens": 40},
        "tool_seconds": 1.25,
        "leases": {"reused": 1},
        "replica": "r1",
        "error": None,
        "output": "done [bold]not markup[/bold]",
        **changes,
    }


@dataclass
class TinyPlatform:
    """What the server answers, and what it was asked."""

    programs: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: program id → (event id, name, data)
    events: dict[str, list[tuple[str, str, dict[str, Any]]]] = field(default_factory=dict)
    #: Each connection to an event stream breaks off after so many events; None for never.
    break_after_events: int | None = None
    #: Break off in good order, as a proxy at its time limit does; otherwise the connection is cut in the middle.
    breaks_politely: bool = False
    #: Answers every request, where it is set.
    refusal: tuple[int, dict[str, str], str] | None = None
    submitted: list[dict[str, Any]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    answered: list[dict[str, Any]] = field(default_factory=list)
    last_event_ids: list[str | None] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)

    def app(self) -> FastAPI:
        app = FastAPI(dependencies=[Depends(self._admit)])

        @app.exception_handler(_Refused)
        async def refuse(_: Request, refused: Exception) -> Response:
            status, headers, body = refused.args[0]
            return Response(body, status_code=status, headers=headers)

        @app.get("/readyz")
        async def readyz() -> dict[str, str]:
            return {"status": "ready"}

        @app.post("/v1/programs", status_code=202)
        async def submit(request: Request) -> dict[str, Any]:
            body = await request.json()
            self.submitted.append(body)
            program_id = body.get("program_id", f"prog_{len(self.submitted)}")
            return self.programs.setdefault(program_id, program_object(program_id))

        @app.get("/v1/programs")
        async def programs(state: str | None = None, limit: int = 20) -> dict[str, Any]:
            found = [one for one in self.programs.values() if state in (None, one["state"])]
            page = found[:limit]
            last_id = page[-1]["id"] if page else None
            return {"object": "list", "data": page, "has_more": len(found) > limit, "last_id": last_id}

        @app.get("/v1/programs/{program_id}", response_model=None)
        async def program(program_id: str) -> dict[str, Any] | Response:
            return self.programs.get(program_id) or _not_found(program_id)

        @app.get("/v1/programs/{program_id}/explain")
        async def explain(program_id: str) -> dict[str, Any]:
            found = {"program": self.programs[program_id], "scheduler": None, "earlier_replicas": []}
            return {"object": "program.explanation", "id": program_id, **found}

        @app.post("/v1/programs/{program_id}/cancel", response_model=None)
        async def cancel(program_id: str) -> dict[str, Any] | Response:
            if program_id not in self.programs:
                return _not_found(program_id)
            self.cancelled.append(program_id)
            return self.programs[program_id]

        @app.post("/v1/programs/{program_id}/tool_outputs", response_model=None)
        async def tool_outputs(program_id: str, request: Request) -> dict[str, Any] | Response:
            if program_id not in self.programs:
                return _not_found(program_id)
            self.answered.append(await request.json())
            return self.programs[program_id]

        @app.get("/v1/programs/{program_id}/events")
        async def events(program_id: str, request: Request) -> Response:
            last_id = request.headers.get("last-event-id")
            self.last_event_ids.append(last_id)
            return StreamingResponse(self._stream(program_id, last_id), media_type="text/event-stream")

        @app.get("/v1/tools")
        async def tools() -> dict[str, Any]:
            function = {"name": "shell", "description": "Run a command.", "parameters": {"properties": {"command": {}}}}
            return {"object": "list", "data": [{"type": "function", "function": function}]}

        @app.get("/v1/tools/latency")
        async def latencies() -> dict[str, Any]:
            return {"object": "list", "data": [await latency("pytest")]}

        @app.get("/v1/tools/{name}/latency")
        async def latency(name: str) -> dict[str, Any]:
            return {"object": "tool_latency", "tool": name, "count": 3, "p50_s": 0.5, "p90_s": 1.0, "p99_s": 2.0}

        return app

    async def _admit(self, request: Request) -> None:
        self.authorizations.append(request.headers.get("authorization"))
        if self.refusal is not None:
            raise _Refused(self.refusal)

    async def _stream(self, program_id: str, last_id: str | None) -> Any:
        events = self.events[program_id]
        start = 0 if last_id is None else 1 + [event_id for event_id, _, _ in events].index(last_id)
        yield ": heartbeat\n\n"
        for sent, (event_id, name, data) in enumerate(events[start:]):
            if sent == self.break_after_events:
                if self.breaks_politely:
                    return
                raise ConnectionResetError("the test broke the stream")
            yield f"id: {event_id}\nevent: {name}\ndata: {json.dumps(data)}\n\n"


class _Refused(Exception):
    """Ends the request with the answer that it holds."""


def _not_found(program_id: str) -> Response:
    error = {"message": f"no program {program_id}", "type": "invalid_request_error", "param": None}
    return JSONResponse({"error": {**error, "code": "program_not_found"}}, status_code=404)


@contextlib.contextmanager
def running(platform: TinyPlatform) -> Iterator[str]:
    """Serve it on a free port of the loopback; gives the address."""
    server = uvicorn.Server(uvicorn.Config(platform.app(), host="127.0.0.1", port=0, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            thread.join(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
