"""The Helm chart as its tests see it: rendered by the real Helm, and what is committed beside it.

`python -m support.chart` (with `tests` on PYTHONPATH) writes anew what is generated: the settings part of
values.schema.json, and the goldens.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from deployments.settings import PlatformSettings
from support.checkout import ROOT

CHART = ROOT / "helm" / "continuum"
PRESETS = {path.stem: path for path in sorted((ROOT / "helm" / "presets").glob("*.yaml"))}
SCHEMA = CHART / "values.schema.json"
GOLDENS = ROOT / "tests" / "helm" / "goldens"
#: These are kept whole, the others by their Serve config: together they cover every template.
WHOLE_GOLDENS = ("cpu-tryout", "several-nodes")

RELEASE = "demo"
NAMESPACE = "agents"
#: The oldest Kubernetes that the chart accepts, and the newest with published schemas.
KUBERNETES = ("1.33", "1.37")

Manifest = dict[str, Any]


def need(module: str) -> ModuleType:
    """Import a package that only these tests use: skip where a laptop lacks it, fail where CI does."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if os.environ.get("CI"):
            pytest.fail(f"{module} is needed to test the chart: {error}")
        pytest.skip(f"{module} is not installed (see requirements/cpu.in)")


def preset(name: str) -> Manifest:
    """The values of a preset."""
    values: Manifest = yaml.safe_load(PRESETS[name].read_text())
    return values


@functools.cache
def _rendered(values: str) -> Mapping[str, str]:
    with need("helm_python").Chart.load(CHART) as chart:
        templates: Mapping[str, str] = chart.render(json.loads(values), name=RELEASE, namespace=NAMESPACE)
    return templates


def templates(values: Mapping[str, Any]) -> Mapping[str, str]:
    """What each template renders to, by its path in the chart.

    Raises:
        helm_python.errors.HelmError: the values are refused, by the schema or by the chart itself.
    """
    return {path.removeprefix("continuum/"): text for path, text in _rendered(json.dumps(values)).items()}


@functools.cache
def _documents(text: str) -> tuple[Manifest, ...]:
    return tuple(document for document in yaml.load_all(text, Loader=yaml.CSafeLoader) if document)


def manifests(values: Mapping[str, Any]) -> list[Manifest]:
    """Every Kubernetes object of a release with these values; the caller's own copy."""
    rendered = sorted((path, text) for path, text in templates(values).items() if path.endswith(".yaml"))
    return [copy.deepcopy(document) for _, text in rendered for document in _documents(text)]


def of_kind(kind: str, values: Mapping[str, Any]) -> list[Manifest]:
    """The objects of one kind."""
    return [manifest for manifest in manifests(values) if manifest["kind"] == kind]


def rayservice(values: Mapping[str, Any]) -> Manifest:
    """The release's RayService."""
    (service,) = of_kind("RayService", values)
    return service


def serve_config(values: Mapping[str, Any]) -> Manifest:
    """The Serve config inside the RayService."""
    config: Manifest = yaml.safe_load(rayservice(values)["spec"]["serveConfigV2"])
    return config


def ray_pods(values: Mapping[str, Any]) -> dict[str, Manifest]:
    """The pod template of each Ray group, by the group's name; the head's is `head`."""
    cluster = rayservice(values)["spec"]["rayClusterConfig"]
    groups = {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"]["template"], **groups}


def all_pods(values: Mapping[str, Any]) -> dict[str, Manifest]:
    """Every pod that the release makes: Ray's, the store's, the test's."""
    pods = ray_pods(values)
    for stateful_set in of_kind("StatefulSet", values):
        pods["redis"] = stateful_set["spec"]["template"]
    for pod in of_kind("Pod", values):
        pods["test"] = pod
    return pods


# --- what is generated ------------------------------------------------------------------------------------------------


def settings_definitions() -> Manifest:
    """The settings tree as draft-07 definitions. Where the store is, is for the chart to say."""
    schema = PlatformSettings.model_json_schema(ref_template="#/definitions/{model}")
    definitions: Manifest = schema.pop("$defs")
    del schema["properties"]["store"], definitions["StoreSettings"]
    return {name: _bare(one) for name, one in {"settings": schema, **definitions}.items()}


def _bare(schema: Any) -> Any:
    """A schema without titles, which repeat the names, and without defaults, which the chart leaves to the platform."""
    if isinstance(schema, list):
        return [_bare(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _bare(one) for name, one in value.items()} if key == "properties" else _bare(value)
        for key, value in schema.items()
        if key not in {"title", "default"}
    }


def values_schema() -> Manifest:
    """What values.schema.json should hold: the hand-written part with today's settings tree in it."""
    schema: Manifest = json.loads(SCHEMA.read_text())
    by_hand = {name: one for name, one in schema["definitions"].items() if name[0].islower() and name != "settings"}
    schema["definitions"] = by_hand | settings_definitions()
    return schema


def readable(node: Any, indent: int = 0) -> str:
    """JSON with everything on one line that fits there."""
    line = json.dumps(node, ensure_ascii=False)
    if indent + len(line) <= 110 or not isinstance(node, dict | list):
        return line
    pad = " " * (indent + 2)
    if isinstance(node, list):
        inner = [pad + readable(item, indent + 2) for item in node]
    else:
        inner = [f"{pad}{json.dumps(key)}: {readable(item, indent + 2)}" for key, item in node.items()]
    opening, closing = ("[", "]") if isinstance(node, list) else ("{", "}")
    return opening + "\n" + ",\n".join(inner) + "\n" + " " * indent + closing


def goldens() -> Iterator[tuple[Path, str]]:
    """Each golden file with what it should hold."""
    for name in PRESETS:
        values = preset(name)
        yield GOLDENS / f"{name}.serve.yaml", rayservice(values)["spec"]["serveConfigV2"]
        if name in WHOLE_GOLDENS:
            yield GOLDENS / f"{name}.yaml", _whole(values)


def _whole(values: Mapping[str, Any]) -> str:
    """All manifests but for what is a file of its own: the test's script, alerts, dashboards, the Serve config."""
    documents = manifests(values)
    for document in documents:
        match document["kind"]:
            case "RayService":
                document["spec"]["serveConfigV2"] = "(a golden of its own)"
            case "Pod":
                document["spec"]["containers"][0]["args"] = ["(files/smoke_test.py)"]
            case "ConfigMap" if "grafana_dashboard" in document["metadata"]["labels"]:
                document["data"] = dict.fromkeys(document["data"], "(files/dashboards)")
            case "PrometheusRule":
                document["spec"]["groups"] = [group["name"] for group in document["spec"]["groups"]]
    return yaml.safe_dump_all(documents, sort_keys=False, width=120)


def _update() -> None:
    SCHEMA.write_text(readable(values_schema()) + "\n")
    _rendered.cache_clear()
    GOLDENS.mkdir(exist_ok=True)
    wanted = dict(goldens())
    for stale in set(GOLDENS.iterdir()) - set(wanted):
        stale.unlink()
    for path, text in wanted.items():
        path.write_text(text)


if __name__ == "__main__":
    _update()
