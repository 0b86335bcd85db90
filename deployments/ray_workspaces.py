"""`WorkspaceClient` over the handle of the tool deployment; the program's id goes along, so that its own actor answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from ray.serve.handle import DeploymentHandle

from agent_program.errors import Unavailable
from agent_program.ids import ProgramId, TenantId
from deployments.ray_errors import translated_ray_errors
from tool_runtime.workspace_content import WorkspaceContent

_WHAT = "the tool actor"


class RayWorkspaceClient:
    """Calls the tool actor that a program's tools run on."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    @asynccontextmanager
    async def read(self, program_id: ProgramId, tenant_id: TenantId) -> AsyncIterator[AsyncIterator[bytes]]:
        handle = self._handle.options(session_id=program_id, method_name="export_workspace", stream=True)
        response = handle.remote(program_id, tenant_id=tenant_id)

        async def pieces() -> AsyncIterator[bytes]:
            with translated_ray_errors(lost=Unavailable, what=_WHAT):
                async for piece in response:
                    yield piece

        try:
            yield pieces()
        finally:
            response.cancel()

    async def begin(self, program_id: ProgramId, tenant_id: TenantId) -> str:
        return str(await self._call("begin_import", program_id, tenant_id))

    async def append(self, program_id: ProgramId, tenant_id: TenantId, upload_id: str, piece: bytes) -> None:
        await self._call("append_import", program_id, tenant_id, upload_id, piece)

    async def commit(self, program_id: ProgramId, tenant_id: TenantId, upload_id: str) -> WorkspaceContent:
        content: WorkspaceContent = await self._call("commit_import", program_id, tenant_id, upload_id)
        return content

    async def snapshot(self, program_id: ProgramId, tenant_id: TenantId) -> str:
        return str(await self._call("snapshot_workspace", program_id, tenant_id))

    async def restore(self, program_id: ProgramId, tenant_id: TenantId, snapshot_id: str) -> WorkspaceContent:
        content: WorkspaceContent = await self._call("restore_workspace", program_id, tenant_id, snapshot_id)
        return content

    async def _call(self, method: str, program_id: ProgramId, tenant_id: TenantId, *arguments: Any) -> Any:
        response = self._handle.options(session_id=program_id, method_name=method).remote(
            program_id, *arguments, tenant_id=tenant_id
        )
        with translated_ray_errors(lost=Unavailable, what=_WHAT):
            return await response
