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


def install_error_handlers(app: FastAPI) -> None:
    """Make `app` answer every error in OpenAI's shape."""
    app.add_exception_handler(PlatformError, _platform_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(Exception, _unexpected)


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
    return error_response(error)


async def _http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(RouteNotFound(f"no route {request.method} {request.url.path[:200]}"))
    if error.status_code == 405:
        response = error_response(MethodNotAllowed(f"{request.url.path[:200]} does not take {request.method}"))
        response.headers.update(error.headers or {})
        return response
    logger.warning("%s %s: %s", request.method, request.url.path, error.detail)
    return error_response(InvalidRequest(str(error.detail)) if error.status_code < 500 else UnexpectedError())


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"][1:])
    return error_response(InvalidRequest(f"{path}: {first['msg']}", param=path))


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    # The last stop before the client: the traceback goes to the log, not to the wire.
    logger.error("%s %s", request.method, request.url.path, exc_info=error)
    return error_response(UnexpectedError())
