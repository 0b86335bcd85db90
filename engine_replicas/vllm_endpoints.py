"""HTTP routes on vLLM's own API server, for our scheduler without the rest of the platform.

    GET    /continuum/stats                          counters, memory and estimates
    GET    /continuum/programs/{id}                  a program's leases, and its last decisions with their inputs
    POST   /continuum/programs/{id}/lease            the tool that the program now runs is known
    POST   /continuum/programs/{id}/tool_events      a tool of the program started or finished
    DELETE /continuum/programs/{id}                  the program is over: its KV is released at once

They are the utility calls of `vllm_plugin.py`, in JSON. vLLM loads them for the entry point `vllm.endpoint_plugins` if the
environment says `VLLM_PLUGINS=continuum`, and asks for no key before them: whoever reaches the port can end leases.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Path, Request
from pydantic import BaseModel, ConfigDict, Field

from agent_program.clock import SystemClock
from agent_program.ids import ID_BYTES_MAX
from agent_program.tool_events import ToolEventKind, ToolOutcome
from engine_replicas.scheduler_client import SchedulerClient

#: An engine answers between two steps, and a step may be a long prefill.
TIMEOUT_S = 30.0

logger = logging.getLogger(__name__)


class LeaseBody(BaseModel):
    """What the answer of the program's last turn asks for."""

    model_config = ConfigDict(extra="forbid")

    branch: str = Field(
        default="0", min_length=1, max_length=ID_BYTES_MAX, description="The line of context that the turn belongs to."
    )
    tool: str | None = Field(
        default=None, min_length=1, max_length=ID_BYTES_MAX, description="The tool that runs now; None where none does."
    )
    is_last_turn: bool = Field(default=False, description="No turn follows.")


class ToolEventBody(BaseModel):
    """A tool of the program started or finished."""

    model_config = ConfigDict(extra="forbid")

    kind: ToolEventKind = Field(description="What happened.")
    tool: str = Field(min_length=1, max_length=ID_BYTES_MAX, description="What the tool's times are kept under.")
    elapsed_s: float = Field(default=0.0, ge=0, lt=1e9, description="Seconds since the tool started.")
    outcome: ToolOutcome | None = Field(default=None, description="How a finished tool ended.")


async def _scheduler(request: Request) -> SchedulerClient:
    client: SchedulerClient | None = getattr(request.app.state, "continuum_scheduler", None)
    if client is None:
        raise HTTPException(503, "this server has no engine")
    return client


Scheduler = Annotated[SchedulerClient, Depends(_scheduler)]
ProgramIdPath = Annotated[str, Path(min_length=1, max_length=ID_BYTES_MAX)]
router = APIRouter(prefix="/continuum", tags=["continuum"])


async def _answer(client: SchedulerClient, name: str, *args: Any) -> Any:
    before = client.failures[name]
    answer = await client.call(name, *args)
    if client.failures[name] > before:
        raise HTTPException(
            503, "the engine did not answer; is it started with engine_replicas.vllm_scheduler.make_scheduler?"
        )
    return answer


@router.get("/stats")
async def stats(client: Scheduler) -> dict[str, Any]:
    """Counters, memory and estimates of the engine's scheduler."""
    return dict(await _answer(client, "continuum_stats"))


@router.get("/programs/{program_id}")
async def explain(program_id: ProgramIdPath, client: Scheduler) -> dict[str, Any]:
    """Why the program's KV was kept or dropped."""
    return dict(await _answer(client, "continuum_explain", program_id))


@router.post("/programs/{program_id}/lease")
async def arm(program_id: ProgramIdPath, body: LeaseBody, client: Scheduler) -> dict[str, Any]:
    """The deadline that the policy gives the program's KV for this tool."""
    arguments = (program_id, body.branch, body.tool, body.is_last_turn)
    return dict(await _answer(client, "continuum_lease_arm", *arguments))


@router.post("/programs/{program_id}/tool_events", status_code=202)
async def tool_event(program_id: ProgramIdPath, body: ToolEventBody, client: Scheduler) -> dict[str, str]:
    """Exact tool times, for deadlines and for the history."""
    outcome = body.outcome.value if body.outcome is not None else None
    await _answer(client, "continuum_tool_event", program_id, body.kind.value, body.tool, body.elapsed_s, outcome)
    return {"status": "accepted"}


@router.delete("/programs/{program_id}")
async def release(program_id: ProgramIdPath, client: Scheduler) -> dict[str, Any]:
    """How many leases ended, and the blocks that they held."""
    return dict(await _answer(client, "continuum_release", program_id))


class ContinuumEndpoints:
    """What the entry point names: vLLM's `EndpointPlugin`."""

    name = "continuum"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes."""
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Remember how the engine is reached."""
        if engine_client is None:
            return
        state.continuum_scheduler = SchedulerClient(engine_client.engine_core, timeout_s=TIMEOUT_S, clock=SystemClock())
