"""Claims on pods: made, waited for, renewed and deleted.

    SandboxClaim ──► Sandbox ──► pod            deleting or expiring the first takes the others along

A claim expires, and is renewed while the platform lives: what a platform leaves that ends without a word ends soon after it. A pod is
deleted by itself as well, for its template may give it half a minute to end in, and what ran in it must not go on meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

from agent_program.clock import Clock
from tool_runtime.config import KubernetesSettings
from tool_runtime.kubernetes_api import ClusterFault, KubernetesApi

_LOG = logging.getLogger(__name__)

_CLAIMS = "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/{}/sandboxclaims"
_SANDBOXES = "/apis/agents.x-k8s.io/v1beta1/namespaces/{}/sandboxes"
_PODS = "/api/v1/namespaces/{}/pods"
_POD_NAME = "agents.x-k8s.io/pod-name"
#: Between two looks at an object that is awaited: the first, how it grows, the longest.
_LOOK_S, _LOOK_GROWTH, _LOOK_S_MAX = 0.05, 1.5, 1.0
#: How long the end of a pod is waited for, and how often its deletion is tried.
_GONE_S, _DELETIONS_MAX = 8.0, 3


@dataclass(kw_only=True)
class ClaimedPod:
    """A claim, and what is known of its pod so far."""

    claim: str
    #: Empty until the claim is ready.
    name: str = ""
    uid: str = ""
    #: The container that tools run in.
    container: str = ""
    #: The pod as the cluster described it then.
    object: dict[str, Any] = field(default_factory=dict)
    #: What the claim waits for, in the cluster's words.
    condition: str = ""


class PodClaims:
    """The claims of one platform in one namespace."""

    def __init__(self, api: KubernetesApi, settings: KubernetesSettings, clock: Clock) -> None:
        self._api = api
        self._settings = settings
        self._clock = clock
        self._claims, self._sandboxes, self._pods = (
            path.format(settings.namespace) for path in (_CLAIMS, _SANDBOXES, _PODS)
        )

    async def make(self, pod: ClaimedPod) -> None:
        """Make the claim and wait for its pod, for as long as it takes.

        Raises:
            ClusterFault: the API server refuses, or the claim went away.
        """
        try:
            await self._api.request("POST", self._claims, self._claim_object(pod.claim))
        except ClusterFault as exc:
            if exc.http_status == 404:
                raise ClusterFault(
                    f"{exc.message}. Is there a namespace {self._settings.namespace}, and are the resources of agent-sandbox "
                    "installed (sandboxclaims.extensions.agents.x-k8s.io, v1beta1)?",
                    http_status=404,
                ) from exc
            raise
        try:
            sandbox = await self._bound(pod)
            annotations = (await self._api.request("GET", f"{self._sandboxes}/{sandbox}"))["metadata"].get(
                "annotations"
            )
            name = (annotations or {}).get(_POD_NAME) or sandbox
            pod.object = await self._api.request("GET", f"{self._pods}/{name}")
            pod.container = self._settings.container or pod.object["spec"]["containers"][0]["name"]
            pod.name, pod.uid = name, pod.object["metadata"]["uid"]
        except (KeyError, IndexError, TypeError, AttributeError) as exc:
            raise ClusterFault(
                f"the API server describes the pod of claim {pod.claim} in another way than v1beta1"
            ) from exc

    def _claim_object(self, name: str) -> dict[str, Any]:
        return {
            "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
            "kind": "SandboxClaim",
            "metadata": {"name": name, "labels": {"app.kubernetes.io/managed-by": "continuum"}},
            "spec": {"warmPoolRef": {"name": self._settings.warm_pool}, "lifecycle": self._lifecycle()},
        }

    def _lifecycle(self) -> dict[str, str]:
        expires = datetime.datetime.fromtimestamp(self._clock.wall_s() + self._settings.claim_ttl_s, datetime.UTC)
        return {"shutdownTime": expires.strftime("%Y-%m-%dT%H:%M:%SZ"), "shutdownPolicy": "Delete"}

    async def _bound(self, pod: ClaimedPod) -> str:
        """Wait until the claim is ready; returns the name of its Sandbox."""
        async for claim in self._looks(f"{self._claims}/{pod.claim}"):
            status = claim.get("status") or {}
            conditions = {one.get("type"): one for one in status.get("conditions") or []}
            ready, name = conditions.get("Ready") or {}, (status.get("sandbox") or {}).get("name")
            if ready.get("status") == "True" and name:
                return str(name)
            if ready:
                pod.condition = f"{ready.get('reason', '')}: {ready.get('message', '')}"
        raise AssertionError("looking does not end by itself")

    async def _looks(self, path: str) -> AsyncIterator[dict[str, Any]]:
        pause_s = _LOOK_S
        while True:
            yield await self._api.request("GET", path)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * _LOOK_GROWTH, _LOOK_S_MAX)

    async def renew(self, pods: Iterable[ClaimedPod]) -> None:
        """Put off the expiry of claims; one that cannot be is logged, and tried again the next time."""
        for pod in pods:
            try:
                await self._api.request(
                    "PATCH",
                    f"{self._claims}/{pod.claim}",
                    {"spec": {"lifecycle": self._lifecycle()}},
                    content_type="application/merge-patch+json",
                )
            except ClusterFault as exc:
                _LOG.warning("the claim %s was not renewed: %s", pod.claim, exc.message)

    async def look(self, pod: ClaimedPod) -> dict[str, Any] | None:
        """The pod as it is now; None if it is gone or going.

        Raises:
            ClusterFault: the API server does not say.
        """
        try:
            found = await self._api.request("GET", f"{self._pods}/{pod.name}")
        except ClusterFault as exc:
            if exc.http_status == 404:
                return None
            raise
        return None if found["metadata"]["uid"] != pod.uid or found["metadata"].get("deletionTimestamp") else found

    async def delete(self, pod: ClaimedPod) -> None:
        """Delete the claim and its pod, and wait a while until that is gone. What cannot be deleted is logged, and expires."""
        background = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        is_deleted = await self._deleted(f"{self._claims}/{pod.claim}", background)
        if pod.name:
            # After its claim, so that nobody makes it anew; with a second's grace, for the template's may be long.
            soon = {
                "kind": "DeleteOptions",
                "apiVersion": "v1",
                "gracePeriodSeconds": 1,
                "preconditions": {"uid": pod.uid},
            }
            is_deleted &= await self._deleted(f"{self._pods}/{pod.name}", soon) and await self._gone(pod)
        if not is_deleted:
            _LOG.error(
                "pod %s of claim %s could not be deleted; the claim expires within %.0f s",
                *(pod.name or "(none)", pod.claim, self._settings.claim_ttl_s),
            )

    async def _deleted(self, path: str, options: dict[str, Any]) -> bool:
        for attempt in range(_DELETIONS_MAX):
            try:
                await self._api.request("DELETE", path, options)
                return True
            except ClusterFault as exc:
                if exc.http_status in (404, 409):  # it is gone, or another has its name
                    return True
                _LOG.warning("%s (attempt %d of %d)", exc.message, attempt + 1, _DELETIONS_MAX)
                await asyncio.sleep(_LOOK_S * (1 + attempt))
        return False

    async def _gone(self, pod: ClaimedPod) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GONE_S):
                try:
                    async for found in self._looks(f"{self._pods}/{pod.name}"):
                        if found["metadata"]["uid"] != pod.uid:
                            return True
                except ClusterFault as exc:
                    return exc.http_status == 404
        return False
