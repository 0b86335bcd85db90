"""What can be wrong with moving a workspace's files in and out.

InvalidRequest
├── WorkspaceNotFound   404 workspace_not_found    the program has no files here
├── SnapshotNotFound    404 snapshot_not_found
├── UploadNotFound      404 upload_not_found       it was never begun, was finished, or was given up
├── WorkspaceBusy       409 workspace_busy         calls of the program are under way
├── WorkspaceTooLarge   413 workspace_too_large    more bytes or files than a workspace may hold
└── ArchiveRefused      422 archive_refused        not a tar, or one that asks for something it may not have
"""

from __future__ import annotations

from agent_program.errors import InvalidRequest


class WorkspaceNotFound(InvalidRequest):
    """The program has no workspace here."""

    status, code = 404, "workspace_not_found"


class SnapshotNotFound(InvalidRequest):
    """The program has no such snapshot."""

    status, code = 404, "snapshot_not_found"


class UploadNotFound(InvalidRequest):
    """There is no such upload; begin another one."""

    status, code = 404, "upload_not_found"


class WorkspaceBusy(InvalidRequest):
    """Tool calls of the program are under way; wait for them or cancel them."""

    status, code = 409, "workspace_busy"


class WorkspaceTooLarge(InvalidRequest):
    """This is more than a workspace may hold."""

    status, code = 413, "workspace_too_large"


class ArchiveRefused(InvalidRequest):
    """The archive cannot be unpacked into a workspace."""

    status, code = 422, "archive_refused"
