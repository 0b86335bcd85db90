"""The backend `kubernetes` where the cluster does what it should not: each failure is told, and leaves neither claim nor pod.

The cluster is `support.cluster`, which is not Kubernetes: what these tests show is that the platform asks for the right things and
copes with the answers. What all backends promise is asked of it in `test_sandbox.py` and `test_tool_actor.py`.
"""

from __future__ import annotations

import asyncio
import copy
import datetime
import io
import tarfile
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agent_program.errors import SandboxUnavailable
from agent_program.ids import DEFAULT_TENANT
from agent_program.tool_events import ToolOutcome
from support.cluster import GOOD_SPEC, FakeCluster, fake_cluster
from support.tools import Program, tool_actor
from support.waiting import wait_for_async
from tool_runtime.actor import ToolActor
from tool_runtime.config import MIB, McpServerSettings, SandboxBackend, SandboxLimits


def _tar(*entries: tarfile.TarInfo) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for entry in entries:
            tar.addfile(entry)
    return archive.getvalue()


def _device() -> tarfile.TarInfo:
    entry = tarfile.TarInfo("device")
    entry.type = tarfile.CHRTYPE
    return entry


HOSTILE = [
    pytest.param(_tar(tarfile.TarInfo("../outside")), id="a name that leads out"),
    pytest.param(_tar(_device()), id="a device"),
    pytest.param(b"no archive at all" * 100, id="no archive"),
]

FOREVER = {"idle_sandbox_sleep_s": 3600.0, "interrupt_grace_s": 0.2}


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with fake_cluster() as running:
        yield running
        assert running.is_empty, f"left behind: {running.claims.keys()}, {running.pods.keys()}"


@asynccontextmanager
async def actor_in(cluster: FakeCluster, **settings: Any) -> AsyncIterator[ToolActor]:
    changes = settings.pop("kubernetes", {})
    chosen = {**FOREVER, **settings}
    async with tool_actor(sandbox=SandboxBackend.KUBERNETES, kubernetes=cluster.settings(**changes), **chosen) as actor:
        yield actor


async def refusal(cluster: FakeCluster, **settings: Any) -> str:
    """Why an actor does not start there."""
    with pytest.raises(SandboxUnavailable) as refused:
        async with actor_in(cluster, **settings):
            pass
    return refused.value.message


class TestStart:
    """An actor whose cluster will not do refuses, and says why."""

    async def test_who_may_not_make_claims_is_told_what_the_server_says(self, cluster: FakeCluster) -> None:
        cluster.refusals["POST", "sandboxclaims"] = (403, 'sandboxclaims is forbidden: User "system:x" cannot create')
        reason = await refusal(cluster)
        assert "tools refuse to run" in reason
        assert "refuses (403): sandboxclaims is forbidden" in reason

    async def test_a_token_that_is_not_accepted(self, cluster: FakeCluster) -> None:
        with tempfile.NamedTemporaryFile("w") as token:
            print("another", file=token, flush=True)
            assert "refuses (401): Unauthorized" in await refusal(cluster, kubernetes={"token_path": token.name})

    async def test_a_token_that_is_not_there(self, cluster: FakeCluster) -> None:
        assert "token /nowhere/token cannot be read" in await refusal(
            cluster, kubernetes={"token_path": "/nowhere/token"}
        )

    async def test_a_cluster_without_agent_sandbox_is_told_apart(self, cluster: FakeCluster) -> None:
        cluster.refusals["POST", "sandboxclaims"] = (404, "404 page not found")
        reason = await refusal(cluster)
        assert "404 page not found" in reason
        assert "are the resources of agent-sandbox installed" in reason

    async def test_an_api_server_that_is_not_there(self, cluster: FakeCluster) -> None:
        assert "cannot be reached" in await refusal(cluster, kubernetes={"api_server": "http://127.0.0.1:9"})

    async def test_an_answer_that_is_no_object(self, cluster: FakeCluster) -> None:
        cluster.refusals["POST", "sandboxclaims"] = (200, "404 not json at all")
        assert "not JSON" in await refusal(cluster)

    async def test_a_pod_that_never_gets_ready_is_given_up_with_its_last_condition(self, cluster: FakeCluster) -> None:
        cluster.looks_until_ready = None
        reason = await refusal(cluster, kubernetes={"start_timeout_s": 0.3})
        assert "no pod was ready within 0.3 s: DependenciesNotReady: Pod is Pending" in reason

    async def test_a_warm_pool_that_is_not_there(self, cluster: FakeCluster) -> None:
        reason = await refusal(cluster, kubernetes={"start_timeout_s": 0.3, "warm_pool": "none"})
        assert "no pod was ready within 0.3 s" in reason

    async def test_who_may_not_run_commands_in_pods(self, cluster: FakeCluster) -> None:
        cluster.refusals["GET", "/exec"] = (403, "pods is forbidden")
        assert "/exec: the API server refuses (403)" in await refusal(cluster)

    async def test_a_server_that_does_not_speak_the_protocol(self, cluster: FakeCluster) -> None:
        cluster.protocols = ("v4.channel.k8s.io",)
        assert "does not speak v5.channel.k8s.io" in await refusal(cluster)

    async def test_an_image_without_python(self, cluster: FakeCluster) -> None:
        reason = await refusal(cluster, kubernetes={"python": "/usr/bin/nothing"})
        assert "the sandbox does not start" in reason
        assert "/usr/bin/nothing" in reason

    async def test_a_pod_without_a_network_policy_is_found_out(self, cluster: FakeCluster) -> None:
        cluster.has_network_policy = False
        reason = await refusal(cluster)
        assert "API server: OPEN reaches" in reason
        assert "the platform: OPEN reaches" in reason

    @pytest.mark.parametrize(
        ("change", "fault"),
        [
            ({"hostNetwork": True}, "hostNetwork is on"),
            ({"securityContext": {"runAsNonRoot": False}}, "may run as root"),
            ({"volumes": [{"name": "node", "hostPath": {"path": "/"}}]}, "volume node is a directory of the node"),
        ],
    )
    async def test_a_template_that_is_careless_is_found_out(
        self, cluster: FakeCluster, change: dict[str, Any], fault: str
    ) -> None:
        cluster.pod_spec = {**copy.deepcopy(GOOD_SPEC), **change}
        assert fault in await refusal(cluster)

    async def test_a_start_that_is_given_up_takes_its_claim_along(self, cluster: FakeCluster) -> None:
        cluster.looks_until_ready = None
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3), actor_in(cluster):
                pass
        await wait_for_async(lambda: _now(cluster.is_empty), what="nothing is left")

    async def test_servers_with_a_command_are_refused_there(
        self, cluster: FakeCluster, caplog: pytest.LogCaptureFixture
    ) -> None:
        servers = {"local": McpServerSettings(command="server")}
        async with actor_in(cluster, mcp_servers=servers) as actor:
            assert not any(spec.name.startswith("local__") for spec in await actor.tools())
        assert "MCP servers with a command have no sandbox in a cluster" in caplog.text


class TestLosses:
    """What goes away while a program uses it."""

    async def test_a_connection_that_drops_ends_the_call_and_the_pod(self, cluster: FakeCluster) -> None:
        async with actor_in(cluster) as actor:
            program = Program(actor)
            running = await program.shell_running("echo begun; sleep 1000")
            pod = cluster.only_pod()
            cluster.drop_connections()
            result = await running
            assert result.outcome is ToolOutcome.INTERRUPTED
            assert "the connection to the pod was lost" in result.output
            assert not pod.processes or all(one.returncode is not None for one in pod.processes)
            assert cluster.is_empty
            assert (await program.shell("echo works")).output.splitlines()[0] == "works"

    async def test_a_pod_that_is_deleted_ends_its_call_with_that_reason(self, cluster: FakeCluster) -> None:
        async with actor_in(cluster) as actor:
            running = await Program(actor).shell_running("sleep 1000")
            await cluster.delete_pod(cluster.only_pod().name)
            result = await running
            assert result.outcome is ToolOutcome.INTERRUPTED
            assert "its pod was deleted" in result.output
            await wait_for_async(lambda: _now(cluster.is_empty), what="the claim is gone")

    async def test_a_container_that_ran_out_of_memory_is_a_limit(self, cluster: FakeCluster) -> None:
        async with actor_in(cluster) as actor:
            running = await Program(actor).shell_running("sleep 1000")
            pod = cluster.only_pod()
            ended = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
            pod.object["status"]["containerStatuses"][0]["lastState"] = ended
            await pod.kill()
            result = await running
            assert result.outcome is ToolOutcome.ERROR
            assert "it used more memory than its pod may" in result.output

    async def test_a_program_that_kills_its_agent_loses_its_pod_alone(self, cluster: FakeCluster) -> None:
        async with actor_in(cluster) as actor:
            program, other = Program(actor), Program(actor)
            await other.shell("A=kept")
            result = await program.shell("kill -9 $PPID; sleep 1000")
            assert result.outcome is ToolOutcome.INTERRUPTED
            assert (await other.shell("echo $A")).output == "kept"
            assert len(cluster.pods) == 1

    async def test_what_was_written_since_the_last_copy_is_lost_with_the_pod_and_told_once(
        self, cluster: FakeCluster
    ) -> None:
        async with actor_in(cluster) as actor:
            program = Program(actor)
            await program.shell("echo one > file")
            assert [name async for name in _names_in(actor, program)] == ["file"]  # which copies it
            await program.shell("echo two > file")
            await cluster.delete_pod(cluster.only_pod().name)
            await wait_for_async(lambda: _now(cluster.is_empty), what="the claim is gone")
            after = await program.shell("cat file")
            assert after.output.startswith("one\n[The sandbox was lost, and with it the files that were written last")
            assert (await program.shell("cat file")).output == "one"

    async def test_a_claim_that_cannot_be_deleted_is_left_to_expire(
        self, cluster: FakeCluster, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with actor_in(cluster) as actor:
            program = Program(actor)
            await program.shell("true")
            cluster.refusals["DELETE", "sandboxclaims"] = (500, "etcd is away")
            await actor.release(program.id, delete_workspace=True)
            assert "could not be deleted; the claim expires within 300 s" in caplog.text
            assert len(cluster.claims) == 1
        await cluster.expire(datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=301))

    async def test_a_platform_that_ends_without_a_word_leaves_claims_that_expire(self, cluster: FakeCluster) -> None:
        async with actor_in(cluster) as actor:
            await Program(actor).shell("true")
            (claim,) = cluster.claims.values()
            lifecycle = claim["spec"]["lifecycle"]
            assert lifecycle["shutdownPolicy"] == "Delete"
            now = datetime.datetime.now(datetime.UTC)
            await cluster.expire(now + datetime.timedelta(seconds=290))
            assert not cluster.is_empty
            await cluster.expire(now + datetime.timedelta(seconds=301))
            assert cluster.is_empty

    async def test_a_claim_is_renewed_while_the_platform_lives(
        self, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with actor_in(cluster) as actor:
            await Program(actor).shell("true")
            (claim,) = cluster.claims.values()
            claim["spec"]["lifecycle"]["shutdownTime"] = before = "2000-01-01T00:00:00Z"
            await actor._launcher.renew_claims()  # type: ignore[attr-defined]
            assert claim["spec"]["lifecycle"]["shutdownTime"] > before


class TestFiles:
    """A workspace that lives in a pod."""

    async def test_files_come_back_in_the_next_pod_with_modes_links_and_odd_names(self, cluster: FakeCluster) -> None:
        async with actor_in(cluster) as actor:
            program = Program(actor)
            await program.shell(
                "mkdir -p a/b; printf x > 'a/b/odd\nname'; chmod 750 a/b; ln -s a/b link; mkfifo fifo; echo run > s; chmod +x s"
            )
            await actor.release(program.id, delete_workspace=False)
            assert cluster.is_empty
            listed = await program.shell("stat -c '%a %F' a/b link s; cat a/b/odd*; ls fifo")
            assert listed.output.splitlines()[:4] == ["750 directory", "777 symbolic link", "755 regular file", "x"]

    async def test_a_snapshot_and_an_import_are_what_the_next_pod_has(self, cluster: FakeCluster) -> None:
        async with actor_in(cluster) as actor:
            program = Program(actor)
            await program.shell("echo one > file")
            kept = await actor.snapshot_workspace(program.id)
            await program.shell("echo two > file; touch more")
            await actor.restore_workspace(program.id, kept)
            assert (await program.shell("cat file; ls")).output.splitlines()[:2] == ["one", "file"]
            await actor.import_workspace(program.id, _tar(tarfile.TarInfo("imported")))
            assert (await program.shell("ls")).output.splitlines()[0] == "imported"

    async def test_a_pod_at_rest_is_copied_without_being_asked(self, cluster: FakeCluster) -> None:
        async with actor_in(cluster, idle_sandbox_sleep_s=0.1) as actor:
            program = Program(actor)
            await program.shell("echo kept > file")
            assert actor._sandboxes is not None
            path = actor._sandboxes._workspaces.path(DEFAULT_TENANT, program.id)
            await wait_for_async(lambda: _now((path / "file").exists()), what="the file is copied")

    async def test_a_workspace_that_is_too_large_is_not_kept_and_the_last_copy_stays(
        self, cluster: FakeCluster, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with actor_in(cluster, limits=SandboxLimits(workspace_bytes_max=MIB)) as actor:
            program = Program(actor)
            await program.shell("echo small > file")
            await actor.release(program.id, delete_workspace=False)
            await program.shell("head -c 3M /dev/zero > large")
            await actor.release(program.id, delete_workspace=False)
            assert "the files of a program" in caplog.text
            assert (await program.shell("ls")).output.splitlines()[0] == "file"

    @pytest.mark.parametrize("archive", HOSTILE)
    async def test_a_pod_that_sends_a_hostile_archive_changes_nothing(
        self, cluster: FakeCluster, archive: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with actor_in(cluster) as actor:
            program = Program(actor)
            await program.shell("echo kept > file")
            await actor.snapshot_workspace(program.id)
            await program.shell("echo more > more")
            cluster.printed_instead = archive
            await actor.release(program.id, delete_workspace=False)
            cluster.printed_instead = None
            assert "the files of a program cannot be kept" in caplog.text
            assert [name async for name in _names_in(actor, program)] == ["file"]


async def _names_in(actor: ToolActor, program: Program) -> AsyncIterator[str]:
    content = b"".join([piece async for piece in actor.export_workspace(program.id)])
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for name in archive.getnames():
            yield name


async def _now(value: bool) -> bool:
    return value
