"""Every way in which a request can fail, as one response in OpenAI's error shape."""

from __future__ import annotations

import logging
import math

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from agent_program.errors import InvalidRequest, PlatformError

logger = logging.getLogger(__name__)


class RouteNotFound(InvalidRequest):
    """No such route."""

    status, code = 404, "route_not_found"


class MethodNotAllowed(InvalidRequest):
    """The route does not take this method."""

    status, code = 405, "method_not_allowed"


class UnexpectedError(PlatformError):
    """Something went wrong inside the platform; its log has the details."""


class Refusals:
    """How many requests were answered with an error, by code. Codes are names of error classes, and bounded all the same."""

    _CODES_MAX = 64

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, code: str) -> None:
        """Count one."""
        name = code if code in self._counts or len(self._counts) < self._CODES_MAX else "other"
        self._counts[name] = self._counts.get(name, 0) + 1

    def by_code(self) -> dict[str, int]:
        """Code → requests."""
        return dict(self._counts)


def install_error_handlers(app: FastAPI, refusals: Refusals) -> None:
    """Make `app` answer every error in OpenAI's shape, and count it."""
    app.state.refusals = refusals
    app.add_exception_handler(PlatformError, _platform_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(Exception, _unexpected)


def _refuse(request: Request, error: PlatformError) -> JSONResponse:
    request.app.state.refusals.add(error.code)
    return error_response(error)


def error_response(error: PlatformError) -> JSONResponse:
    """The response that `error` is to a client."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def _platform_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, PlatformError)
    if error.status >= 500:
        logger.warning("%s %s: %s", request.method, request.url.path, error.message)
    return _refuse(request, error)


async def _http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return _refuse(request, RouteNotFound(f"no route {request.method} {request.url.path[:200]}"))
    if error.status_code == 405:
        response = _refuse(request, MethodNotAllowed(f"{request.url.path[:200]} does not take {request.method}"))
        response.headers.update(error.headers or {})
        return response
    logger.warning("%s %s: %s", request.method, request.url.path, error.detail)
    return _refuse(request, InvalidRequest(str(error.detail)) if error.status_code < 500 else UnexpectedError())


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"][1:])
    return _refuse(request, InvalidRequest(f"{path}: {first['msg']}", param=path))


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    # The last stop before the client: the traceback goes to the log, not to the wire.
    logger.error("%s %s", request.method, request.url.path, exc_info=error)
    return _refuse(request, UnexpectedError())
