"""Which sandboxes to close, and when: pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tool_runtime.config import MIB, SandboxLimits
from tool_runtime.sandbox import WorkspaceUsage

K = TypeVar("K")


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxView(Generic[K]):
    """A live sandbox as the pool sees it."""

    key: K
    #: Something runs in it, or is about to.
    is_busy: bool
    #: Monotonic seconds at which it last ran something.
    last_used_s: float


def over_limit(usage: WorkspaceUsage, limits: SandboxLimits) -> str | None:
    """What a workspace has too much of, in words for the model; None if it is within its limits."""
    if usage.disk_bytes > limits.workspace_bytes_max:
        return f"the workspace holds more than {limits.workspace_bytes_max // MIB} MiB; delete files"
    if usage.entries > limits.workspace_files_max:
        return f"the workspace holds more than {limits.workspace_files_max} files; delete some"
    if usage.is_too_deep:
        return "the workspace's directories are nested too deeply; delete some"
    return None


def to_make_room(views: Iterable[SandboxView[K]]) -> K | None:
    """The sandbox to close so that another can start: the one idle for longest; None if all are busy."""
    idle = [view for view in views if not view.is_busy]
    return min(idle, key=lambda view: view.last_used_s).key if idle else None


def idle_too_long(views: Iterable[SandboxView[K]], *, now_s: float, ttl_s: float) -> list[K]:
    """The sandboxes that ran nothing for `ttl_s` or longer."""
    return [view.key for view in views if not view.is_busy and now_s - view.last_used_s >= ttl_s]
