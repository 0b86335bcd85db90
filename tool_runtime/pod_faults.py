"""What is wrong with a pod as a sandbox, and why one ended, told from its object. Pure.

The cluster's SandboxTemplate decides what a pod is; the platform only uses it. These are the settings without which a pod is no
sandbox, whatever the canaries in it find: most cannot be seen from inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Object = Mapping[str, Any]


def faults_of(pod: Object, container: str) -> list[str]:
    """What the pod may that it should not, in words; `container` is the one that tools run in."""
    spec = _map(pod.get("spec"))
    return [
        *_of_the_pod(spec),
        *(fault for one in _containers(spec) for fault in _of_a_container(one, spec, container)),
    ]


def ended_by_limit(pod: Object, container: str) -> str:
    """Which limit of the cluster's ended the pod or its container, in words; empty if none did."""
    status = _map(pod.get("status"))
    if status.get("reason") == "Evicted":
        return f"its pod was evicted: {status.get('message', 'no reason given')}"
    for one in status.get("containerStatuses") or []:
        if _map(one).get("name") == container:
            for state in (_map(one.get("state")), _map(one.get("lastState"))):
                if _map(state.get("terminated")).get("reason") == "OOMKilled":
                    return "it used more memory than its pod may"
    return ""


def _of_the_pod(spec: Object) -> Iterator[str]:
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield f"{name} is on"
    for volume in spec.get("volumes") or []:
        if "hostPath" in volume:
            yield f"volume {volume.get('name')} is a directory of the node"
        sources = _map(volume.get("projected")).get("sources") or []
        if any("serviceAccountToken" in source for source in sources):
            yield "a service account's token is mounted (automountServiceAccountToken: false)"


def _of_a_container(container: Object, spec: Object, used: str) -> Iterator[str]:
    name, own, of_pod = container.get("name"), _map(container.get("securityContext")), _map(spec.get("securityContext"))
    if own.get("privileged"):
        yield f"container {name} is privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield f"container {name} may gain privileges (allowPrivilegeEscalation: false)"
    if _map(own.get("capabilities")).get("add"):
        yield f"container {name} has capabilities added"
    if not own.get("runAsNonRoot", of_pod.get("runAsNonRoot")):
        yield f"container {name} may run as root (runAsNonRoot: true)"
    profile = _map(own.get("seccompProfile") or of_pod.get("seccompProfile")).get("type")
    # A runtime with a kernel of its own (gVisor, Kata) needs none.
    if profile not in ("RuntimeDefault", "Localhost") and not spec.get("runtimeClassName"):
        yield f"container {name} has neither a seccomp profile nor a runtime class"
    if name == used and "memory" not in _map(_map(container.get("resources")).get("limits")):
        yield f"container {name} has no memory limit"


def _containers(spec: Object) -> list[Object]:
    kinds = ("containers", "initContainers", "ephemeralContainers")
    return [container for kind in kinds for container in spec.get(kind) or []]


def _map(value: object) -> Object:
    return value if isinstance(value, Mapping) else {}
