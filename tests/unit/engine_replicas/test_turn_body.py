"""What of a client's body reaches the engine."""

from __future__ import annotations

from agent_program.ids import ProgramId, TenantId
from agent_program.turn import TurnHints
from engine_replicas.turn_body import engine_body

MESSAGES = [{"role": "user", "content": "hi"}]


def test_the_program_is_the_session_and_hints_ride_along() -> None:
    hints = TurnHints(program_id=ProgramId("prog_1"), tenant_id=TenantId("acme"), is_last_turn=True)
    body = engine_body({"messages": MESSAGES, "max_tokens": 3}, hints)
    assert body["session_id"] == "prog_1"
    assert body["max_tokens"] == 3
    assert TurnHints.from_xargs(body["session_id"], body["vllm_xargs"]) == hints


def test_a_client_cannot_name_a_program_or_a_tenant_by_itself() -> None:
    smuggled = {
        "messages": MESSAGES,
        "session_id": "prog_of_another",
        "program_id": "prog_of_another",
        "vllm_xargs": {"session_id": "prog_of_another", "continuum_tenant": "another"},
    }
    assert engine_body(smuggled, None) == {"messages": MESSAGES}
    body = engine_body(smuggled, TurnHints(program_id=ProgramId("mine")))
    assert body["session_id"] == "mine"
    assert body["vllm_xargs"]["continuum_tenant"] == "default"
    assert "session_id" not in body["vllm_xargs"]


def test_other_extension_arguments_of_the_client_are_kept() -> None:
    body = engine_body({"messages": MESSAGES, "vllm_xargs": {"theirs": 1}}, TurnHints(program_id=ProgramId("p")))
    assert body["vllm_xargs"]["theirs"] == 1


def test_fields_for_connectors_between_engines_are_dropped() -> None:
    body = engine_body({"messages": MESSAGES, "kv_transfer_params": {"prompt_token_ids": [1]}, "request_id": "x"}, None)
    assert body == {"messages": MESSAGES}


def test_malformed_extension_arguments_are_dropped() -> None:
    assert engine_body({"messages": MESSAGES, "vllm_xargs": "text"}, None) == {"messages": MESSAGES}


def test_the_clients_body_is_left_as_it_was() -> None:
    body = {"messages": MESSAGES, "session_id": "s", "vllm_xargs": {"continuum_tenant": "t"}}
    engine_body(body, TurnHints(program_id=ProgramId("p")))
    assert body == {"messages": MESSAGES, "session_id": "s", "vllm_xargs": {"continuum_tenant": "t"}}
