"""What the backend `kubernetes` has a pod run, and which settings it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agent_program.errors import SandboxUnavailable
from tool_runtime.config import KubernetesSettings, SandboxBackend, SandboxLimits, ToolRuntimeSettings
from tool_runtime.kubernetes_backend import ORDER, KubernetesBackend
from tool_runtime.sandbox import KillScope, SandboxSpec, ServerCommand

SPEC = SandboxSpec(workspace=Path("/srv/state/workspaces/abc"), uid=200_001, limits=SandboxLimits(open_files_max=99))
CLUSTER = {"namespace": "sandboxes", "warm_pool": "plain"}


def order() -> dict[str, Any]:
    length, _, text = KubernetesBackend("python3").plan(SPEC).own_blobs[ORDER].partition(b"\n")
    assert int(length) == len(text)
    return json.loads(text)  # type: ignore[no-any-return]


def test_the_command_is_python_without_the_images_own_modules_and_tells_nothing_of_the_program() -> None:
    plan = KubernetesBackend("python3").plan(SPEC)
    assert plan.argv[:5] == ("python3", "-I", "-S", "-B", "-c")
    assert "/srv" not in str(plan)
    assert "200001" not in str(plan)


def test_one_signal_reaches_all_of_the_pod_and_nothing_else() -> None:
    assert KubernetesBackend("python3").plan(SPEC).kill_scope is KillScope.DOMAIN


def test_the_agent_comes_along_with_all_its_modules() -> None:
    names = {name.rpartition("/")[2] for name in order()["files"]}
    assert {"agent.py", "frames.py", "sessions.py", "python_session.py", "archive.py"} <= names


def test_limits_are_applied_but_for_the_number_of_processes_which_the_kernel_counts_over_pods() -> None:
    limits = dict(one.split("=") for one in order()["limits"].split(","))
    assert limits["NOFILE"] == "99"
    assert int(limits["NPROC"]) >= 2**22


def test_a_server_with_a_command_has_no_place() -> None:
    spec = SandboxSpec(workspace=Path("/w"), uid=None, limits=SandboxLimits(), server=ServerCommand(argv=("server",)))
    with pytest.raises(SandboxUnavailable, match="give them a url"):
        KubernetesBackend("python3").plan(spec)


def test_the_backend_needs_to_be_told_where() -> None:
    with pytest.raises(ValidationError, match="needs kubernetes"):
        ToolRuntimeSettings(sandbox=SandboxBackend.KUBERNETES)
    assert ToolRuntimeSettings(sandbox=SandboxBackend.KUBERNETES, kubernetes=KubernetesSettings(**CLUSTER)).kubernetes


@pytest.mark.parametrize("url", ["http://10.0.0.1:6443", "ftp://a", "kubernetes.default", "https://"])
def test_the_token_is_sent_to_nobody_in_the_clear(url: str) -> None:
    with pytest.raises(ValidationError, match="api_server must be"):
        KubernetesSettings(**CLUSTER, api_server=url)


@pytest.mark.parametrize("name", ["../x", "a/b", "A", "", "a" * 254])
def test_a_name_that_is_none_does_not_become_a_path(name: str) -> None:
    with pytest.raises(ValidationError):
        KubernetesSettings(**{**CLUSTER, "warm_pool": name})
    with pytest.raises(ValidationError):
        KubernetesSettings(**{**CLUSTER, "namespace": name})
