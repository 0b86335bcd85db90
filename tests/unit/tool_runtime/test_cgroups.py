"""Cgroups for sandboxes: what is written where, and the reason wherever there can be none. On a directory that looks like one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tool_runtime.cgroups import NoCgroup, SandboxCgroup, delegated_parent

_FILES = ("memory.max", "memory.swap.max", "memory.oom.group", "pids.max", "cpu.max", "cgroup.procs", "cgroup.kill")


class FakeHierarchy:
    """Directories in which the kernel's files appear when one is made, and go with it."""

    def __init__(self, parent: Path, monkeypatch: pytest.MonkeyPatch, *, files: tuple[str, ...] = _FILES) -> None:
        self.parent = parent
        parent.mkdir(parents=True)
        (parent / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
        (parent / "cgroup.subtree_control").write_text("")
        self.made: list[Path] = []
        make, remove = Path.mkdir, Path.rmdir

        def mkdir(path: Path, *arguments: object, **named: object) -> None:
            make(path, *arguments, **named)  # type: ignore[arg-type]
            if path.parent == parent:
                self.made.append(path)
                for name in files:
                    (path / name).touch()

        def rmdir(path: Path) -> None:
            for name in files:
                (path / name).unlink(missing_ok=True)
            remove(path)

        monkeypatch.setattr(Path, "mkdir", mkdir)
        monkeypatch.setattr(Path, "rmdir", rmdir)


@pytest.fixture
def hierarchy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHierarchy:
    return FakeHierarchy(tmp_path / "delegated", monkeypatch)


def test_the_limits_are_written_before_anything_enters(hierarchy: FakeHierarchy) -> None:
    cgroup = SandboxCgroup(hierarchy.parent, "sandbox-1")
    cgroup.make(memory_bytes_max=2**30, processes_max=64, cpus_max=1.5)
    written = {name: (hierarchy.parent / "sandbox-1" / name).read_text() for name in _FILES}
    assert written == {
        "memory.max": str(2**30),
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "pids.max": "64",
        "cpu.max": "150000 100000",
        "cgroup.procs": "",
        "cgroup.kill": "",
    }


def test_a_process_enters_by_a_descriptor_and_all_are_killed_by_a_file(hierarchy: FakeHierarchy) -> None:
    cgroup = SandboxCgroup(hierarchy.parent, "sandbox-1")
    cgroup.make(memory_bytes_max=2**30, processes_max=64, cpus_max=None)
    fd = cgroup.open_procs()
    os.write(fd, b"0")
    os.close(fd)
    cgroup.kill()
    directory = hierarchy.parent / "sandbox-1"
    assert [(directory / name).read_text() for name in ("cgroup.procs", "cgroup.kill", "cpu.max")] == ["0", "1", ""]
    cgroup.remove()
    assert not directory.exists()


def test_what_the_kernel_killed_for_memory_is_told(hierarchy: FakeHierarchy) -> None:
    cgroup = SandboxCgroup(hierarchy.parent, "sandbox-1")
    cgroup.make(memory_bytes_max=256 * 2**20, processes_max=64, cpus_max=None)
    events = hierarchy.parent / "sandbox-1" / "memory.events"
    events.write_text("low 0\nhigh 0\nmax 12\noom 1\noom_kill 0\noom_group_kill 0\n")
    assert cgroup.excess() == ""
    events.write_text("low 0\nhigh 0\nmax 12\noom 1\noom_kill 3\noom_group_kill 1\n")
    assert cgroup.excess() == "it used more than 256 MiB of memory"


def test_a_delegated_directory_hands_its_controllers_down_and_keeps_nothing_of_the_probe(
    hierarchy: FakeHierarchy,
) -> None:
    assert delegated_parent(hierarchy.parent) == hierarchy.parent
    assert (hierarchy.parent / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    assert len(hierarchy.made) == 1
    assert not hierarchy.made[0].exists()


def test_controllers_that_are_handed_down_already_are_left_alone(hierarchy: FakeHierarchy) -> None:
    (hierarchy.parent / "cgroup.subtree_control").write_text("cpu io memory pids\n")
    delegated_parent(hierarchy.parent)
    assert (hierarchy.parent / "cgroup.subtree_control").read_text() == "cpu io memory pids\n"


@pytest.mark.parametrize(
    ("controllers", "missing"), [("", "memory, pids"), ("cpu memory", "pids"), ("hugetlb", "memory")]
)
def test_without_its_controllers_there_is_none(hierarchy: FakeHierarchy, controllers: str, missing: str) -> None:
    (hierarchy.parent / "cgroup.controllers").write_text(controllers)
    with pytest.raises(NoCgroup, match=f"no controller for .*{missing}"):
        delegated_parent(hierarchy.parent)
    assert not hierarchy.made


def test_a_directory_that_is_no_cgroup_is_none(tmp_path: Path) -> None:
    with pytest.raises(NoCgroup, match="no cgroup of version 2"):
        delegated_parent(tmp_path)


def test_a_file_that_is_missing_is_never_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an ordinary directory writing would work, and limit nothing."""
    bare = FakeHierarchy(tmp_path / "bare", monkeypatch, files=("memory.max",))
    with pytest.raises(NoCgroup, match="no cgroup can be made"):
        delegated_parent(bare.parent)
    assert list(bare.parent.glob("probe*")) == []


def test_the_cgroup_of_this_machine_is_used_or_the_reason_told() -> None:
    try:
        parent = delegated_parent(None)
    except NoCgroup as exc:
        pytest.skip(f"no cgroup is delegated here: {exc}")
    cgroup = SandboxCgroup(parent, f"test-{os.getpid()}")
    cgroup.make(memory_bytes_max=2**26, processes_max=8, cpus_max=1.0)
    cgroup.remove()
    assert not (parent / f"test-{os.getpid()}").exists()
