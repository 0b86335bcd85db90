"""Every request has an id: the client's `X-Request-ID` where it is one, otherwise a new one. It is in the logs of what the request
causes, and in the answer."""

from __future__ import annotations

import re
import secrets
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.structured_logs import log_fields

HEADER = "x-request-id"
#: What goes into a log and back to the client as it came: short, and nothing that could be taken for more than an id.
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestIds:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _given(scope) or f"req_{secrets.token_hex(8)}"

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault(HEADER, request_id)
            await send(message)

        with log_fields(request_id=request_id):
            await self._app(scope, receive, answer)


def _given(scope: Any) -> str | None:
    given = Headers(scope=scope).get(HEADER, "")
    return given if _ID.fullmatch(given) else None
