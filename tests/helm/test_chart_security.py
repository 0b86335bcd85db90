"""What a pod may do and whom it may reach."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator
from typing import Any

import pytest

from support import chart

each_preset = pytest.mark.parametrize("name", chart.PRESETS)
METADATA = ipaddress.ip_address("169.254.169.254")


def containers(pod: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from pod["spec"].get("initContainers", [])
    yield from pod["spec"]["containers"]


def breaches(pod: dict[str, Any]) -> set[str]:
    """What of a pod the Pod Security Standard `restricted` refuses (as of Kubernetes 1.33)."""
    found: set[str] = set()
    spec = pod["spec"]
    shared = spec.get("securityContext", {})
    found |= {name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)}
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    found |= {f"volume {kind}" for volume in spec.get("volumes", []) for kind in volume.keys() - allowed - {"name"}}
    for one in containers(pod):
        own = one.get("securityContext", {})
        effective = {**shared, **own}
        if own.get("privileged"):
            found.add("privileged")
        if own.get("allowPrivilegeEscalation") is not False:
            found.add("allowPrivilegeEscalation")
        if effective.get("runAsNonRoot") is not True or effective.get("runAsUser") == 0:
            found.add("root")
        if "ALL" not in own.get("capabilities", {}).get("drop", []) or own["capabilities"].get("add"):
            found.add("capabilities")
        if effective.get("seccompProfile", {}).get("type") not in {"RuntimeDefault", "Localhost"}:
            found.add("seccompProfile")
        if effective.get("appArmorProfile", {}).get("type", "RuntimeDefault") not in {"RuntimeDefault", "Localhost"}:
            found.add("appArmorProfile")
        if own.get("procMount", "Default") != "Default":
            found.add("procMount")
        found |= {"hostPort" for port in one.get("ports", []) if port.get("hostPort")}
    return found


def test_the_preset_for_restricted_clusters_keeps_to_the_restricted_standard() -> None:
    assert {name: breaches(pod) for name, pod in chart.all_pods(chart.preset("restricted")).items()} == {
        name: set() for name in ("head", "gpu", "tools", "redis", "test")
    }


@each_preset
def test_elsewhere_tool_pods_alone_ask_for_more_and_only_for_what_sandboxes_need(name: str) -> None:
    found = {pod: what for pod, template in chart.all_pods(chart.preset(name)).items() if (what := breaches(template))}
    assert found.pop("tools", set()) <= {"seccompProfile", "appArmorProfile", "procMount"}
    # A directory of the node with the model files is the operator's choice.
    assert all(what == {"volume hostPath"} for what in found.values())


def test_with_a_profile_on_the_nodes_a_private_proc_is_all_that_tool_pods_ask_for() -> None:
    profile = {"type": "Localhost", "localhostProfile": "profiles/continuum-sandbox.json"}
    values = {"toolWorkers": {"sandbox": {"seccompProfile": profile, "appArmorProfile": None}}}
    # From Kubernetes 1.35 the standard `baseline` allows this to pods in a user namespace.
    assert {name: what for name, pod in chart.all_pods(values).items() if (what := breaches(pod))} == {
        "tools": {"procMount"}
    }


@each_preset
def test_tool_pods_are_in_a_user_namespace_of_their_own(name: str) -> None:
    pods = chart.ray_pods(chart.preset(name))
    assert {group for group, pod in pods.items() if pod["spec"].get("hostUsers") is False} == {"tools"}


@each_preset
def test_root_filesystems_are_read_only_and_what_ray_writes_to_is_a_volume(name: str) -> None:
    for group, pod in chart.all_pods(chart.preset(name)).items():
        for one in containers(pod):
            assert one["securityContext"]["readOnlyRootFilesystem"] is True, group
    for group, pod in chart.ray_pods(chart.preset(name)).items():
        (container,) = containers(pod)
        writable = {mount["mountPath"] for mount in container["volumeMounts"]}
        home = next(one["value"] for one in container["env"] if one["name"] == "HOME")
        assert {"/tmp", "/dev/shm", home} <= writable, group
        limited = [volume for volume in pod["spec"]["volumes"] if "emptyDir" in volume]
        assert all(volume["emptyDir"].get("sizeLimit") for volume in limited), group


@each_preset
def test_no_pod_has_a_token_of_the_api_server_and_the_release_grants_nothing(name: str) -> None:
    values = chart.preset(name)
    assert all(pod["spec"]["automountServiceAccountToken"] is False for pod in chart.all_pods(values).values())
    assert all(one["automountServiceAccountToken"] is False for one in chart.of_kind("ServiceAccount", values))
    kinds = {one["kind"] for one in chart.manifests(values)}
    assert kinds.isdisjoint({"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding", "Secret"})


def test_with_the_autoscaler_the_head_alone_has_a_token_and_an_account_of_its_own() -> None:
    values = {
        "autoscaling": {"enabled": True},
        "networkPolicy": {"apiServer": [{"ipBlock": {"cidr": "10.0.0.1/32"}}]},
    }
    pods = chart.ray_pods(values)
    assert {group for group, pod in pods.items() if pod["spec"]["automountServiceAccountToken"]} == {"head"}
    accounts = {group: pod["spec"]["serviceAccountName"] for group, pod in pods.items()}
    assert accounts.pop("head") not in accounts.values()


IN_PODS: dict[str, Any] = {
    "settings": {"tools": {"sandbox": "kubernetes", "kubernetes": {"namespace": "sandboxes", "warm_pool": "tools"}}},
    "networkPolicy": {"apiServer": [{"ipBlock": {"cidr": "10.0.0.1/32"}}]},
}


def test_with_tools_in_pods_of_their_own_tool_pods_alone_have_a_token_and_it_is_good_for_sandboxes_only() -> None:
    pods = chart.ray_pods(IN_PODS)
    with_token = {group for group, pod in pods.items() if pod["spec"]["automountServiceAccountToken"]}
    assert {labels_of(pods[group])["app.kubernetes.io/component"] for group in with_token} == {"tools"}
    (role,), (binding,) = chart.of_kind("Role", IN_PODS), chart.of_kind("RoleBinding", IN_PODS)
    assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "sandboxes"
    granted = {
        f"{group}/{resource}": set(rule["verbs"])
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert granted == {
        "extensions.agents.x-k8s.io/sandboxclaims": {"create", "get", "patch", "delete"},
        "agents.x-k8s.io/sandboxes": {"get"},
        "/pods": {"get", "delete"},
        "/pods/exec": {"get", "create"},
    }
    accounts = {pods[group]["spec"]["serviceAccountName"] for group in with_token}
    assert {one["name"] for one in binding["subjects"]} == accounts
    (rule,) = policies(IN_PODS)["tools"]["egress"]
    assert rule["to"] == IN_PODS["networkPolicy"]["apiServer"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"networkPolicy": {}}, "networkPolicy.apiServer"),
        ({"settings": {"tools": {"sandbox": "kubernetes"}}}, "settings.tools.kubernetes"),
    ],
)
def test_tools_in_pods_of_their_own_are_not_half_set_up(change: dict[str, Any], told: str) -> None:
    with pytest.raises(Exception, match=told):
        chart.manifests({**IN_PODS, **change})


@each_preset
def test_no_secret_is_written_out(name: str) -> None:
    """Wherever a name says password, token or key, the value comes from a Secret."""
    for pod in chart.all_pods(chart.preset(name)).values():
        for one in containers(pod):
            for variable in one.get("env", []):
                if variable["name"].endswith(("PASSWORD", "TOKEN", "KEY")):
                    assert set(variable["valueFrom"]["secretKeyRef"]) == {"name", "key"}
    args = json.dumps(chart.serve_config(chart.preset(name))["applications"][0]["args"])
    assert "@" not in args or ":${CONTINUUM_STORE_PASSWORD}@" in args


# --- network ----------------------------------------------------------------------------------------------------------


def policies(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The release's network policies by the last part of their names."""
    return {one["metadata"]["name"].rsplit("-", 1)[1]: one["spec"] for one in chart.of_kind("NetworkPolicy", values)}


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector takes these labels."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    expressions = selector.get("matchExpressions", [])
    assert all(one["operator"] == "In" for one in expressions)
    return all(labels.get(one["key"]) in one["values"] for one in expressions)


def labels_of(pod: dict[str, Any]) -> dict[str, str]:
    labels: dict[str, str] = pod["metadata"]["labels"]
    return labels


def may_reach(values: dict[str, Any], source: dict[str, Any], target: dict[str, Any], port: int) -> bool:
    """Whether one pod of the release may open a connection to another, by the policies of both."""
    return _allows(values, "egress", source, target, port) and _allows(values, "ingress", target, source, port)


def _allows(values: dict[str, Any], way: str, pod: dict[str, Any], peer: dict[str, Any], port: int) -> bool:
    ruling = [
        policy
        for policy in policies(values).values()
        if way.capitalize() in policy["policyTypes"] and selects(policy["podSelector"], labels_of(pod))
    ]
    if not ruling:
        return True
    rules = [rule for policy in ruling for rule in policy.get(way, [])]
    return any(
        (not rule.get("ports") or any(one["port"] == port for one in rule["ports"]))
        and any(
            "namespaceSelector" not in one and selects(one["podSelector"], labels_of(peer))
            for one in rule["from" if way == "ingress" else "to"]
            if "podSelector" in one
        )
        for rule in rules
    )


@each_preset
def test_every_pod_of_the_release_is_under_a_policy(name: str) -> None:
    values = chart.preset(name)
    for group, pod in chart.all_pods(values).items():
        if group != "test":
            assert any(selects(policy["podSelector"], labels_of(pod)) for policy in policies(values).values()), group


def test_the_store_is_reached_by_ray_pods_and_by_nobody_else() -> None:
    values = chart.preset("one-gpu")
    pods = chart.all_pods(values)
    reaching = {
        group for group, pod in pods.items() if group != "redis" and may_reach(values, pod, pods["redis"], 6379)
    }
    assert reaching == {"head", "gpu", "tools"}
    # It opens no connection of its own.
    assert not policies(values)["redis"].get("egress")


def test_ray_pods_reach_each_other_on_every_port() -> None:
    values = chart.preset("one-gpu")
    pods = chart.ray_pods(values)
    for source in pods.values():
        for target in pods.values():
            assert may_reach(values, source, target, 43_210)


def test_the_test_pod_reaches_the_api_and_not_the_dashboard() -> None:
    values = chart.preset("one-gpu")
    pods = chart.all_pods(values)
    assert may_reach(values, pods["test"], pods["gpu"], 8000)
    assert not may_reach(values, pods["test"], pods["head"], 8265)
    assert not may_reach(values, pods["test"], pods["head"], 6379)


@each_preset
def test_the_dashboard_is_open_to_kuberay_only(name: str) -> None:
    values = chart.preset(name)
    head = labels_of(chart.ray_pods(values)["head"])
    opening = [
        peer
        for policy in policies(values).values()
        if selects(policy["podSelector"], head)
        for rule in policy["ingress"]
        if not rule.get("ports") or any(one["port"] == 8265 for one in rule["ports"])
        for peer in rule["from"]
    ]
    outside = [peer for peer in opening if "namespaceSelector" in peer or "ipBlock" in peer]
    assert [peer["podSelector"]["matchLabels"] for peer in outside] == [{"app.kubernetes.io/name": "kuberay-operator"}]


@each_preset
def test_no_rule_lets_a_pod_reach_cloud_metadata(name: str) -> None:
    for policy in policies(chart.preset(name)).values():
        for rule in policy.get("egress", []):
            assert rule["to"], "an empty list of peers means everywhere"
            for peer in rule["to"]:
                if block := peer.get("ipBlock"):
                    inside = METADATA in ipaddress.ip_network(block["cidr"])
                    left_out = any(METADATA in ipaddress.ip_network(one) for one in block.get("except", []))
                    assert not inside or left_out


@each_preset
def test_no_rule_has_an_empty_list_of_peers(name: str) -> None:
    for policy in policies(chart.preset(name)).values():
        for rule in policy.get("ingress", []):
            assert rule["from"]
