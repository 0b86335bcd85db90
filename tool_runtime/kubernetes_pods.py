"""Sandboxes as pods: claim one, run the agent in it, carry its stream, and see that it is gone at the end.

    claim ──► Ready ──► Sandbox ──► pod ──► exec: the agent ──► a local socket, as from the launcher
      └─ renewed while the platform lives; expires, and takes all of it along, when it does not

The end of a sandbox, however it comes (asked for, the agent ended, the connection broke, the pod was deleted), is one sequence:
the stream is closed, the claim deleted, the pod deleted with a second's grace, and `exited` set when the pod is no more. A program
that loses its connection therefore loses its pod: what still ran in it could be neither seen nor stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

from agent_program.clock import Clock
from agent_program.errors import SandboxUnavailable
from tool_runtime.config import KubernetesSettings, SandboxLimits
from tool_runtime.kubernetes_api import Channel, ClusterFault, KubernetesApi, PodCommand
from tool_runtime.kubernetes_backend import ORDER, KubernetesBackend, command
from tool_runtime.pod_claims import ClaimedPod, PodClaims
from tool_runtime.pod_faults import ended_by_limit, faults_of
from tool_runtime.sandbox import SpawnPlan
from tool_runtime.spawning import Exit, Spawned

_LOG = logging.getLogger(__name__)

_STDERR_BYTES_MAX = 4096
_READ_BYTES = 64 * 1024


class _Pod:
    """A pod that was claimed, and the stream to the agent in it."""

    def __init__(self, claimed: ClaimedPod) -> None:
        self.claimed = claimed
        self.command: PodCommand | None = None
        self.ours: socket.socket | None = None
        self.child: Spawned | None = None
        self.stderr = b""
        #: Why its stream ended, where the connection is to blame.
        self.fault = ""
        self.is_asked = False
        self.pumps: list[asyncio.Task[None]] = []
        self.ending: asyncio.Task[None] | None = None


class KubernetesPods:
    """`Launcher` and `RemoteFiles` over a cluster. Belongs to one event loop."""

    def __init__(
        self,
        api: KubernetesApi,
        backend: KubernetesBackend,
        settings: KubernetesSettings,
        limits: SandboxLimits,
        clock: Clock,
    ) -> None:
        self._api = api
        self.backend = backend
        self._settings = settings
        self._limits = limits
        self._claims = PodClaims(api, settings, clock)
        self._pods: dict[str, _Pod] = {}
        #: Claims that nobody waits for any more and that are being deleted.
        self._endings: set[asyncio.Task[None]] = set()
        self._renewing: asyncio.Task[None] | None = None

    @property
    def files(self) -> KubernetesPods:
        """Pods have files of their own."""
        return self

    @property
    def api_address(self) -> tuple[str, int]:
        """Host and port of the API server, which no sandbox may reach."""
        return self._api.address

    async def spawn(self, plan: SpawnPlan) -> Spawned:
        """Claim a pod and start `plan` in it.

        Raises:
            SandboxUnavailable: there is none to be had in time, or it cannot be used; the claim is given up.
        """
        pod = _Pod(ClaimedPod(claim=f"continuum-{secrets.token_hex(8)}"))
        self._pods[pod.claimed.claim] = pod
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew())
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                await self._claims.make(pod.claimed)
                found = faults_of(pod.claimed.object, pod.claimed.container)
                if found:
                    raise SandboxUnavailable(f"the cluster's pod is no sandbox: {'; '.join(found)}")
                pod.command = await self._execute(pod, plan.argv, plan.own_blobs[ORDER])
        except BaseException as exc:
            await asyncio.shield(self._end(pod))
            if isinstance(exc, TimeoutError):
                waited_s, why = self._settings.start_timeout_s, pod.claimed.condition or "its claim has no condition"
                raise SandboxUnavailable(f"no pod was ready within {waited_s:g} s: {why}") from exc
            raise
        return self._connected(pod)

    async def watch(self, child: Spawned, *, is_busy: bool) -> None:
        """Memory is the cluster's to watch."""

    async def kill(self, child: Spawned) -> None:
        """Delete the pod; `child.exited` is set when it is gone."""
        pod = self._pods.get(child.id)
        if pod is not None:
            pod.is_asked = True
            self._end(pod)

    async def close(self) -> None:
        """Delete every pod, wait for that, and hang up."""
        if self._renewing is not None:
            self._renewing.cancel()
        for pod in list(self._pods.values()):
            pod.is_asked = True
            self._end(pod)
        await asyncio.gather(*self._endings, return_exceptions=True)
        await self._api.close()

    # Files

    async def copy_in(self, child: Spawned, archive: AsyncIterator[bytes]) -> None:
        """Unpack `archive` in the pod.

        Raises:
            SandboxUnavailable: it cannot be done.
        """
        async with self._helper(child, self.backend.order_to_receive()) as running:
            async for piece in archive:
                await running.send(piece)
            await running.send_end()
            async for _ in _stdout_of(running):
                pass  # it prints nothing; this waits for its end

    async def copy_out(self, child: Spawned) -> AsyncGenerator[bytes, None]:
        """The pod's workspace as a tar.

        Raises:
            SandboxUnavailable: meanwhile.
        """
        async with self._helper(child, self.backend.order_to_send(self._limits)) as running:
            async for piece in _stdout_of(running):
                yield piece

    @contextlib.asynccontextmanager
    async def _helper(self, child: Spawned, order: bytes) -> AsyncIterator[PodCommand]:
        pod = self._pods.get(child.id)
        if pod is None or pod.ending is not None:
            raise SandboxUnavailable("the pod is gone")
        running = await self._execute(pod, command(self._settings.python), order)
        try:
            yield running
        finally:
            await running.close()

    async def _execute(self, pod: _Pod, argv: tuple[str, ...], order: bytes) -> PodCommand:
        running = await self._api.execute(self._settings.namespace, pod.claimed.name, pod.claimed.container, argv)
        try:
            await running.send(order)
        except BaseException:
            await running.close()
            raise
        return running

    # The stream

    def _connected(self, pod: _Pod) -> Spawned:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        pod.ours = ours
        pod.child = Spawned(
            id=pod.claimed.claim, pid=None, socket=theirs, exited=asyncio.get_running_loop().create_future()
        )
        pod.pumps = [asyncio.create_task(self._pump(pod, carry)) for carry in (self._to_pod, self._from_pod)]
        return pod.child

    async def _pump(self, pod: _Pod, carry: Callable[[_Pod], Awaitable[None]]) -> None:
        try:
            await carry(pod)
        except ClusterFault as exc:
            pod.fault = pod.fault or exc.message
        except OSError:
            pass  # the other end of the socket was closed
        self._end(pod)

    async def _to_pod(self, pod: _Pod) -> None:
        assert pod.ours is not None
        assert pod.command is not None
        while data := await asyncio.get_running_loop().sock_recv(pod.ours, _READ_BYTES):
            await pod.command.send(data)

    async def _from_pod(self, pod: _Pod) -> None:
        assert pod.ours is not None
        assert pod.command is not None
        while (message := await pod.command.receive()) is not None:
            channel, data = message
            if channel is Channel.STDOUT:
                await asyncio.get_running_loop().sock_sendall(pod.ours, data)
            else:
                pod.stderr = (pod.stderr + data)[:_STDERR_BYTES_MAX]
        if pod.command.end is None:
            pod.fault = "the connection to the pod was lost"

    # The end

    def _end(self, pod: _Pod) -> asyncio.Task[None]:
        """Begin the end of a pod, if it has not begun."""
        if pod.ending is None:
            pod.ending = asyncio.create_task(self._finish(pod))
            self._endings.add(pod.ending)
            pod.ending.add_done_callback(self._endings.discard)
        return pod.ending

    async def _finish(self, pod: _Pod) -> None:
        end = Exit(status=None, stderr="how it ended is not known")
        try:
            if pod.ours is not None:
                pod.ours.shutdown(socket.SHUT_RDWR)  # whoever reads its stream learns of the end now
            if pod.command is not None:
                await pod.command.close()
            end = await self._last_words(pod)
            await self._claims.delete(pod.claimed)
        finally:
            for pump in pod.pumps:
                pump.cancel()
            await asyncio.gather(*pod.pumps, return_exceptions=True)
            if pod.ours is not None:
                pod.ours.close()
            del self._pods[pod.claimed.claim]
            if pod.child is not None and not pod.child.exited.done():
                pod.child.exited.set_result(end)

    async def _last_words(self, pod: _Pod) -> Exit:
        """What is known of the end of a pod that was not asked to end."""
        said = pod.stderr.decode("utf-8", "replace")
        if pod.is_asked or not pod.claimed.name:
            return Exit(status=None, stderr=said)
        ended = pod.command.end if pod.command is not None else None
        why, limit = pod.fault or (ended.message if ended is not None else ""), ""
        try:
            found = await self._claims.look(pod.claimed)
            if found is None:
                why = "its pod was deleted"
            else:
                limit = ended_by_limit(found, pod.claimed.container)
        except ClusterFault as exc:
            why = "; ".join(part for part in (why, exc.message) if part)
        words = "; ".join(part for part in (why, said.strip()) if part)
        return Exit(status=ended.exit_code if ended is not None else None, stderr=words, reason=limit)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._settings.claim_ttl_s / 3)
            await self.renew_claims()

    async def renew_claims(self) -> None:
        """Put off the expiry of every claim; done again and again while there are any."""
        await self._claims.renew([pod.claimed for pod in self._pods.values()])


async def _stdout_of(running: PodCommand) -> AsyncIterator[bytes]:
    """What a helper prints; raises SandboxUnavailable if it does not end well."""
    said = b""
    while (message := await running.receive()) is not None:
        channel, data = message
        if channel is Channel.STDOUT:
            yield data
        else:
            said = (said + data)[:_STDERR_BYTES_MAX]
    if running.end is None:
        raise ClusterFault("the connection to the pod was lost")
    if running.end.exit_code != 0:
        raise SandboxUnavailable(said.decode("utf-8", "replace").strip() or running.end.message)
