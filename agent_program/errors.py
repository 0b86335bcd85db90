"""Every error that crosses a package border, each with the HTTP status and stable code that it maps to.

    PlatformError
    ├── InvalidRequest          400 invalid_request       the caller's input is wrong
    │   ├── ModelNotFound       404 model_not_found
    │   ├── ProgramNotFound     404 program_not_found
    │   ├── ToolNotFound        400 tool_not_found
    │   ├── IllegalTransition   409 illegal_state         the program's state does not allow it
    │   └── RequestTooLarge     413 request_too_large
    ├── Unauthenticated         401 invalid_api_key       no key, or none that is known
    ├── Forbidden               403 forbidden             whoever it is may not do this
    ├── Overloaded              429 overloaded            try again after `retry_after_s`
    ├── Unavailable             503 unavailable           a part we need is away; try again after `retry_after_s`
    │   ├── StoreUnavailable    503 store_unavailable
    │   └── EngineUnavailable   503 engine_unavailable
    ├── TurnFailed              502 turn_failed           the engine answered with an error
    └── SandboxUnavailable      503 sandbox_unavailable   no isolation that holds; tools refuse

The class docstring is the default message. `retry_after_s` is None where waiting does not help.
"""

from __future__ import annotations

from typing import Any


class PlatformError(Exception):
    """Something went wrong inside the platform."""

    status: int = 500
    code: str = "internal_error"
    kind: str = "server_error"

    def __init__(self, message: str | None = None, *, param: str | None = None, retry_after_s: float | None = None):
        self.message = message or (type(self).__doc__ or "").strip()
        self.param = param
        self.retry_after_s = retry_after_s
        super().__init__(self.message)

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions cross process borders (Ray pickles them); keyword-only arguments need this.
        return _rebuild, (type(self), self.message, self.param, self.retry_after_s)

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's wire shape."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def _rebuild(cls: type[PlatformError], message: str, param: str | None, retry_after_s: float | None) -> PlatformError:
    return cls(message, param=param, retry_after_s=retry_after_s)


class InvalidRequest(PlatformError):
    """The request is not valid."""

    status, code, kind = 400, "invalid_request", "invalid_request_error"


class ModelNotFound(InvalidRequest):
    """No such model is served."""

    status, code = 404, "model_not_found"


class ProgramNotFound(InvalidRequest):
    """No such program."""

    status, code = 404, "program_not_found"


class ToolNotFound(InvalidRequest):
    """No such tool."""

    status, code = 400, "tool_not_found"


class IllegalTransition(InvalidRequest):
    """The program's state does not allow this."""

    status, code = 409, "illegal_state"


class RequestTooLarge(InvalidRequest):
    """The request body is too large."""

    status, code = 413, "request_too_large"


class Unauthenticated(PlatformError):
    """An API key is needed."""

    status, code, kind = 401, "invalid_api_key", "authentication_error"


class Forbidden(PlatformError):
    """This is not allowed."""

    status, code, kind = 403, "forbidden", "permission_error"


class Overloaded(PlatformError):
    """The platform is at its limit; try again later."""

    status, code, kind = 429, "overloaded", "rate_limit_error"


class Unavailable(PlatformError):
    """A part that is needed is away; try again later."""

    status, code = 503, "unavailable"


class StoreUnavailable(Unavailable):
    """The store does not answer; try again later."""

    code = "store_unavailable"


class EngineUnavailable(Unavailable):
    """No engine replica can take the turn now; try again later."""

    code = "engine_unavailable"


class TurnFailed(PlatformError):
    """The engine answered the turn with an error."""

    status, code = 502, "turn_failed"


class SandboxUnavailable(PlatformError):
    """No sandbox that holds is available on this machine; tools refuse to run."""

    status, code = 503, "sandbox_unavailable"
