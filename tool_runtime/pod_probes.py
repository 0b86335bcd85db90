"""Canaries for sandboxes that are pods: what the cluster must have closed, tried before an actor takes calls.

What can be told from outside is told of every pod (`pod_faults.py`): root, privileges, the node's namespaces and directories, a token, a
missing limit. Here one is asked from inside, for what the network policy is for: the API server, the cloud's metadata service and the
platform's own pods must not be reached. Without a policy that is enforced all three are, and the backend is refused.

Addresses that drop packets are waited for, at most two seconds each and all at once.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from agent_program.errors import SandboxUnavailable
from tool_runtime import probes
from tool_runtime.config import OutputLimits, SandboxLimits
from tool_runtime.kubernetes_backend import KubernetesBackend
from tool_runtime.kubernetes_pods import KubernetesPods
from tool_runtime.live_sandbox import LiveSandbox
from tool_runtime.sandbox import SandboxSpec
from tool_runtime.workspaces import Workspaces

_NAMES = ("API server", "metadata service", "the platform", "service account token", "root user", "own workspace")

_SCRIPT = r"""
import os, socket, threading

def reached(addresses):
    found = []
    def connect(address):
        try:
            socket.create_connection(address, timeout=2).close()
            found.append(address)
        except OSError:
            pass
    threads = [threading.Thread(target=connect, args=(tuple(address),)) for address in addresses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return f"reaches {found}" if found else None

def tell(name, answer):
    print(f"{name}=held" if not answer else f"{name}=OPEN {answer}")

tell("API server", reached(API_SERVER))
tell("metadata service", reached(METADATA))
tell("the platform", reached(PLATFORM))
tell("service account token", os.path.exists("/var/run/secrets/kubernetes.io/serviceaccount/token") and "is mounted")
tell("root user", os.getuid() == 0 and "runs as uid 0")
with open("canary", "w") as own:
    own.write("works")
tell("own workspace", open("canary").read() != "works" and "cannot be written")
"""
_METADATA = (("169.254.169.254", 80), ("fd00:ec2::254", 80), ("metadata.google.internal", 80))


async def failures(
    backend: KubernetesBackend,
    pods: KubernetesPods,
    workspaces: Workspaces,
    limits: SandboxLimits,
    *,
    start_timeout_s: float,
) -> list[str]:
    """What is open in the cluster's pods, or why there are none; empty if they are fit for use."""
    workspace = workspaces.uploads / secrets.token_hex(8)  # never made: nothing is copied
    spec = SandboxSpec(workspace=workspace, uid=None, limits=limits)
    try:
        sandbox = await LiveSandbox.start(pods, backend.plan(spec), timeout_s=start_timeout_s)
        try:
            host, port = pods.api_address
            api = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            with _bait([(host, port), *((str(address[0]), port) for *_, address in api)]) as settings:
                answers = await probes.ask(sandbox, _SCRIPT, settings, OutputLimits())
        finally:
            await sandbox.close()
    except SandboxUnavailable as exc:
        return [exc.message]
    return answers.faults(_NAMES)


@contextmanager
def _bait(api: list[tuple[str, int]]) -> Iterator[dict[str, object]]:
    """A listener on this machine's own address, and the addresses that must not be reached."""
    with socket.create_server(("", 0)) as listener, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
        unsent.connect(api[0])  # nothing is sent: it tells which of this machine's addresses leads to the cluster
        own = (unsent.getsockname()[0], listener.getsockname()[1])
        yield {"API_SERVER": api, "METADATA": list(_METADATA), "PLATFORM": [own]}
