"""Entity tags, so that whoever polls is sent a body only when there is something new."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response


def tagged_response(request: Request, content: Any) -> Response:
    """`content` as JSON with an `ETag`; 304 without a body where `If-None-Match` holds that tag."""
    body = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    # The answer depends on who asks, so no cache in between may keep it.
    headers = {"etag": tag, "cache-control": "private, no-cache"}
    if _holds(request.headers.get("if-none-match", ""), tag):
        return Response(status_code=304, headers=headers)
    return Response(body, media_type="application/json", headers=headers)


def _holds(if_none_match: str, tag: str) -> bool:
    """Weak comparison (RFC 9110, 13.1.2): what a proxy has marked weak is still the same content."""
    tags = {one.strip().removeprefix("W/") for one in if_none_match.split(",")}
    return tag in tags or "*" in tags
