"""What the chart renders is what Kubernetes and KubeRay accept, for every preset."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from support import chart

RAYSERVICE = jsonschema.Draft202012Validator(json.loads((Path(__file__).parent / "rayservice.schema.json").read_text()))
#: Kinds of operators that may not be installed; Kubernetes publishes no schema of theirs.
CUSTOM = {"RayService", "PodMonitor", "ServiceMonitor", "PrometheusRule", "HTTPRoute"}

#: Values that turn on what no preset does, so that every template is rendered somewhere.
EVERYTHING: dict[str, dict[str, Any]] = {
    "ingress": {"ingress": {"enabled": True, "className": "nginx", "host": "agents.example.com", "tlsSecret": "tls"}},
    "autoscaling": {
        "autoscaling": {"enabled": True},
        "engineWorkers": [{"name": "cpu", "minReplicas": 1, "maxReplicas": 3}],
        "networkPolicy": {"apiServer": [{"ipBlock": {"cidr": "10.0.0.1/32"}}]},
    },
    "no tool pods": {"toolWorkers": {"enabled": False}},
    "no fault tolerance": {"gcsFaultTolerance": {"enabled": False}},
    "no policies": {"networkPolicy": {"enabled": False}, "ray": {"authMode": "disabled"}},
    "own token": {"ray": {"authSecret": "ray-token", "env": {"RAY_DEDUP_LOGS": "0"}}},
    "extra objects": {
        "extraObjects": [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-x"}, "data": {"a": "b"}}
        ]
    },
    "test with a key": {"tests": {"apiKeySecret": {"name": "api-keys", "key": "test"}}},
}
CASES = {"defaults": {}, **{name: chart.preset(name) for name in chart.PRESETS}, **EVERYTHING}

each_case = pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())


def builtin_objects(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every object that Kubernetes has a schema for, the pods inside the RayService among them."""
    objects = [one for one in chart.manifests(values) if one["kind"] not in CUSTOM]
    for name, template in chart.ray_pods(values).items():
        objects.append({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": template})
    return objects


@functools.cache
def validate_strictly(manifest: str, kubernetes: str) -> None:
    """Cached, for most objects are the same in most cases and each check reads all of Kubernetes' schemas."""
    chart.need("kubernetes_validate").validate(json.loads(manifest), kubernetes, strict=True)


@each_case
def test_helm_lint_finds_nothing(values: dict[str, Any]) -> None:
    report = chart.need("helm_python").lint(chart.CHART, values, strict=True)
    findings = [one for one in report["messages"] if one["error"] != "icon is recommended"]
    assert (findings, report["errors"]) == ([], [])


@each_case
@pytest.mark.parametrize("kubernetes", chart.KUBERNETES)
def test_every_builtin_object_is_valid_and_has_no_unknown_field(values: dict[str, Any], kubernetes: str) -> None:
    objects = builtin_objects(values)
    assert {"ServiceAccount", "PodTemplate", "Pod"} <= {one["kind"] for one in objects}
    for one in objects:
        validate_strictly(json.dumps(one), kubernetes)


@each_case
def test_the_rayservice_has_only_fields_that_kuberay_knows(values: dict[str, Any]) -> None:
    RAYSERVICE.validate(chart.rayservice(values))


@pytest.mark.parametrize(
    "where",
    [
        ("spec",),
        ("spec", "rayClusterConfig"),
        ("spec", "rayClusterConfig", "gcsFaultToleranceOptions"),
        ("spec", "rayClusterConfig", "headGroupSpec"),
        ("spec", "rayClusterConfig", "workerGroupSpecs", 0),
    ],
    ids=lambda where: ".".join(map(str, where)),
)
def test_a_misspelt_rayservice_field_is_caught(where: tuple[str | int, ...]) -> None:
    service = copy.deepcopy(chart.rayservice(chart.preset("one-gpu")))
    node: Any = service
    for step in where:
        node = node[step]
    node["serveConfigV3"] = "x"
    with pytest.raises(jsonschema.ValidationError, match="serveConfigV3"):
        RAYSERVICE.validate(service)


@pytest.mark.parametrize("release", ["a", "a" * 53])
def test_names_stay_within_what_kuberay_allows(release: str) -> None:
    with chart.need("helm_python").Chart.load(chart.CHART) as loaded:
        rendered = loaded.render({"redis": {"auth": {"enabled": False}}}, name=release, namespace="n")
    names = [
        document["metadata"]["name"]
        for path, text in rendered.items()
        if path.endswith(".yaml")
        for document in yaml.safe_load_all(text)
        if document
    ]
    assert max(map(len, names)) <= 63
    service = next(yaml.safe_load(text) for path, text in rendered.items() if path.endswith("/rayservice.yaml"))
    RAYSERVICE.validate(service)


def test_no_two_objects_of_one_kind_share_a_name() -> None:
    for values in CASES.values():
        names = [(one["kind"], one["metadata"]["name"]) for one in chart.manifests(values)]
        assert len(names) == len(set(names))


def test_every_template_is_rendered_by_some_case() -> None:
    rendered = {path for values in CASES.values() for path, text in chart.templates(values).items() if text.strip()}
    written = {
        str(path.relative_to(chart.CHART)) for path in (chart.CHART / "templates").rglob("*") if path.suffix == ".yaml"
    }
    assert written <= rendered
