"""Errors of a turn in OpenAI's wire shape, with the platform's stable codes."""

from __future__ import annotations

from typing import Any

_CODES = {
    404: "model_not_found",
    413: "request_too_large",
    429: "overloaded",
    501: "not_implemented",
    503: "engine_unavailable",
    504: "turn_timeout",
}


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`; the code follows from the HTTP status where none is given."""
    is_callers = 400 <= status < 500
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if is_callers else "server_error"
    fallback = "invalid_request" if is_callers else "internal_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code or _CODES.get(status, fallback)}}
