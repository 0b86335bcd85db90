"""What single values do: budgets, routes, the model cache, the proxy, the autoscaler."""

from __future__ import annotations

from typing import Any

import pytest

from support import chart


def budgets(values: dict[str, Any]) -> dict[str, int]:
    """How many pods of each Ray group a drain must leave."""
    found = {}
    for one in chart.of_kind("PodDisruptionBudget", values):
        # The eviction API takes nothing else for pods whose owner has no scale, and KubeRay's clusters have none.
        assert set(one["spec"]) == {"minAvailable", "unhealthyPodEvictionPolicy", "selector"}
        found[one["spec"]["selector"]["matchLabels"]["ray.io/group"]] = one["spec"]["minAvailable"]
    return found


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({}, {}),
        ({"engineWorkers": [{"name": "a", "replicas": 4}]}, {"a": 3}),
        ({"engineWorkers": [{"name": "a", "replicas": 4}], "podDisruptionBudget": {"maxUnavailable": 2}}, {"a": 2}),
        ({"toolWorkers": {"replicas": 3}}, {"tools": 2}),
        ({"toolWorkers": {"replicas": 3}, "podDisruptionBudget": {"enabled": False}}, {}),
        # Without fault tolerance the cluster goes with its head.
        ({"gcsFaultTolerance": {"enabled": False}}, {"headgroup": 1}),
    ],
)
def test_a_drain_takes_one_pod_of_a_group_and_is_never_blocked_by_a_group_of_one(
    values: dict[str, Any], kept: dict[str, int]
) -> None:
    assert budgets(values) == kept


def test_with_the_autoscaler_budgets_follow_the_smallest_size() -> None:
    values = {
        "autoscaling": {"enabled": True, "idleTimeoutSeconds": 99},
        "networkPolicy": {"apiServer": [{"ipBlock": {"cidr": "10.0.0.1/32"}}]},
        "engineWorkers": [{"name": "a", "replicas": 4, "minReplicas": 2, "maxReplicas": 9}],
    }
    cluster = chart.rayservice(values)["spec"]["rayClusterConfig"]
    group = cluster["workerGroupSpecs"][0]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (4, 2, 9)
    assert cluster["enableInTreeAutoscaling"] is True
    assert cluster["autoscalerOptions"]["idleTimeoutSeconds"] == 99
    assert budgets(values) == {"a": 1}


def test_a_group_may_shrink_to_nothing() -> None:
    values = {"engineWorkers": [{"name": "a", "minReplicas": 0, "maxReplicas": 3}]}
    group = chart.rayservice(values)["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (1, 0, 3)


def test_the_ingress_lets_in_the_api_and_neither_metrics_nor_the_proxys_own_paths() -> None:
    values = {"ingress": {"enabled": True, "host": "agents.example.com", "tlsSecret": "tls", "className": "nginx"}}
    (ingress,) = chart.of_kind("Ingress", values)
    (rule,) = ingress["spec"]["rules"]
    assert rule["host"] == ingress["spec"]["tls"][0]["hosts"][0] == "agents.example.com"
    paths = {one["path"]: one["backend"]["service"] for one in rule["http"]["paths"]}
    assert set(paths) == {"/v1", "/healthz", "/readyz"}
    name = chart.rayservice(values)["metadata"]["name"]
    assert all(backend == {"name": f"{name}-serve-svc", "port": {"number": 8000}} for backend in paths.values())


def test_the_gateway_route_goes_to_the_same_service_and_lets_long_streams_be() -> None:
    values = chart.preset("several-nodes")
    (route,) = chart.of_kind("HTTPRoute", values)
    (rule,) = route["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": f"{chart.rayservice(values)['metadata']['name']}-serve-svc", "port": 8000}]
    seconds = chart.serve_config(values)["http_options"]["request_timeout_s"]
    assert rule["timeouts"] == {"request": f"{seconds}s"}


@pytest.mark.parametrize(
    ("cache", "volume"),
    [
        ({"existingClaim": "models"}, {"persistentVolumeClaim": {"claimName": "models"}}),
        ({"hostPath": "/mnt/models"}, {"hostPath": {"path": "/mnt/models", "type": "Directory"}}),
        ({"size": "7Gi"}, {"emptyDir": {"sizeLimit": "7Gi"}}),
    ],
)
def test_engine_pods_alone_have_the_model_cache(cache: dict[str, Any], volume: dict[str, Any]) -> None:
    for group, pod in chart.ray_pods({"modelCache": cache}).items():
        (found,) = (one for one in pod["spec"]["volumes"] if one["name"] == "models")
        del found["name"]
        assert (found == volume) == (group == "engine")


@pytest.mark.parametrize("on", [True, False])
def test_the_fast_proxy_is_switched_on_every_node_or_on_none(on: bool) -> None:
    for pod in chart.ray_pods({"serve": {"haProxy": on}}).values():
        names = {one["name"] for one in pod["spec"]["containers"][0]["env"]}
        assert ({"RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_THROUGHPUT_OPTIMIZED"} <= names) == on


def test_a_groups_own_values_win_over_the_defaults_of_groups() -> None:
    values = {
        "engineWorkerDefaults": {"nodeSelector": {"pool": "a"}, "shmSize": "3Gi"},
        "engineWorkers": [{"name": "x"}, {"name": "y", "nodeSelector": {"pool": "b"}, "resources": {"memory": "9Gi"}}],
    }
    pods = chart.ray_pods(values)
    assert pods["x"]["spec"]["nodeSelector"] == {"pool": "a"}
    assert pods["y"]["spec"]["nodeSelector"] == {"pool": "b"}
    # The CPUs of the default stay where a group names its memory only.
    assert pods["y"]["spec"]["containers"][0]["resources"]["limits"] == {"cpu": "6", "memory": "9Gi"}


def test_extra_objects_are_templates() -> None:
    extra = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-x"}, "data": {}}
    names = {one["metadata"]["name"] for one in chart.of_kind("ConfigMap", {"extraObjects": [extra]})}
    assert f"{chart.RELEASE}-x" in names
