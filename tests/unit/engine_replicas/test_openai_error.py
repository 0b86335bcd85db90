"""Errors have OpenAI's shape and the platform's codes."""

from __future__ import annotations

import pytest

from engine_replicas.openai_error import error_body


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (400, "invalid_request_error", "invalid_request"),
        (404, "invalid_request_error", "model_not_found"),
        (422, "invalid_request_error", "invalid_request"),
        (429, "rate_limit_error", "overloaded"),
        (500, "server_error", "internal_error"),
        (503, "server_error", "engine_unavailable"),
        (504, "server_error", "turn_timeout"),
    ],
)
def test_a_status_has_its_type_and_code(status: int, kind: str, code: str) -> None:
    assert error_body(status, "no") == {"error": {"message": "no", "type": kind, "param": None, "code": code}}


def test_the_parameter_and_a_code_of_its_own_are_carried() -> None:
    error = error_body(400, "too long", param="messages", code="context_length_exceeded")["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
