"""What the platform finds wrong with a pod that is to be a sandbox."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from support.cluster import GOOD_SPEC
from tool_runtime.pod_faults import ended_by_limit, faults_of


def pod(change: dict[str, Any] | None = None, container: dict[str, Any] | None = None) -> dict[str, Any]:
    spec = {**copy.deepcopy(GOOD_SPEC), **(change or {})}
    spec["containers"][0] |= container or {}
    return {"spec": spec}


def test_a_careful_pod_has_no_fault() -> None:
    assert faults_of(pod(), "tools") == []


@pytest.mark.parametrize("name", ["hostNetwork", "hostPID", "hostIPC"])
def test_namespaces_of_the_node(name: str) -> None:
    assert faults_of(pod({name: True}), "tools") == [f"{name} is on"]


@pytest.mark.parametrize(
    ("volume", "fault"),
    [
        ({"name": "v", "hostPath": {"path": "/"}}, "volume v is a directory of the node"),
        (
            {"name": "v", "projected": {"sources": [{"serviceAccountToken": {}}]}},
            "a service account's token is mounted (automountServiceAccountToken: false)",
        ),
    ],
)
def test_volumes_that_lead_out(volume: dict[str, Any], fault: str) -> None:
    assert faults_of(pod({"volumes": [{"name": "w", "emptyDir": {}}, volume]}), "tools") == [fault]


@pytest.mark.parametrize(
    ("context", "fault"),
    [
        ({"privileged": True, "allowPrivilegeEscalation": False}, "is privileged"),
        ({}, "may gain privileges"),
        ({"allowPrivilegeEscalation": False, "capabilities": {"add": ["NET_ADMIN"]}}, "has capabilities added"),
        ({"allowPrivilegeEscalation": False, "runAsNonRoot": False}, "may run as root"),
    ],
)
def test_privileges_of_a_container(context: dict[str, Any], fault: str) -> None:
    (found,) = faults_of(pod(container={"securityContext": context}), "tools")
    assert fault in found


def test_a_container_beside_the_one_that_tools_run_in_is_looked_at_too_but_needs_no_limit() -> None:
    beside = {"name": "beside", "securityContext": {"allowPrivilegeEscalation": False, "privileged": True}}
    found = faults_of(pod({"containers": [*GOOD_SPEC["containers"], beside]}), "tools")
    assert found == ["container beside is privileged"]


def test_the_container_that_tools_run_in_needs_a_memory_limit() -> None:
    assert faults_of(pod(container={"resources": {}}), "tools") == ["container tools has no memory limit"]


def test_the_hosts_kernel_needs_a_system_call_filter_and_a_kernel_of_its_own_does_not() -> None:
    unfiltered = {"securityContext": {"runAsNonRoot": True}}
    assert faults_of(pod(unfiltered), "tools") == []
    (found,) = faults_of(pod({**unfiltered, "runtimeClassName": None}), "tools")
    assert "neither a seccomp profile nor a runtime class" in found


def test_a_pod_of_another_shape_is_full_of_faults_and_breaks_nothing() -> None:
    assert faults_of({}, "tools") == []
    assert faults_of({"spec": {"containers": [{"securityContext": None}]}}, "tools")


@pytest.mark.parametrize("where", ["state", "lastState"])
def test_a_container_that_ran_out_of_memory_was_ended_by_a_limit(where: str) -> None:
    statuses = [{"name": "beside"}, {"name": "tools", where: {"terminated": {"reason": "OOMKilled"}}}]
    assert ended_by_limit({"status": {"containerStatuses": statuses}}, "tools") == (
        "it used more memory than its pod may"
    )
    assert ended_by_limit({"status": {"containerStatuses": statuses}}, "beside") == ""


def test_an_evicted_pod_was_ended_by_a_limit_that_the_cluster_names() -> None:
    status = {"reason": "Evicted", "message": "ephemeral local storage usage exceeds 1Gi"}
    assert ended_by_limit({"status": status}, "tools") == (
        "its pod was evicted: ephemeral local storage usage exceeds 1Gi"
    )


def test_a_pod_that_just_ended_was_ended_by_none() -> None:
    statuses = [{"name": "tools", "state": {"terminated": {"reason": "Completed"}}}]
    assert ended_by_limit({"status": {"containerStatuses": statuses}}, "tools") == ""
