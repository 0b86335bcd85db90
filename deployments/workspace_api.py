"""A program's files by REST: read them as a tar, replace them by one, keep them as they are, put them back.

    GET  /v1/programs/{id}/workspace              an uncompressed tar, as it comes
    PUT  /v1/programs/{id}/workspace              a tar, gzip-compressed or not: all of it or nothing
    POST /v1/programs/{id}/workspace/snapshots    keep the files under an id
    POST /v1/programs/{id}/workspace/restore      put those of a snapshot back

An archive passes through in pieces and is never whole in this process. Files may be put there before their program is submitted,
under the id that it will have.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from agent_program.errors import InvalidRequest, PlatformError, RequestTooLarge
from agent_program.ids import ProgramId, TenantId
from tool_runtime.workspace_content import WorkspaceContent

logger = logging.getLogger(__name__)

#: What is sent to a tool actor at once.
PIECE_BYTES = 1024 * 1024


class WorkspaceClient(Protocol):
    """Workspaces, where the programs' tools run. Every method raises the errors of `tool_runtime/workspace_errors.py`."""

    def read(self, program_id: ProgramId, tenant_id: TenantId) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """The pieces of a tar; leaving the context ends the reading."""
        ...

    async def begin(self, program_id: ProgramId, tenant_id: TenantId) -> str:
        """Begin to replace a workspace; returns an upload's id."""
        ...

    async def append(self, program_id: ProgramId, tenant_id: TenantId, upload_id: str, piece: bytes) -> None:
        """Add to an upload."""
        ...

    async def commit(self, program_id: ProgramId, tenant_id: TenantId, upload_id: str) -> WorkspaceContent:
        """Make the upload the workspace. One that is not committed is forgotten after a minute."""
        ...

    async def snapshot(self, program_id: ProgramId, tenant_id: TenantId) -> str:
        """Keep the workspace as it is; returns a snapshot's id."""
        ...

    async def restore(self, program_id: ProgramId, tenant_id: TenantId, snapshot_id: str) -> WorkspaceContent:
        """Put a snapshot back."""
        ...


class WorkspaceApi:
    """Answers for workspaces of programs that the caller may see."""

    def __init__(self, workspaces: WorkspaceClient, *, archive_bytes_max: int, piece_timeout_s: float) -> None:
        """`piece_timeout_s`: seconds for which an upload may be silent."""
        self._workspaces = workspaces
        self._archive_bytes_max = archive_bytes_max
        self._piece_timeout_s = piece_timeout_s

    async def read(self, program_id: ProgramId, tenant_id: TenantId) -> Response:
        """The whole workspace."""
        stack = AsyncExitStack()
        try:
            pieces = await stack.enter_async_context(self._workspaces.read(program_id, tenant_id))
            # What is refused is refused before the first piece: then it can still be said.
            first = await anext(pieces, b"")
        except BaseException:
            await stack.aclose()
            raise
        headers = {"content-disposition": f'attachment; filename="{program_id}.tar"', "cache-control": "no-store"}
        return StreamingResponse(_passed(stack, first, pieces), media_type="application/x-tar", headers=headers)

    async def replace(self, request: Request, program_id: ProgramId, tenant_id: TenantId) -> Response:
        """The workspace becomes what the request's body holds."""
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._archive_bytes_max:
            raise self._too_large()
        upload_id = await self._workspaces.begin(program_id, tenant_id)
        async for piece in self._pieces(request):
            await self._workspaces.append(program_id, tenant_id, upload_id, piece)
        content = await self._workspaces.commit(program_id, tenant_id, upload_id)
        return JSONResponse({"object": "workspace", "program_id": program_id, **asdict(content)})

    async def snapshot(self, program_id: ProgramId, tenant_id: TenantId) -> Response:
        """Keep the workspace as it is."""
        snapshot_id = await self._workspaces.snapshot(program_id, tenant_id)
        return JSONResponse(
            {"object": "workspace.snapshot", "id": snapshot_id, "program_id": program_id}, status_code=201
        )

    async def restore(self, body: Any, program_id: ProgramId, tenant_id: TenantId) -> Response:
        """Put a snapshot back."""
        snapshot_id = body.get("snapshot_id") if isinstance(body, dict) else None
        if not isinstance(snapshot_id, str) or not 0 < len(snapshot_id) <= 64 or set(body) != {"snapshot_id"}:
            raise InvalidRequest("the body must be an object with a snapshot_id and nothing else", param="snapshot_id")
        content = await self._workspaces.restore(program_id, tenant_id, snapshot_id)
        return JSONResponse({"object": "workspace", "program_id": program_id, **asdict(content)})

    async def _pieces(self, request: Request) -> AsyncIterator[bytes]:
        """The body in pieces of at most `PIECE_BYTES`; the sender may be slow, not silent."""
        total, stream = 0, request.stream()
        while True:
            try:
                async with asyncio.timeout(self._piece_timeout_s):
                    part = await anext(stream, None)
            except TimeoutError:
                raise InvalidRequest(f"nothing of the archive came for {self._piece_timeout_s:g} s") from None
            except ClientDisconnect:
                raise InvalidRequest("the client went away before its archive was complete") from None
            if part is None:
                return
            total += len(part)
            if total > self._archive_bytes_max:
                raise self._too_large()
            for start in range(0, len(part), PIECE_BYTES):
                yield part[start : start + PIECE_BYTES]

    def _too_large(self) -> RequestTooLarge:
        return RequestTooLarge(f"the archive is larger than {self._archive_bytes_max} bytes")


async def _passed(stack: AsyncExitStack, first: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async with stack:
        yield first
        try:
            async for piece in pieces:
                yield piece
        except PlatformError as error:
            # The response has begun: breaking it off is the only way left to say that it is not whole.
            logger.warning("a workspace was not read to its end: %s", error)
            raise
