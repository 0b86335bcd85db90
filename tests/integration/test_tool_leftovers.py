"""What is left with tool actors is found and released wherever it is, over real Ray Serve."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ray import serve
from ray.serve.handle import DeploymentHandle

from agent_program.ids import DEFAULT_TENANT, ProgramId
from deployments.ray_clients import RayToolClient
from support.tools import state_directory
from tool_runtime.actor import ToolActor
from tool_runtime.config import ToolRuntimeSettings
from tool_runtime.tool_call import ToolCall, ToolProgress, ToolStarted

pytestmark = pytest.mark.integration

PROGRAMS = [ProgramId(f"p{n}") for n in range(6)]


@pytest.fixture
def actors(ray_cluster: None) -> Iterator[DeploymentHandle]:
    """Two tool actors on one state directory, to which Serve sends calls as it likes."""
    with state_directory() as state:
        deployment = serve.deployment(name="Tools", num_replicas=2, ray_actor_options={"num_cpus": 0.1})(ToolActor)
        settings = ToolRuntimeSettings(state_dir=state, warm_sandboxes=0)
        try:
            yield serve.run(deployment.bind(settings, None), name="leftovers", route_prefix=None)
        finally:
            serve.delete("leftovers")


async def test_leftovers_are_found_on_every_actor_and_released_without_knowing_where(actors: DeploymentHandle) -> None:
    tools = RayToolClient(actors)

    async def ignore(_: ToolStarted | ToolProgress) -> None:
        pass

    for program in PROGRAMS:
        await tools.call(
            ToolCall(program_id=program, call_id="1", tool="shell", arguments={"command": "touch file"}), ignore
        )
    assert await tools.held(3600.0) == []
    held = [one for one in await tools.held(0.0) if one.is_live]
    assert sorted(one.program_id for one in held) == PROGRAMS
    assert {one.tenant_id for one in held} == {DEFAULT_TENANT}
    for one in held:
        await tools.release_everywhere(one, delete_workspace=True)
    assert await tools.held(0.0) == []
