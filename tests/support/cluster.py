"""A small Kubernetes API server with agent-sandbox in it: what the backend `kubernetes` asks of one, on loopback.

It keeps claims, Sandboxes and pods as the real controllers do as far as the platform can see: a claim becomes ready after some
looks, deleting it deletes the rest, an expired one is deleted. A pod is a directory, and a command in it a process of this machine
under bubblewrap, in namespaces of its own: what an agent does in there (`kill(-1)`!) reaches nothing else. Not a sandbox to rely on:
there is no system-call filter.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

from tool_runtime.backends import find_bwrap
from tool_runtime.bubblewrap import SYSTEM_LINKS, find_python, python_prefix
from tool_runtime.config import KubernetesSettings

NAMESPACE, WARM_POOL, TOKEN = "sandboxes", "plain", "a-token"
_CLAIMS = f"/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/{NAMESPACE}/sandboxclaims"
_SANDBOXES = f"/apis/agents.x-k8s.io/v1beta1/namespaces/{NAMESPACE}/sandboxes"
_PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"

#: A pod as a careful SandboxTemplate makes it.
GOOD_SPEC: dict[str, Any] = {
    "automountServiceAccountToken": False,
    "runtimeClassName": "gvisor",
    "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    "containers": [
        {
            "name": "tools",
            "resources": {"limits": {"memory": "1Gi"}},
            "securityContext": {"allowPrivilegeEscalation": False},
        }
    ],
}


class FakePod:
    """A pod: a directory, and what runs in it."""

    def __init__(self, name: str, directory: Path, spec: dict[str, Any]) -> None:
        self.name = name
        self.directory = directory
        self.processes: set[asyncio.subprocess.Process] = set()
        self.sockets: set[web.WebSocketResponse] = set()
        self.object: dict[str, Any] = {
            "metadata": {"name": name, "uid": f"uid-{name}"},
            "spec": spec,
            "status": {"phase": "Running", "containerStatuses": [{"name": "tools", "state": {"running": {}}}]},
        }
        for part in ("workspace", "tmp"):
            (directory / part).mkdir(parents=True)

    async def kill(self) -> None:
        """SIGKILL to everything in it."""
        for process in list(self.processes):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


class FakeCluster:
    """One API server. `url` is where it answers."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.url = ""
        self.claims: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, FakePod] = {}
        #: What pods are made like, and whether they share this machine's network, as with no network policy.
        self.pod_spec = GOOD_SPEC
        self.has_network_policy = True
        #: Looks at a claim until it is ready; None for never.
        self.looks_until_ready: int | None = 2
        #: Answers instead of the real ones: (method, part of the path) → status and body.
        self.refusals: dict[tuple[str, str], tuple[int, str]] = {}
        self.protocols = ("v5.channel.k8s.io",)
        #: What commands print from now on, in place of running: a pod whose program has taken over everything in it.
        self.printed_instead: bytes | None = None
        self.requests: list[tuple[str, str]] = []
        self._looks: dict[str, int] = {}

    def settings(self, **changes: Any) -> KubernetesSettings:
        """Settings that lead here."""
        token = self._directory / "token"
        token.write_text(TOKEN + "\n")
        values = {"namespace": NAMESPACE, "warm_pool": WARM_POOL, "api_server": self.url, "ca_path": None}
        values |= {"token_path": token, "python": str(find_python()), "start_timeout_s": 20.0}
        return KubernetesSettings(**{**values, **changes})

    @property
    def is_empty(self) -> bool:
        """Nothing is left of anything."""
        return not self.claims and not self.pods

    def only_pod(self) -> FakePod:
        (pod,) = self.pods.values()
        return pod

    async def delete_pod(self, name: str) -> None:
        """As `kubectl delete pod` does, or a node that goes away."""
        await self.pods.pop(name).kill()

    def drop_connections(self) -> None:
        """Cut every stream, and leave what runs in the pods running."""
        for pod in self.pods.values():
            for one in pod.sockets:
                transport = one._req.transport if one._req is not None else None
                if transport is not None:
                    transport.abort()

    async def expire(self, now: datetime.datetime) -> None:
        """What the controller does to claims whose time has come."""
        for name, claim in list(self.claims.items()):
            if datetime.datetime.fromisoformat(claim["spec"]["lifecycle"]["shutdownTime"]) <= now:
                await self._delete_claim(name)

    # The server

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._checked])
        app.router.add_post(_CLAIMS, self._post_claim)
        app.router.add_get(_CLAIMS + "/{name}", self._get_claim)
        app.router.add_patch(_CLAIMS + "/{name}", self._patch_claim)
        app.router.add_delete(_CLAIMS + "/{name}", self._handle_delete_claim)
        app.router.add_get(_SANDBOXES + "/{name}", self._get_sandbox)
        app.router.add_get(_PODS + "/{name}", self._get_pod)
        app.router.add_delete(_PODS + "/{name}", self._handle_delete_pod)
        app.router.add_get(_PODS + "/{name}/exec", self._exec)
        return app

    @web.middleware
    async def _checked(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        self.requests.append((request.method, request.path))
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _status(401, "Unauthorized")
        for (method, part), (code, body) in self.refusals.items():
            if request.method == method and part in request.path:
                return _status(code, body) if not body.startswith("404") else web.Response(status=code, text=body)
        response: web.StreamResponse = await handler(request)
        return response

    async def _post_claim(self, request: web.Request) -> web.Response:
        claim = await request.json()
        name = claim["metadata"]["name"]
        if claim["spec"]["warmPoolRef"]["name"] != WARM_POOL:
            self._looks[name] = -(10**9)
        else:
            pod = f"plain-{len(self.requests)}"
            self.pods[pod] = FakePod(pod, self._directory / pod, self.pod_spec)
            claim["status"] = {"sandbox": {"name": pod}}
        self.claims[name] = claim
        return web.json_response(claim, status=201)

    async def _get_claim(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self.claims:
            return _status(404, f'sandboxclaims "{name}" not found')
        claim = self.claims[name]
        self._looks[name] = self._looks.get(name, 0) + 1
        is_ready = self.looks_until_ready is not None and self._looks[name] > self.looks_until_ready
        condition = {"type": "Ready", "status": "True" if is_ready else "False"}
        condition |= {
            "reason": "DependenciesReady" if is_ready else "DependenciesNotReady",
            "message": "Pod is Pending",
        }
        claim.setdefault("status", {})["conditions"] = [condition]
        return web.json_response(claim)

    async def _patch_claim(self, request: web.Request) -> web.Response:
        assert request.content_type == "application/merge-patch+json"
        claim = self.claims[request.match_info["name"]]
        claim["spec"]["lifecycle"].update((await request.json())["spec"]["lifecycle"])
        return web.json_response(claim)

    async def _handle_delete_claim(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self.claims:
            return _status(404, "not found")
        await self._delete_claim(name)
        return web.json_response({"status": "Success"})

    async def _delete_claim(self, name: str) -> None:
        pod = self.claims.pop(name).get("status", {}).get("sandbox", {}).get("name")
        if pod in self.pods:
            await self.delete_pod(pod)

    async def _get_sandbox(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        return web.json_response({"metadata": {"name": name, "annotations": {"agents.x-k8s.io/pod-name": name}}})

    async def _get_pod(self, request: web.Request) -> web.Response:
        pod = self.pods.get(request.match_info["name"])
        return _status(404, "pods not found") if pod is None else web.json_response(pod.object)

    async def _handle_delete_pod(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self.pods:
            return _status(404, "pods not found")
        await self.delete_pod(name)
        return web.json_response({"status": "Success"})

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return _status(404, "pods not found")
        stream = web.WebSocketResponse(protocols=self.protocols, max_msg_size=64 * 1024)
        await stream.prepare(request)
        command = request.query.getall("command")
        if self.printed_instead is not None:
            (pod.directory / "tmp" / "printed").write_bytes(self.printed_instead)
            command = ["cat", "/tmp/printed"]
        process = await asyncio.create_subprocess_exec(
            *self._in_pod(pod, command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": "/usr/bin:/bin", "SECRET_OF_THE_TEMPLATE": "1"},
        )
        pod.processes.add(process)
        pod.sockets.add(stream)
        assert process.stdout
        assert process.stderr
        outputs = [
            asyncio.create_task(_carry(process.stdout, stream, 1)),
            asyncio.create_task(_carry(process.stderr, stream, 2)),
        ]
        typing = asyncio.create_task(_type(stream, process))
        try:
            await asyncio.gather(*outputs)
            code = await process.wait()
            if not stream.closed and pod.name in self.pods:
                await stream.send_bytes(b"\x03" + json.dumps(_end_of(code)).encode())
        except (ConnectionError, OSError):
            pass  # the client hung up; the command notices that, or ends with its pod
        finally:
            typing.cancel()
            for task in (*outputs, typing):
                task.cancel()
            await asyncio.gather(*outputs, typing, return_exceptions=True)
            pod.sockets.discard(stream)
            await stream.close()
        return stream

    def _in_pod(self, pod: FakePod, command: list[str]) -> list[str]:
        words = [str(find_bwrap(None)), "--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000"]
        words += [] if self.has_network_policy else ["--share-net"]
        words += ["--die-with-parent", "--new-session", "--ro-bind", "/usr", "/usr"]
        for path in (Path("/", name) for name in SYSTEM_LINKS):
            if path.exists():
                words += (
                    ["--symlink", str(path.readlink()), str(path)]
                    if path.is_symlink()
                    else ["--ro-bind", str(path), str(path)]
                )
        prefix = python_prefix(find_python())
        words += ["--ro-bind", str(prefix), str(prefix)] if prefix is not None else []
        words += ["--proc", "/proc", "--dev", "/dev", "--bind", str(pod.directory / "tmp"), "/tmp"]
        return [*words, "--bind", str(pod.directory / "workspace"), "/workspace", "--", *command]


async def _carry(output: asyncio.StreamReader, stream: web.WebSocketResponse, channel: int) -> None:
    while data := await output.read(32 * 1024):
        await stream.send_bytes(bytes((channel,)) + data)


async def _type(stream: web.WebSocketResponse, process: asyncio.subprocess.Process) -> None:
    """What the client sends, to the command's standard input, which ends with the connection."""
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):
        async for message in stream:
            if message.type is not WSMsgType.BINARY or message.data == b"\xff\x00":
                break
            assert message.data[0] == 0
            process.stdin.write(message.data[1:])
            await process.stdin.drain()
    process.stdin.close()


def _end_of(code: int) -> dict[str, Any]:
    if code == 0:
        return {"status": "Success", "metadata": {}}
    return {
        "status": "Failure",
        "reason": "NonZeroExitCode",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
    }


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "status": "Failure", "code": code, "message": message}, status=code)


@asynccontextmanager
async def fake_cluster() -> AsyncIterator[FakeCluster]:
    """A cluster that runs until the end of the block, and then has nothing running in it."""
    with tempfile.TemporaryDirectory(prefix="ct-cluster-") as directory:
        cluster = FakeCluster(Path(directory))
        runner = web.AppRunner(cluster.app(), shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        cluster.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield cluster
        finally:
            for name in list(cluster.pods):
                await cluster.delete_pod(name)
            await runner.cleanup()
