"""`serve_config.yaml` and the application that it builds: valid by Serve's own schema, and without side effects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from pydantic import ValidationError
from ray import serve
from ray._common.utils import import_attr
from ray.serve import Application
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve._private.application_state import override_deployment_info
from ray.serve._private.build_app import build_app as flatten
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve.schema import ServeDeploySchema

from continuum_router.config import RouterSettings
from deployments.app import build_app
from deployments.settings import PlatformSettings
from support.platform import ROOT

pytestmark = pytest.mark.integration


def deployments_of(**settings: Any) -> dict[str, Any]:
    """The application's deployments by name, as Serve sees them."""
    application = build_app(PlatformSettings.model_validate(settings))
    return {deployment.name: deployment for deployment in flatten(application, name="continuum").deployments}


def test_the_configuration_is_valid_by_serves_schema_and_by_ours() -> None:
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    (application,) = ServeDeploySchema.model_validate(config).applications
    assert application.import_path == "deployments.app:build_app"
    PlatformSettings.model_validate(application.args)


def test_serve_validates_the_settings_that_it_passes() -> None:
    with pytest.raises(ValidationError, match=r"engine\.modle"):
        call_user_app_builder_with_args_if_necessary(build_app, {"engine": {"modle": "x"}})
    assert call_user_app_builder_with_args_if_necessary(build_app, {"replicas": {"engine": 3}})


def test_building_starts_nothing_and_writes_nothing(tmp_path: Path) -> None:
    store, tools = tmp_path / "store", tmp_path / "tools"
    had_ray = ray.is_initialized()  # another test's, in this process
    deployments_of(store={"data_dir": str(store)}, tools={"state_dir": str(tools)})
    assert ray.is_initialized() is had_ray
    assert list(tmp_path.iterdir()) == []


def test_the_store_is_a_deployment_only_where_it_is_embedded() -> None:
    parts = {"Ingress", "ProgramRunner", "EngineReplica", "ToolActor"}
    assert set(deployments_of()) == {*parts, "EmbeddedStore"}
    assert set(deployments_of(store={"redis_url": "redis://store:6379/0"})) == parts


def test_programs_are_kept_on_their_engine_and_on_their_tool_actor() -> None:
    deployments = deployments_of(store={"redis_url": "redis://store:6379/0"})
    for name, namespace in (("EngineReplica", "engine"), ("ToolActor", "tools")):
        router = deployments[name]._deployment_config.request_router_config
        assert router.get_request_router_class().__name__ == "ProgramAffinityRouter"
        assert router.request_router_kwargs["namespace"] == namespace
        assert router.request_router_kwargs["store_url"] == "redis://store:6379/0"


def test_the_number_of_engines_is_fixed_or_follows_their_working_sets() -> None:
    fixed = deployments_of(replicas={"engine": 3})["EngineReplica"]
    assert (fixed.num_replicas, fixed._deployment_config.autoscaling_config) == (3, None)
    scaled = deployments_of(router={"autoscaling": {"replicas_min": 2, "replicas_max": 5}})["EngineReplica"]
    config = scaled._deployment_config.autoscaling_config
    assert (config.min_replicas, config.max_replicas) == (2, 5)
    assert config.policy.policy_function == "continuum_router.ray_autoscaling:WorkingSetPolicy"


@pytest.mark.parametrize(
    ("executor", "gpus", "bundles"),
    [("mp", 4, None), ("ray", 0, [{"CPU": 2.0, "GPU": 1.0, "accelerator_type:H200": 0.001}] * 4)],
)
def test_a_tensor_parallel_engine_gets_its_gpus(
    executor: str, gpus: int, bundles: list[dict[str, float]] | None
) -> None:
    engine = {"model": "m", "device": "gpu", "tensor_parallel_size": 4, "tensor_parallel_executor": executor}
    replica = deployments_of(engine=engine, replicas={"engine_cpus": 2, "engine_gpu_type": "H200"})["EngineReplica"]
    config = replica._replica_config
    assert config.ray_actor_options.get("num_gpus", 0) == gpus
    assert config.ray_actor_options["num_cpus"] == 2
    assert config.placement_group_bundles == bundles
    assert config.placement_group_strategy == ("STRICT_PACK" if bundles else None)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> ServeDeploySchema:
    """What `serve build deployments.app:app` writes."""
    output = tmp_path_factory.mktemp("built") / "built.yaml"
    command = [str(Path(sys.executable).with_name("serve")), "build", "deployments.app:app", "-o", str(output)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return ServeDeploySchema.model_validate(yaml.safe_load(output.read_text()))


def test_serve_build_describes_the_application(built: ServeDeploySchema) -> None:
    (application,) = built.applications
    assert {deployment.name for deployment in application.deployments} >= {"Ingress", "EngineReplica", "ToolActor"}


@pytest.mark.usefixtures("ray_cluster")
def test_what_serve_build_writes_deploys_as_the_application_itself(built: ServeDeploySchema) -> None:
    """Serve's controller imports the path and lays the written options over the code's: each must be accepted, and, as
    nobody has edited the file, change nothing."""
    serve.start()  # the laying over asks the running Serve for its options
    (config,) = built.applications
    application = import_attr(config.import_path)
    assert isinstance(application, Application), "an application, not a builder, which `serve build` does not take"
    infos = {
        deployment.name: DeploymentInfo(
            deployment_config=deployment._deployment_config,
            replica_config=deployment._replica_config,
            start_time_ms=0,
            deployer_job_id="job",
        )
        # Handles would bring a router each; what a constructor is given plays no part here.
        for deployment in flatten(
            application, name=config.name, make_deployment_handle=lambda deployment, _: deployment.name
        ).deployments
    }
    overridden = override_deployment_info(infos, config)
    assert set(overridden) == set(infos)
    for name, info in infos.items():
        before, after = (_options(one) for one in (info, overridden[name]))
        assert after == before, name
        assert overridden[name].replica_config.ray_actor_options == info.replica_config.ray_actor_options


def _options(info: DeploymentInfo) -> dict[str, Any]:
    """A deployment's options as plain values; who set which is left out."""
    options = info.deployment_config.model_dump(exclude={"user_configured_option_names", "request_router_config"})
    router = info.deployment_config.request_router_config
    keywords = dict(router.request_router_kwargs)
    if "settings" in keywords:  # plain values on their way through a file: a set becomes a list
        keywords["settings"] = RouterSettings.model_validate(keywords["settings"])
    return {**options, "router": (router.get_request_router_class().__name__, keywords)}
