"""A program names its relatives: by submission and by chat hints, down to what the router reads off its turns."""

from __future__ import annotations

from typing import Any

import pytest

from agent_program.errors import InvalidRequest
from agent_program.ids import ProgramId, TenantId
from continuum_router.affinity import affinity_of
from deployments.access import Caller, Scope
from deployments.chat_identity import identify
from deployments.memory_clients import ScriptedEngine, answer
from deployments.program_settings import ProgramSettings
from deployments.wire import parse_submission
from support.programs import Bench, spec
from tool_runtime.registry import BUILTIN_TOOLS

CALLER = Caller(tenant_id=TenantId("acme"), scopes=frozenset(Scope), key_name="k")


def submitted(**fields: Any) -> Any:
    body = {"input": "Do it.", **fields}
    return parse_submission(body, model="small", tools=BUILTIN_TOOLS, settings=ProgramSettings(), now_wall_s=0.0)


def test_a_submission_names_its_parent() -> None:
    assert submitted(parent_program_id="prog_parent").parent_program_id == "prog_parent"
    assert submitted().parent_program_id is None


@pytest.mark.parametrize("named", ["", "a b", "x" * 300, 7])
def test_a_parent_that_is_no_program_id_is_refused_and_named(named: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        submitted(parent_program_id=named)
    assert refused.value.param == "parent_program_id"


async def test_every_turn_tells_the_router_of_the_relatives() -> None:
    engine = ScriptedEngine([answer("done")])
    bench = Bench(spec(parent_program_id="prog_parent", previous_program_id="prog_before"), engine=engine)
    await bench.run()
    affinity = affinity_of(engine.bodies[0], engine.hints[0])
    assert (affinity.parent, affinity.previous) == ("prog_parent", "prog_before")
    assert affinity.prefix is not None  # its tools


def test_a_chats_relatives_are_its_callers_own_programs() -> None:
    hints = {"parent_program_id": "p1", "previous_program_id": "p2"}
    chat = identify({"messages": [], "program_id": "p3", "continuum": hints}, {}, CALLER)
    assert chat.hints is not None
    assert chat.hints.parent_program_id == ProgramId("acme/p1")
    assert chat.hints.previous_program_id == ProgramId("acme/p2")


@pytest.mark.parametrize("nonsense", ["", "a b", 7, ["p"], "x" * 300])
def test_a_relative_that_is_no_program_id_is_no_relative(nonsense: object) -> None:
    chat = identify({"messages": [], "program_id": "p", "continuum": {"parent_program_id": nonsense}}, {})
    assert chat.hints is not None
    assert chat.hints.parent_program_id is None
