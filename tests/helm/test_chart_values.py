"""Values are closed: what the schema does not list is refused, and what does not fit together is refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from deployments.settings import PlatformSettings
from support import chart

SCHEMA = json.loads(chart.SCHEMA.read_text())
DEFAULTS = yaml.safe_load((chart.CHART / "values.yaml").read_text())


def refused(values: Mapping[str, Any]) -> str:
    """Why Helm refuses these values."""
    with pytest.raises(chart.need("helm_python").HelmError) as caught:
        chart.templates(values)
    return str(caught.value)


def objects(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object schema that lists properties, with its path."""
    if isinstance(node, dict):
        # `if`, `then` and `not` narrow what another schema has closed.
        for key, one in node.items():
            if key not in {"if", "then", "else", "not"}:
                yield from objects(one, f"{path}/{key}")
        if "properties" in node and not isinstance(node.get("properties", {}).get("type"), str):
            yield path, node
    elif isinstance(node, list):
        for index, one in enumerate(node):
            yield from objects(one, f"{path}/{index}")


def test_every_object_of_the_schema_is_closed() -> None:
    # The property called `properties` of a settings model would be a dictionary of schemas too; there is none.
    open_ones = [path for path, one in objects(SCHEMA) if one.get("additionalProperties") is not False]
    assert open_ones == []


def test_the_settings_part_of_the_schema_is_the_settings_tree_of_today() -> None:
    assert chart.values_schema() == SCHEMA, "run: PYTHONPATH=tests python -m support.chart"


def test_every_value_of_the_schema_has_a_default_in_values_yaml() -> None:
    # `global` is Helm's own, and the settings' defaults are the platform's.
    assert set(SCHEMA["properties"]) - {"global"} == set(DEFAULTS)
    for name, one in SCHEMA["properties"].items():
        if name not in {"global", "settings"} and "properties" in one:
            # A group's name is its own: the defaults of groups have none.
            assert set(one["properties"]) == set(DEFAULTS[name]), name


@pytest.mark.parametrize(
    "values",
    [
        {"imag": {"tag": "1"}},
        {"image": {"tga": "1"}},
        {"engineWorkers": [{"name": "a", "gpu": 1}]},
        {"engineWorkers": [{"gpus": 1}]},
        {"toolWorkers": {"sandbox": {"seccomp": {}}}},
        {"redis": {"auth": {"password": "hunter2"}}},
        {"settings": {"enigne": {}}},
        {"settings": {"engine": {"modle": "x"}}},
        {"settings": {"scheduling": {"preset": "magic"}}},
        {"settings": {"store": {"redis_url": "redis://elsewhere:6379/0"}}},
        {"serve": {"deployments": {"EngineReplicas": {"num_replicas": 2}}}},
        {"ray": {"env": {"RAY_AUTH_MODE": "disabled"}}},
        {"ray": {"authMode": ""}},
    ],
    ids=json.dumps,
)
def test_an_unknown_or_misplaced_value_is_refused_with_its_path(values: dict[str, Any]) -> None:
    message = refused(values)
    assert "schema" in message
    # The path names the top-level key, and the message what is wrong there.
    assert next(iter(values)) in message


def test_unmasked_proc_without_a_user_namespace_is_refused() -> None:
    assert "userNamespace" in refused({"toolWorkers": {"sandbox": {"procMount": "Unmasked", "userNamespace": False}}})


def test_a_localhost_seccomp_profile_needs_its_name() -> None:
    assert "localhostProfile" in refused({"toolWorkers": {"sandbox": {"seccompProfile": {"type": "Localhost"}}}})


def test_the_metadata_range_cannot_be_opened() -> None:
    assert "except" in refused({"networkPolicy": {"internet": {"except": ["10.0.0.0/8"]}}})


GPU = {"engine": {"model": "m/m", "device": "gpu"}}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"engineWorkers": [{"name": "g", "gpus": 1}]}, "settings.engine.device=gpu"),
        ({"settings": GPU}, "no engine pod has more than 0 GPUs"),
        (
            {
                "settings": {"engine": {**GPU["engine"], "tensor_parallel_size": 4}},
                "engineWorkers": [{"name": "g", "gpus": 2, "replicas": 2}],
            },
            "no engine pod has more than 2 GPUs",
        ),
        (
            {"settings": {**GPU, "replicas": {"engine": 3}}, "engineWorkers": [{"name": "g", "gpus": 2}]},
            "have room for 2 engines",
        ),
        (
            # Six GPUs, but three in each pod: an engine of two leaves one of each pod over.
            {
                "settings": {
                    "engine": {**GPU["engine"], "tensor_parallel_size": 2},
                    "replicas": {"engine": 3},
                },
                "engineWorkers": [{"name": "g", "gpus": 3, "replicas": 2}],
            },
            "have room for 2 engines",
        ),
        ({"engineWorkers": [{"name": "g"}, {"name": "g"}]}, "two groups are named g"),
        ({"engineWorkers": [{"name": "g", "maxReplicas": 0}]}, "minReplicas <= replicas <= maxReplicas"),
        ({"externalRedis": {"host": "r"}}, "choose one store"),
        ({"redis": {"enabled": False}, "networkPolicy": {"enabled": False}}, "externalRedis.host"),
        ({"redis": {"enabled": False}, "externalRedis": {"host": "r"}}, "externalRedis.networkPeers"),
        ({"redis": {"auth": {"existingSecret": ""}}}, "redis.auth.existingSecret"),
        ({"modelCache": {"existingClaim": "c", "hostPath": "/models"}}, "not both"),
        ({"autoscaling": {"enabled": True}}, "networkPolicy.apiServer"),
        ({"httpRoute": {"enabled": True}}, "httpRoute.parentRefs"),
    ],
)
def test_values_that_do_not_fit_each_other_are_refused_with_what_to_change(values: dict[str, Any], reason: str) -> None:
    assert reason in refused(values)


def test_the_autoscalers_upper_bound_counts_as_room() -> None:
    values = {
        "settings": {**GPU, "replicas": {"engine": 3}},
        "engineWorkers": [{"name": "g", "gpus": 1, "replicas": 1, "maxReplicas": 3}],
        "autoscaling": {"enabled": True},
        "networkPolicy": {"apiServer": [{"ipBlock": {"cidr": "10.0.0.1/32"}}]},
    }
    assert chart.serve_config(values)["applications"][0]["args"]["replicas"]["engine"] == 3


def test_what_the_schema_says_of_settings_agrees_with_the_platform() -> None:
    """The same wrong key is an error of the chart's and of the platform's."""
    wrong = {"engine": {"model": "embedded", "tensor_paralel_size": 2}}
    with pytest.raises(ValidationError, match="tensor_paralel_size"):
        PlatformSettings.model_validate(wrong)
    assert "tensor_paralel_size" in refused({"settings": wrong})
