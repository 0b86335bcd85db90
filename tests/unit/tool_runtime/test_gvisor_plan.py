"""What gVisor is asked for, as properties of the specification; and that without its program nothing runs."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from agent_program.errors import SandboxUnavailable
from support.tools import state_directory
from tool_runtime import backends
from tool_runtime.bubblewrap import find_python
from tool_runtime.config import MIB, SandboxBackend, SandboxLimits, ToolRuntimeSettings
from tool_runtime.gvisor import GVisor, make_bundle
from tool_runtime.launcher_client import LauncherClient
from tool_runtime.sandbox import WORKSPACE_INSIDE, KillScope, SandboxSpec, SpawnPlan
from tool_runtime.workspaces import Workspaces

SECRET_ID = "tenant-and-program-digest"
PACKAGE = Path(__file__).parents[3] / "tool_runtime" / "inside"
SPEC = SandboxSpec(
    workspace=Path("/state/workspaces", SECRET_ID), uid=200_001, limits=SandboxLimits(tmp_bytes_max=5 * MIB)
)


@pytest.fixture
def state() -> Iterator[Path]:
    with state_directory() as path:
        yield path


@pytest.fixture
def bundle(state: Path) -> Path:
    path = state / "bundle"
    path.mkdir()
    make_bundle(path, find_python(), PACKAGE)
    return path


@pytest.fixture
def plan(state: Path, bundle: Path) -> SpawnPlan:
    return GVisor(Path("/opt/runsc"), find_python(), bundle, state).plan(SPEC)


@pytest.fixture
def oci(plan: SpawnPlan) -> dict[str, Any]:
    return dict(json.loads(plan.own_blobs["config"]))


def test_programs_have_no_network_no_sockets_of_the_host_and_no_privilege(plan: SpawnPlan, oci: dict[str, Any]) -> None:
    assert {"--network=none", "--host-uds=none", "--host-fifo=none"} <= set(plan.argv)
    process = oci["process"]
    assert process["user"]["uid"] == SPEC.uid != 0
    assert process["noNewPrivileges"]
    assert not any(process["capabilities"].values())
    assert {one["type"] for one in oci["linux"]["namespaces"]} >= {"pid", "ipc", "uts", "mount", "network"}


def test_only_the_workspace_of_the_host_is_writable_and_it_comes_last(oci: dict[str, Any]) -> None:
    assert oci["root"]["readonly"]
    writable = [one for one in oci["mounts"] if one["type"] == "bind" and "ro" not in one["options"]]
    assert writable == [oci["mounts"][-1]]
    assert (writable[0]["source"], writable[0]["destination"]) == (str(SPEC.workspace), WORKSPACE_INSIDE)
    for one in oci["mounts"]:
        assert PurePosixPath(WORKSPACE_INSIDE) not in PurePosixPath(one["destination"]).parents


def test_memory_filesystems_have_their_size(oci: dict[str, Any]) -> None:
    sizes = {one["destination"]: one["options"] for one in oci["mounts"] if one["type"] == "tmpfs"}
    assert set(sizes) == {"/tmp", "/dev/shm"}
    assert all(f"size={5 * MIB}" in options for options in sizes.values())


def test_nothing_of_the_program_shows_in_the_process_list_or_in_the_environment(plan: SpawnPlan) -> None:
    assert SECRET_ID not in " ".join(plan.argv)
    assert set(plan.environment) == {"PATH"}


def test_every_mount_has_its_place_in_the_root_which_cannot_be_written(bundle: Path, oci: dict[str, Any]) -> None:
    given_by_runsc = {"/dev/shm"}
    for one in oci["mounts"]:
        if one["destination"] not in given_by_runsc:
            place = bundle / "rootfs" / one["destination"].lstrip("/")
            assert place.exists() or place.parent.is_symlink(), one["destination"]
            if one["type"] == "bind" and one["source"] != str(SPEC.workspace):
                assert place.is_dir() == Path(one["source"]).is_dir(), one["destination"]
    inside = bundle / "rootfs" / ".agent" / "tool_runtime" / "inside"
    assert {path.name for path in inside.iterdir()} == {path.name for path in PACKAGE.glob("*.py")}


def test_the_bundle_is_the_same_for_all_and_each_has_its_own_specification(state: Path, bundle: Path) -> None:
    gvisor = GVisor(Path("/opt/runsc"), find_python(), bundle, state)
    one, other = gvisor.plan(SPEC), gvisor.plan(SPEC)
    assert one.argv[-1] != other.argv[-1]
    assert os.readlink(bundle / "config.json") == "/proc/self/fd/9"
    make_bundle(bundle, find_python(), PACKAGE)  # an actor that starts later makes it again


def test_what_runsc_gets_to_read_is_the_specification_and_the_socket(state: Path, bundle: Path) -> None:
    """With a program in its place that reads what it was given, as runsc would."""
    reader = state / "runsc"
    reader.write_text(
        '#!/bin/bash\nfor word in "$@"; do case $word in --bundle=*) cat "${word#*=}/config.json";; esac; done\n'
    )
    reader.chmod(0o755)
    plan = GVisor(reader, find_python(), bundle, state).plan(SPEC)
    config = os.memfd_create("config", 0)
    os.write(config, plan.own_blobs["config"])
    os.lseek(config, 0, os.SEEK_SET)
    words = [word.replace("{fd:config}", str(config)).replace("{fd:control}", "7") for word in plan.argv]
    ran = subprocess.run(words, executable=plan.executable, pass_fds=[config], capture_output=True, check=True)
    os.close(config)
    assert json.loads(ran.stdout) == json.loads(plan.own_blobs["config"])


def test_the_agent_may_signal_all_that_it_sees_and_the_launcher_ends_what_it_started(
    plan: SpawnPlan, oci: dict[str, Any]
) -> None:
    assert plan.kill_scope is KillScope.DOMAIN
    assert KillScope.NAMESPACE.value in oci["process"]["args"]
    assert any("--pass-fd={fd:control}:3" in word for word in plan.argv)
    assert "3" in oci["process"]["args"]


@pytest.mark.parametrize("program", ["/nonexistent/runsc", "/bin/false"])
async def test_without_a_runsc_that_works_tools_refuse_and_say_why(state: Path, program: str) -> None:
    settings = ToolRuntimeSettings(
        state_dir=state, sandbox=SandboxBackend.GVISOR, runsc_path=Path(program), sandbox_start_timeout_s=20
    )
    launcher = LauncherClient()
    try:
        with pytest.raises(SandboxUnavailable, match=r"gvisor: (there is no runsc|the sandbox does not start)"):
            await backends.choose(settings, launcher, Workspaces(state, uid_first=200_000, uid_count=10))
    finally:
        await launcher.close()
