"""Workspaces: whose they are, what they hold, and that whatever a program left in one can be counted and removed."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_program.errors import SandboxUnavailable
from agent_program.ids import ProgramId, TenantId
from support.tools import state_directory
from tool_runtime.trees import delete_tree, usage_of
from tool_runtime.workspaces import Workspaces

TENANT, PROGRAM = TenantId("t"), ProgramId("p")
IS_ROOT = os.geteuid() == 0


@pytest.fixture
def state() -> Iterator[Path]:
    with state_directory() as path:
        yield path


def make(state: Path) -> Workspaces:
    return Workspaces(state, uid_first=200_000, uid_count=1000)


def test_a_workspace_belongs_to_its_sandboxs_user_alone(state: Path) -> None:
    workspaces = make(state)
    path = workspaces.ensure(TENANT, PROGRAM)
    assert path.stat().st_mode & 0o7777 == 0o700
    assert path.stat().st_uid == (workspaces.uid(TENANT, PROGRAM) if IS_ROOT else os.geteuid())


def test_programs_and_tenants_have_workspaces_of_their_own(state: Path) -> None:
    workspaces = make(state)
    names = {
        workspaces.path(TenantId(tenant), ProgramId(program)).name
        for tenant in ("a", "b", "a\0b")
        for program in ("a", "b", "../x", "b/../c", "x" * 256)
    }
    assert len(names) == 15
    assert all(name.isalnum() for name in names)


def test_no_name_tells_who_it_is(state: Path) -> None:
    assert "secret" not in str(make(state).path(TenantId("secret-tenant"), ProgramId("secret-program")))


def test_a_workspace_keeps_its_files_and_its_owner_when_settings_change(state: Path) -> None:
    before = make(state)
    (before.ensure(TENANT, PROGRAM) / "file").write_text("kept")
    after = Workspaces(state, uid_first=300_000, uid_count=10)
    assert after.uid(TENANT, PROGRAM) == before.uid(TENANT, PROGRAM)
    assert (after.ensure(TENANT, PROGRAM) / "file").read_text() == "kept"


@pytest.mark.skipif(not IS_ROOT, reason="only root's sandboxes run as other users")
def test_root_never_runs_a_sandbox_as_root(state: Path) -> None:
    workspaces = make(state)
    workspaces.path(TENANT, PROGRAM).mkdir()  # somebody made it as root
    assert workspaces.uid(TENANT, PROGRAM) in range(200_000, 201_000)


def test_a_state_directory_of_someone_else_is_refused(state: Path) -> None:
    (state / "elsewhere").mkdir()
    (state / "state").symlink_to(state / "elsewhere")
    with pytest.raises(SandboxUnavailable, match="not a directory of the platform's own user"):
        make(state / "state")


@pytest.mark.skipif(not IS_ROOT, reason="others' sandboxes run as themselves")
def test_a_state_directory_that_sandboxes_cannot_reach_is_refused_with_the_place(state: Path) -> None:
    (state / "closed").mkdir(mode=0o700)
    with pytest.raises(SandboxUnavailable, match=f"cannot pass {state}/closed"):
        make(state / "closed" / "tools")


def test_deleting_removes_one_program_and_says_if_there_was_none(state: Path) -> None:
    workspaces = make(state)
    other = workspaces.ensure(TENANT, ProgramId("other"))
    (workspaces.ensure(TENANT, PROGRAM) / "file").touch()
    assert workspaces.delete(TENANT, PROGRAM)
    assert not workspaces.delete(TENANT, PROGRAM)
    assert not workspaces.path(TENANT, PROGRAM).exists()
    assert other.exists()
    assert list((state / "trash").iterdir()) == []


def hostile_tree(root: Path) -> None:
    """What a program could leave to spite whoever cleans up."""
    (root / "new\nline").mkdir()
    Path(os.fsdecode(os.fsencode(root) + b"/\xff\xfe")).touch()
    (root / "-rf").touch()
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as local:
        local.bind(str(root / "socket"))
    (root / "link").symlink_to("/etc")
    (root / "dangling").symlink_to("nowhere")
    (root / "loop").symlink_to("loop")
    with open(root / "sparse", "wb") as sparse:
        sparse.truncate(2**40)
    closed = root / "closed"
    (closed / "inner").mkdir(parents=True)
    (closed / "inner" / "file").touch()
    (closed / "inner").chmod(0)
    closed.chmod(0)


def deep_tree(root: Path, depth: int) -> None:
    here = os.open(root, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


def test_whatever_a_program_left_is_removed_and_nothing_else(state: Path) -> None:
    outside = state / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    root = state / "tree"
    root.mkdir()
    hostile_tree(root)
    (root / "out").symlink_to(outside)
    delete_tree(root)
    assert not root.exists()
    assert (outside / "kept").exists()


def test_a_tree_four_thousand_deep_is_removed(state: Path) -> None:
    root = state / "tree"
    root.mkdir()
    deep_tree(root, 4000)
    delete_tree(root)
    assert not root.exists()


def test_usage_counts_blocks_and_names_and_follows_nothing(state: Path) -> None:
    workspaces = make(state)
    root = workspaces.ensure(TENANT, PROGRAM)
    (root / "a").write_bytes(b"x" * 100_000)
    (root / "sub").mkdir()
    (root / "sub" / "out").symlink_to("/usr")
    with open(root / "sparse", "wb") as sparse:
        sparse.truncate(2**40)
    usage = usage_of(root, bytes_max=2**30, files_max=1000)
    assert usage.entries == 4
    assert 100_000 <= usage.disk_bytes < 200_000


def test_counting_stops_at_the_limit(state: Path) -> None:
    workspaces = make(state)
    root = workspaces.ensure(TENANT, PROGRAM)
    for i in range(50):
        (root / str(i)).touch()
    assert usage_of(root, bytes_max=2**30, files_max=10).entries == 11
    deep_tree(root, 300)
    assert usage_of(root, bytes_max=2**30, files_max=10_000).is_too_deep


def test_a_parked_workspace_becomes_the_programs_with_its_owner(state: Path) -> None:
    workspaces = make(state)
    parked, uid = workspaces.park()
    assert parked.stat().st_uid == (os.geteuid() if uid is None else uid)
    workspaces.adopt(parked, TENANT, PROGRAM)
    assert not parked.exists()
    assert workspaces.uid(TENANT, PROGRAM) == uid
    assert workspaces.ensure(TENANT, PROGRAM).stat().st_mode & 0o7777 == 0o700


def test_parked_workspaces_of_living_actors_are_left_alone_and_of_dead_ones_removed(state: Path) -> None:
    alive, cleaner = make(state), make(state)
    kept, _ = alive.park()
    left = alive.park()[0].parent / "left-by-a-dead-actor"
    left.mkdir()
    own, _ = cleaner.park()
    assert cleaner.clean(ttl_s=None, now_wall_s=0) == 1
    assert (kept.exists(), own.exists(), left.exists()) == (True, True, False)
    alive.discard(kept)
    assert not kept.exists()


def test_workspaces_in_which_nothing_happened_for_long_are_removed(state: Path) -> None:
    workspaces = make(state)
    path = workspaces.ensure(TENANT, PROGRAM)
    (path / "file").touch()
    changed_s = path.stat().st_ctime
    # A program can set the times of its own directory as it likes; the time of that change is the kernel's.
    os.utime(path, (2**33, 2**33))
    assert workspaces.clean(ttl_s=60, now_wall_s=changed_s + 30) == 0
    assert workspaces.clean(ttl_s=None, now_wall_s=changed_s + 1e9) == 0
    assert workspaces.clean(ttl_s=60, now_wall_s=path.stat().st_ctime + 61) == 1
    assert not path.exists()


def test_deletions_that_were_broken_off_are_finished(state: Path) -> None:
    workspaces = make(state)
    (state / "trash" / "half").mkdir()
    (state / "trash" / "half" / "file").touch()
    now_s = (state / "trash" / "half").stat().st_ctime
    assert workspaces.clean(ttl_s=None, now_wall_s=now_s + 1) == 0
    assert workspaces.clean(ttl_s=None, now_wall_s=now_s + 1000) == 1
    assert list((state / "trash").iterdir()) == []
