"""The Kubernetes backend: each sandbox is a pod of kubernetes-sigs/agent-sandbox. Only where the settings name it.

What keeps a program in is the cluster's doing, by its SandboxTemplate: the runtime class, the security context, the network policy,
the limits. The platform claims a pod (`kubernetes_pods.py`), looks at it (`pod_faults.py`, `pod_probes.py`), and sends its agent in;
the image needs Python and bash and nothing of ours.

The plan is one command for the pod: a Python that reads an *order* from its standard input, a line with its length and then JSON,
writes the modules in it to a directory of its own, and does what it says. After that, standard input and output are the stream to
the agent, or the archive that goes in or out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from agent_program.errors import SandboxUnavailable
from tool_runtime.bubblewrap import ENVIRONMENT, rlimits
from tool_runtime.config import SandboxLimits
from tool_runtime.sandbox import WORKSPACE_INSIDE, KillScope, SandboxSpec, SpawnPlan

#: The one blob of a plan: what the launcher sends first.
ORDER = "order"
#: Of the image's own environment, where it has them; the rest of it is not for programs.
_KEPT = ("PATH", "LANG", "LC_ALL", "TZ")
#: The kernel counts all processes of a user on the node, those of other pods included: their number is the cluster's to limit.
_NO_LIMIT = 2**22

_START = """
import json, os, sys, tempfile
source, data = sys.stdin.buffer.raw, b""
size = int(source.readline())
while len(data) < size:
    piece = source.read(size - len(data))
    if not piece:
        sys.exit("the platform hung up")
    data += piece
order = json.loads(data)
home = tempfile.mkdtemp(prefix=".agent-")
for name, text in order["files"].items():
    path = os.path.join(home, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
kept = {name: os.environ[name] for name in order["kept"] if name in os.environ}
os.environ.clear()
os.environ.update({**order["environment"], **kept})
os.makedirs(order["cwd"], exist_ok=True)
os.chdir(order["cwd"])
control, replies = os.dup(0), os.dup(1)
nothing = os.open(os.devnull, os.O_RDWR)
os.dup2(nothing, 0)
os.dup2(nothing, 1)
os.close(nothing)
sys.path.insert(0, home)
del source, data, piece
exec(order["task"])
"""
_AGENT = 'from tool_runtime.inside import agent; agent.main("", control, order["limits"], "domain", "0", None, replies)'
_SEND = 'from tool_runtime.inside import archive; archive.send(replies, ".", *order["arguments"])'
_RECEIVE = 'from tool_runtime.inside import archive; archive.receive(control, ".")'


class KubernetesBackend:
    """Sandboxes that a cluster makes."""

    name = "kubernetes"
    isolates = True
    has_own_view = True

    def __init__(self, python: str) -> None:
        """`python` is how it is called in the pods' image."""
        self._python = python
        package = Path(__file__).parent / "inside"
        self._files = {f"tool_runtime/inside/{path.name}": path.read_text() for path in sorted(package.glob("*.py"))}

    def plan(self, spec: SandboxSpec) -> SpawnPlan:
        """The command that runs the agent.

        Raises:
            SandboxUnavailable: `spec` is for a server, which would need the program's files beside it; pods share none.
        """
        if spec.server is not None:
            raise SandboxUnavailable("MCP servers with a command have no sandbox in a cluster; give them a url")
        limits = rlimits(spec.limits, processes_of_user_max=_NO_LIMIT)
        return SpawnPlan(
            executable=self._python,
            argv=command(self._python),
            own_blobs={ORDER: self._order(_AGENT, limits=limits)},
            cwd=WORKSPACE_INSIDE,
            memory_bytes_max=spec.limits.memory_bytes_max,
            cgroup_processes_max=spec.limits.processes_max,
            # Its processes are the only ones that it may signal; the namespace's first one, which is not the agent, is passed over.
            kill_scope=KillScope.DOMAIN,
        )

    def order_to_send(self, limits: SandboxLimits) -> bytes:
        """What has the command write the workspace to its output, as a tar."""
        return self._order(_SEND, arguments=[str(limits.workspace_bytes_max), str(limits.workspace_files_max)])

    def order_to_receive(self) -> bytes:
        """What has the command unpack a tar from its input into the workspace."""
        return self._order(_RECEIVE)

    def _order(self, task: str, *, limits: str = "", arguments: Sequence[str] = ()) -> bytes:
        order = json.dumps(
            {
                "task": task,
                "files": self._files,
                "kept": _KEPT,
                "environment": ENVIRONMENT,
                "cwd": WORKSPACE_INSIDE,
                "limits": limits,
                "arguments": arguments,
            }
        ).encode()
        return b"%d\n%s" % (len(order), order)


def command(python: str) -> tuple[str, ...]:
    """The command line for the pod, whatever the order."""
    return python, "-I", "-S", "-B", "-c", _START
