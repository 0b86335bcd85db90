"""The Serve config inside the RayService is one that Ray and the platform take."""

from __future__ import annotations

from typing import Any

import pytest
from ray.serve._private.build_app import build_app as build_serve_app
from ray.serve.schema import ServeDeploySchema

from deployments.app import build_app
from deployments.settings import PlatformSettings
from support import chart

each_preset = pytest.mark.parametrize("name", chart.PRESETS)


def settings_of(values: dict[str, Any]) -> PlatformSettings:
    """The platform's settings as a release with these values gets them."""
    return PlatformSettings.model_validate(chart.serve_config(values)["applications"][0]["args"])


@each_preset
def test_ray_takes_the_config(name: str) -> None:
    config = ServeDeploySchema.model_validate(chart.serve_config(chart.preset(name)))
    (app,) = config.applications
    assert (app.name, app.route_prefix, app.import_path) == ("continuum", "/", "deployments.app:build_app")


@each_preset
def test_the_platform_takes_the_settings_and_they_are_the_operators(name: str) -> None:
    values = chart.preset(name)
    settings = settings_of(values)
    for section, chosen in values["settings"].items():
        for field, value in chosen.items():
            assert getattr(getattr(settings, section), field) == value


@each_preset
def test_no_node_starts_a_store_of_its_own(name: str) -> None:
    assert not settings_of(chart.preset(name)).store.is_embedded


def test_the_store_is_the_releases_own_service() -> None:
    values = chart.preset("cpu-tryout")
    (service,) = (one for one in chart.of_kind("Service", values) if one["metadata"]["name"].endswith("-redis"))
    host = f"{service['metadata']['name']}.{chart.NAMESPACE}.svc"
    assert settings_of(values).store.redis_url == f"redis://{host}:6379/0"


def test_an_external_store_is_named_with_its_user_port_database_and_tls() -> None:
    values = chart.preset("several-nodes")
    values["externalRedis"]["database"] = 3
    url = chart.serve_config(values)["applications"][0]["args"]["store"]["redis_url"]
    assert url == "rediss://continuum:${CONTINUUM_STORE_PASSWORD}@redis.data.example.com:6380/3"
    gcs = chart.rayservice(values)["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert gcs["redisAddress"] == "rediss://redis.data.example.com:6380"
    assert gcs["redisUsername"] == {"value": "continuum"}


def test_the_version_of_ray_is_the_one_that_is_installed() -> None:
    import ray

    cluster = chart.rayservice({})["spec"]["rayClusterConfig"]
    assert cluster["rayVersion"] == ray.__version__


@each_preset
def test_tool_actors_run_on_tool_pods_only_and_one_on_each(name: str) -> None:
    values = chart.preset(name)
    cluster = chart.rayservice(values)["spec"]["rayClusterConfig"]
    offering = {
        one["groupName"]: one for one in cluster["workerGroupSpecs"] if "continuum_tools" in one.get("resources", {})
    }
    assert list(offering) == ["tools"]

    (options,) = (
        one for one in chart.serve_config(values)["applications"][0]["deployments"] if one["name"] == "ToolActor"
    )
    wanted = options["ray_actor_options"]["resources"]["continuum_tools"]
    actors = settings_of(values).replicas.tools
    assert actors == offering["tools"]["replicas"]
    assert 0 < wanted <= float(offering["tools"]["resources"]["continuum_tools"])
    assert options["max_replicas_per_node"] == 1


@each_preset
def test_what_the_chart_says_again_of_a_deployment_is_what_the_code_says(name: str) -> None:
    """Serve replaces `ray_actor_options` as a whole: the chart may add a resource and change nothing else."""
    values = chart.preset(name)
    coded = {one.name: one for one in build_serve_app(build_app(settings_of(values)), name="continuum").deployments}
    for options in chart.serve_config(values)["applications"][0]["deployments"]:
        overridden = dict(options["ray_actor_options"])
        assert set(overridden.pop("resources")) <= {"continuum_tools", "continuum_engine"}
        assert overridden == {
            key: value for key, value in coded[options["name"]].ray_actor_options.items() if key != "runtime_env"
        }


def test_engines_without_gpus_keep_off_the_tool_pods() -> None:
    values = chart.preset("cpu-tryout")
    values["settings"]["replicas"] = {"engine_memory_gib": 1.5}
    (options,) = (
        one for one in chart.serve_config(values)["applications"][0]["deployments"] if one["name"] == "EngineReplica"
    )
    assert options["ray_actor_options"]["memory"] == 3 * 2**29
    groups = chart.rayservice(values)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert {one["groupName"] for one in groups if "continuum_engine" in one["resources"]} == {"cpu"}


def test_more_tool_actors_than_pods_are_spread_evenly() -> None:
    values = {"settings": {"replicas": {"tools": 5, "service_cpus": 0.5}}, "toolWorkers": {"replicas": 2}}
    (options,) = (
        one for one in chart.serve_config(values)["applications"][0]["deployments"] if one["name"] == "ToolActor"
    )
    assert options["max_replicas_per_node"] == 3
    # The options of a Serve config replace the code's, so the CPUs that the settings ask for are said again.
    assert options["ray_actor_options"]["num_cpus"] == 0.5


def test_without_tool_pods_tool_actors_go_anywhere() -> None:
    values = {"toolWorkers": {"enabled": False}}
    assert "deployments" not in chart.serve_config(values)["applications"][0]


def test_an_operators_deployment_options_are_kept_beside_the_charts() -> None:
    values = {
        "serve": {"deployments": {"ToolActor": {"max_replicas_per_node": 7}, "Ingress": {"max_queued_requests": 9}}}
    }
    options = {one["name"]: one for one in chart.serve_config(values)["applications"][0]["deployments"]}
    assert options["Ingress"]["max_queued_requests"] == 9
    assert options["ToolActor"]["max_replicas_per_node"] == 7
    assert "continuum_tools" in options["ToolActor"]["ray_actor_options"]["resources"]


def test_the_head_runs_nothing_of_the_platform() -> None:
    assert chart.rayservice({})["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


@each_preset
def test_every_ray_node_has_the_same_image_and_environment(name: str) -> None:
    pods = chart.ray_pods(chart.preset(name))
    containers = {group: pod["spec"]["containers"][0] for group, pod in pods.items()}
    assert len({one["image"] for one in containers.values()}) == 1
    # A token for the model hub is for those who download models.
    environments = {
        group: {variable["name"]: variable for variable in one["env"] if variable["name"] != "HF_TOKEN"}
        for group, one in containers.items()
    }
    assert all(one == environments["head"] for one in environments.values())


@pytest.mark.parametrize("mode", ["token", "disabled"])
def test_rays_authentication_is_always_said(mode: str) -> None:
    values = {"ray": {"authMode": mode, "authSecret": "ray-token"}}
    options = chart.rayservice(values)["spec"]["rayClusterConfig"]["authOptions"]
    assert options == {"mode": mode} | ({"secretName": "ray-token"} if mode == "token" else {})
    for pod in chart.ray_pods(values).values():
        assert {"name": "RAY_AUTH_MODE", "value": mode} in pod["spec"]["containers"][0]["env"]


def test_the_serve_port_of_the_head_has_the_name_by_which_kuberay_finds_it() -> None:
    ports = {one["name"]: one["containerPort"] for one in chart.ray_pods({})["head"]["spec"]["containers"][0]["ports"]}
    assert ports["serve"] == 8000
    assert chart.serve_config({})["http_options"]["port"] == 8000


def test_gpus_are_asked_for_as_often_as_an_engine_pod_has_them_and_by_no_other_pod() -> None:
    for name in ("one-gpu", "one-node-8-gpus", "several-nodes"):
        values = chart.preset(name)
        for group, pod in chart.ray_pods(values).items():
            resources = pod["spec"]["containers"][0]["resources"]
            wanted = {one["name"]: str(one["gpus"]) for one in values["engineWorkers"]}.get(group)
            assert resources["limits"].get("nvidia.com/gpu") == resources["requests"].get("nvidia.com/gpu") == wanted
