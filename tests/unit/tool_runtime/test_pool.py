"""Which sandboxes are closed, and when."""

from __future__ import annotations

import pytest

from tool_runtime.config import MIB, SandboxLimits
from tool_runtime.pool import SandboxView, idle_too_long, over_limit, to_make_room
from tool_runtime.sandbox import WorkspaceUsage


def view(key: str, last_used_s: float, *, is_busy: bool = False) -> SandboxView[str]:
    return SandboxView(key=key, is_busy=is_busy, last_used_s=last_used_s)


def test_the_one_idle_longest_makes_room() -> None:
    assert to_make_room([view("a", 3), view("b", 1), view("c", 2)]) == "b"


def test_a_busy_one_never_makes_room() -> None:
    assert to_make_room([view("a", 3), view("b", 1, is_busy=True)]) == "a"
    assert to_make_room([view("b", 1, is_busy=True)]) is None
    assert to_make_room([]) is None


def test_those_idle_too_long_are_closed_and_busy_ones_are_not() -> None:
    views = [view("old", 0), view("busy", 0, is_busy=True), view("just", 5), view("young", 6)]
    assert idle_too_long(views, now_s=15, ttl_s=10) == ["old", "just"]


@pytest.mark.parametrize(
    ("usage", "told"),
    [
        (WorkspaceUsage(disk_bytes=MIB, entries=100), None),
        (WorkspaceUsage(disk_bytes=MIB + 1, entries=1), "more than 1 MiB"),
        (WorkspaceUsage(disk_bytes=0, entries=101), "more than 100 files"),
        (WorkspaceUsage(disk_bytes=0, entries=1, is_too_deep=True), "too deeply"),
    ],
)
def test_a_workspace_is_held_to_its_limits(usage: WorkspaceUsage, told: str | None) -> None:
    limits = SandboxLimits(workspace_bytes_max=MIB, workspace_files_max=100)
    found = over_limit(usage, limits)
    assert found is None if told is None else found is not None and told in found
