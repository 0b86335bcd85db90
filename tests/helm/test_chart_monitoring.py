"""What Prometheus and Grafana get from the chart."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from support import chart

MONITORED = chart.preset("several-nodes")
ALERTS = [
    rule
    for path in sorted((chart.CHART / "files" / "alerts").glob("*.yaml"))
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
]


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_has_a_valid_expression_a_severity_and_says_what_is_wrong(rule: dict[str, Any]) -> None:
    chart.need("promql_parser").parse(rule["expr"])
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["description"]


def test_the_prometheus_rule_holds_every_alert_as_it_is_written() -> None:
    (manifest,) = chart.of_kind("PrometheusRule", MONITORED)
    rules = [rule for group in manifest["spec"]["groups"] for rule in group["rules"]]
    # Templates of Prometheus' own, such as {{ $labels.namespace }}, are not Helm's to fill in.
    assert rules == ALERTS


def test_rays_metrics_are_scraped_from_every_ray_pod_by_the_name_of_the_port() -> None:
    (monitor,) = chart.of_kind("PodMonitor", MONITORED)
    endpoints = {one["port"] for one in monitor["spec"]["podMetricsEndpoints"]}
    for group, pod in chart.ray_pods(MONITORED).items():
        ports = {one["name"] for one in pod["spec"]["containers"][0]["ports"]}
        assert "metrics" in endpoints & ports, group
        components = monitor["spec"]["selector"]["matchExpressions"][0]["values"]
        assert pod["metadata"]["labels"]["app.kubernetes.io/component"] in components


def test_the_platforms_metrics_are_scraped_in_one_place() -> None:
    """Every ingress gathers all replicas: scraping each proxy would count everything once a proxy."""
    (monitor,) = chart.of_kind("ServiceMonitor", MONITORED)
    chosen = monitor["spec"]["selector"]["matchLabels"].items()
    (service,) = (one for one in chart.of_kind("Service", MONITORED) if chosen <= one["metadata"]["labels"].items())
    wanted = service["spec"]["selector"]
    # KubeRay adds ray.io/node-type to the pods.
    wanted.pop("ray.io/node-type")
    pods = chart.ray_pods(MONITORED)
    assert [name for name, pod in pods.items() if wanted.items() <= pod["metadata"]["labels"].items()] == ["head"]


def test_monitoring_carries_the_labels_that_prometheus_selects_by_and_is_off_unless_asked_for() -> None:
    kinds = {"PodMonitor", "ServiceMonitor", "PrometheusRule"}
    for kind in kinds:
        (one,) = chart.of_kind(kind, MONITORED)
        assert one["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    assert kinds.isdisjoint(one["kind"] for one in chart.manifests({}))


def test_each_dashboard_of_the_chart_becomes_a_config_map_that_grafanas_sidecar_finds(tmp_path: Path) -> None:
    copied = shutil.copytree(chart.CHART, tmp_path / "continuum")
    # Legends have braces of Grafana's own, which are not Helm's to fill in.
    board = '{\n  "title": "One board",\n  "legend": "{{deployment}}"\n}'
    (copied / "files" / "dashboards" / "one-board.json").write_text(board + "\n")
    values = {"monitoring": {"grafanaDashboards": {"enabled": True}}}
    with chart.need("helm_python").Chart.load(copied) as loaded:
        text = loaded.render(values, name=chart.RELEASE, namespace=chart.NAMESPACE)[
            "continuum/templates/monitoring.yaml"
        ]
    found = {one["metadata"]["name"]: one for one in yaml.safe_load_all(text) if one}
    config_map = found[f"{chart.rayservice({})['metadata']['name']}-dashboard-one-board"]
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert config_map["data"] == {"one-board.json": board}
