"""The flags that hold, as properties of the plan: what a careless edit would break without a test that runs it."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from tool_runtime.bubblewrap import Bubblewrap, python_prefix, rlimits
from tool_runtime.config import MIB, SandboxLimits
from tool_runtime.sandbox import WORKSPACE_INSIDE, KillScope, SandboxSpec, SpawnPlan
from tool_runtime.seccomp import UnsupportedArchitecture

SECRET_ID = "tenant-and-program-digest"
LIMITS = SandboxLimits(tmp_bytes_max=5 * MIB, processes_max=50)
SPEC = SandboxSpec(workspace=Path("/state/workspaces", SECRET_ID), uid=200_001, limits=LIMITS)

#: Option → how many words follow it; those with a destination have it last.
WITH_DESTINATION = {
    "--ro-bind": 2,
    "--ro-bind-try": 2,
    "--bind": 2,
    "--symlink": 2,
    "--file": 2,
    "--proc": 1,
    "--dev": 1,
}
WITH_DESTINATION |= {"--tmpfs": 1, "--dir": 1, "--remount-ro": 1}


@pytest.fixture(scope="module")
def plan() -> SpawnPlan:
    return Bubblewrap(Path("/opt/bwrap"), Path("/usr/bin/python3"), machine="x86_64").plan(SPEC)


def destinations(plan: SpawnPlan) -> list[tuple[str, str]]:
    """(option, destination) in order."""
    words = plan.extra_args
    return [
        (word, words[index + WITH_DESTINATION[word]]) for index, word in enumerate(words) if word in WITH_DESTINATION
    ]


def test_nothing_is_mounted_below_a_place_that_a_program_can_write(plan: SpawnPlan) -> None:
    written: list[PurePosixPath] = []
    for option, destination in destinations(plan):
        assert not any(place in PurePosixPath(destination).parents for place in written), (option, destination)
        if option == "--bind" or (option == "--tmpfs" and destination != "/dev/shm"):
            written.append(PurePosixPath(destination))
    assert written == [PurePosixPath("/tmp"), PurePosixPath(WORKSPACE_INSIDE)]


def test_the_workspace_is_the_last_mount_and_the_root_is_closed_after_it(plan: SpawnPlan) -> None:
    assert destinations(plan)[-2:] == [("--bind", WORKSPACE_INSIDE), ("--remount-ro", "/")]


def test_only_the_workspace_of_the_host_is_writable(plan: SpawnPlan) -> None:
    words = plan.extra_args
    bound = [words[index + 1] for index, word in enumerate(words) if word in ("--bind", "--bind-try", "--dev-bind")]
    assert bound == [str(SPEC.workspace)]


def test_kernel_settings_are_read_only_and_memory_filesystems_bounded(plan: SpawnPlan) -> None:
    words = " ".join(plan.extra_args)
    assert "--proc /proc --ro-bind /proc/sys /proc/sys" in words
    assert f"--size {5 * MIB} --tmpfs /dev/shm --remount-ro /dev" in words
    assert f"--size {5 * MIB} --tmpfs /tmp" in words
    assert words.count("--tmpfs") == words.count("--size")


@pytest.mark.parametrize(
    "flag",
    [
        *("--unshare-user", "--unshare-all", "--disable-userns", "--new-session", "--die-with-parent", "--clearenv"),
        *("--uid 65534", "--gid 65534", "--seccomp {fd:seccomp}"),
    ],
)
def test_it_is_closed_in_every_way(plan: SpawnPlan, flag: str) -> None:
    assert flag in " ".join(plan.extra_args)


def test_no_option_that_opens_it_is_there(plan: SpawnPlan) -> None:
    opening = {
        "--share-net",
        "--cap-add",
        "--as-pid-1",
        "--unshare-user-try",
        "--userns",
        "--dev-bind",
        "--level-prefix",
    }
    assert not opening & set(plan.extra_args)


def test_bwraps_own_environment_is_empty_and_its_user_is_not_root(plan: SpawnPlan) -> None:
    assert dict(plan.environment) == {}
    assert plan.uid == 200_001
    assert plan.kill_scope is KillScope.NAMESPACE


def test_what_process_1_shows_tells_nothing_of_the_program_or_the_host(plan: SpawnPlan) -> None:
    shown = " ".join(plan.argv)
    assert SECRET_ID not in shown
    assert "/opt" not in shown
    assert "/state" not in shown


def test_the_users_inside_are_made_up(plan: SpawnPlan) -> None:
    passwd = plan.blobs["etc-passwd"].decode()
    assert [line.split(":")[0] for line in passwd.splitlines()] == ["root", "sandbox"]
    assert not {"/etc", "/etc/passwd", "/etc/shadow", "/etc/resolv.conf"} & set(plan.extra_args) - {
        "/etc",
        "/etc/passwd",
    }


def test_every_descriptor_that_is_named_has_its_content(plan: SpawnPlan) -> None:
    named = {word[4:-1] for word in (*plan.argv, *plan.extra_args) if word.startswith("{fd:") and word != "{fd:args}"}
    assert named - {"control"} == set(plan.blobs)


def test_limits_reach_the_agent() -> None:
    assert "NPROC=50" in rlimits(LIMITS)
    assert "CORE=0" in rlimits(LIMITS)
    assert "AS=" not in rlimits(LIMITS)
    assert f"AS={64 * MIB}" in rlimits(SandboxLimits(process_address_space_bytes_max=64 * MIB))


def test_a_python_outside_usr_is_shown_read_only() -> None:
    elsewhere = Bubblewrap(Path("/b"), Path("/opt/py/bin/python3.11"), machine="x86_64").plan(SPEC)
    assert "--ro-bind /opt/py /opt/py" in " ".join(elsewhere.extra_args)
    assert python_prefix(Path("/usr/local/bin/python3")) is None


def test_a_processor_without_a_filter_has_no_sandbox() -> None:
    with pytest.raises(UnsupportedArchitecture):
        Bubblewrap(Path("/b"), Path("/usr/bin/python3"), machine="riscv64")
