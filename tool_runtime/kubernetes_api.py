"""The few calls of the Kubernetes API that sandboxes need: objects by path, and commands in pods over a web socket.

A command in a pod is `pods/NAME/exec` under the subprotocol `v5.channel.k8s.io` (Kubernetes 1.30 and later), in which each message
begins with a byte that names its channel:

    0 standard input   1 standard output   2 standard error   3 how it ended, as a Status   255 the channel in the next byte is closed

What is wrong is always a `ClusterFault` that says what was tried, what the server answered, and with which HTTP status. Redirects are
not followed, for the token would go along.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import aiohttp
from yarl import URL

from agent_program.errors import SandboxUnavailable

_REQUEST_S = 15.0
#: An object that is larger than this is not one of ours.
_ANSWER_BYTES_MAX = 4 * 1024 * 1024
_MESSAGE_BYTES_MAX = 4 * 1024 * 1024
_SENT_BYTES_MAX = 32 * 1024
_PROTOCOL = "v5.channel.k8s.io"
#: Idle connections are cut by what lies between; one that does not answer is dead.
_HEARTBEAT_S = 20.0
_GOODBYE_S = 1.0


class ClusterFault(SandboxUnavailable):
    """The cluster did not do what it was asked."""

    def __init__(self, message: str, *, http_status: int | None = None) -> None:
        """`http_status` is None where there was no answer."""
        super().__init__(message)
        self.http_status = http_status


class Channel(IntEnum):
    """The first byte of a message."""

    STDIN, STDOUT, STDERR, STATUS, CLOSE = 0, 1, 2, 3, 255


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandEnd:
    """How a command in a pod ended."""

    #: None where the server does not say.
    exit_code: int | None
    #: What the server says of it; empty where all is well.
    message: str = ""


class PodCommand:
    """A command that runs in a pod. Use `KubernetesApi.execute`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        #: How it ended, once the server said so.
        self.end: CommandEnd | None = None

    async def send(self, data: bytes) -> None:
        """Give it `data` as standard input.

        Raises:
            ClusterFault: the connection is gone.
        """
        try:
            for at in range(0, len(data), _SENT_BYTES_MAX):
                await self._socket.send_bytes(bytes((Channel.STDIN,)) + data[at : at + _SENT_BYTES_MAX])
        except (aiohttp.ClientError, OSError) as exc:
            raise ClusterFault(f"the connection to the pod was lost: {exc}") from exc

    async def send_end(self) -> None:
        """End its standard input.

        Raises:
            ClusterFault: the connection is gone.
        """
        try:
            await self._socket.send_bytes(bytes((Channel.CLOSE, Channel.STDIN)))
        except (aiohttp.ClientError, OSError) as exc:
            raise ClusterFault(f"the connection to the pod was lost: {exc}") from exc

    async def receive(self) -> tuple[Channel, bytes] | None:
        """What it writes next, and to which of its two outputs; None when there is no more, where `end` tells why if anybody does.

        Raises:
            ClusterFault: the connection is gone.
        """
        while True:
            message = await self._socket.receive()
            if message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED):
                return None
            if message.type is aiohttp.WSMsgType.ERROR:
                raise ClusterFault(f"the connection to the pod was lost: {message.data}")
            if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                continue
            channel, data = message.data[0], message.data[1:]
            if channel == Channel.STATUS:
                self.end = _command_end(data)
            elif channel in (Channel.STDOUT, Channel.STDERR) and data:
                return Channel(channel), data

    async def close(self) -> None:
        """Hang up. That the command ends with it is up to the command."""
        await self._socket.close()


class KubernetesApi:
    """One API server. Belongs to one event loop."""

    def __init__(self, url: str, *, token_path: Path | None, ca_path: Path | None) -> None:
        """Connects to nothing yet, and reads no file."""
        self._base = url.rstrip("/")
        self._token_path = token_path
        self._ca_path = ca_path
        self._session: aiohttp.ClientSession | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        url = URL(self._base)
        return str(url.host), int(url.port or 443)

    async def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, content_type: str = "application/json"
    ) -> dict[str, Any]:
        """Do something with the object at `path`; returns what the server answers.

        Raises:
            ClusterFault: it refuses, or does not answer.
        """
        what = f"{method} {path}"
        data = None if body is None else json.dumps(body).encode()
        try:
            async with (
                asyncio.timeout(_REQUEST_S),
                self._opened().request(
                    method,
                    URL(self._base + path),
                    data=data,
                    headers={**self._headers(), "Content-Type": content_type, "Accept": "application/json"},
                    allow_redirects=False,
                ) as response,
            ):
                answer = await response.content.read(_ANSWER_BYTES_MAX)
                while piece := await response.content.read(_ANSWER_BYTES_MAX):
                    answer += piece
                    if len(answer) > _ANSWER_BYTES_MAX:
                        raise ClusterFault(f"{what}: the API server's answer is too large")
        except TimeoutError as exc:
            raise ClusterFault(f"{what}: the API server did not answer within {_REQUEST_S:g} s") from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise ClusterFault(f"{what}: the API server cannot be reached: {exc}") from exc
        if not 200 <= response.status < 300:
            raise ClusterFault(
                f"{what}: the API server refuses ({response.status}): {_message_in(answer)}",
                http_status=response.status,
            )
        return _object_in(answer, what)

    async def execute(self, namespace: str, pod: str, container: str | None, argv: Sequence[str]) -> PodCommand:
        """Start a command in a pod.

        Raises:
            ClusterFault: it is refused.
        """
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/exec"
        query = [("stdin", "true"), ("stdout", "true"), ("stderr", "true")]
        query += [("container", container)] if container is not None else []
        url = URL(self._base + path).with_query([*query, *(("command", word) for word in argv)])
        try:
            async with asyncio.timeout(_REQUEST_S):
                socket = await self._opened().ws_connect(
                    url,
                    protocols=(_PROTOCOL,),
                    headers=self._headers(),
                    heartbeat=_HEARTBEAT_S,
                    max_msg_size=_MESSAGE_BYTES_MAX,
                    timeout=aiohttp.ClientWSTimeout(ws_close=_GOODBYE_S),
                )
        except TimeoutError as exc:
            raise ClusterFault(f"GET {path}: the API server did not answer within {_REQUEST_S:g} s") from exc
        except aiohttp.WSServerHandshakeError as exc:
            raise ClusterFault(
                f"GET {path}: the API server refuses ({exc.status}): {exc.message}", http_status=exc.status
            ) from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise ClusterFault(f"GET {path}: the API server cannot be reached: {exc}") from exc
        if socket.protocol != _PROTOCOL:
            await socket.close()
            raise ClusterFault(f"GET {path}: the API server does not speak {_PROTOCOL}; Kubernetes 1.30 does")
        return PodCommand(socket)

    async def close(self) -> None:
        """Hang up."""
        if self._session is not None:
            await self._session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            verified: ssl.SSLContext | bool = True
            if self._ca_path is not None and self._base.startswith("https"):
                try:
                    verified = ssl.create_default_context(cafile=self._ca_path)
                except OSError as exc:
                    raise ClusterFault(f"the API server's certificates {self._ca_path} cannot be read: {exc}") from exc
            # Nothing of the environment decides where the token goes: no proxy, no netrc.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=verified), trust_env=False)
        return self._session

    def _headers(self) -> dict[str, str]:
        if self._token_path is None:
            return {}
        try:
            return {"Authorization": f"Bearer {self._token_path.read_text().strip()}"}
        except OSError as exc:
            raise ClusterFault(f"the API server's token {self._token_path} cannot be read: {exc}") from exc


def _object_in(answer: bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(answer)
    except ValueError as exc:
        raise ClusterFault(f"{what}: the API server answers with something that is not JSON") from exc
    if not isinstance(found, dict):
        raise ClusterFault(f"{what}: the API server answers with something that is not an object")
    return found


def _message_in(answer: bytes) -> str:
    """What a Status says, or the beginning of what came instead of one."""
    try:
        message = json.loads(answer)["message"]
    except (ValueError, KeyError, TypeError):
        message = answer.decode("utf-8", "replace").strip()
    return str(message)[:500]


def _command_end(data: bytes) -> CommandEnd:
    try:
        status = json.loads(data)
        if status["status"] == "Success":
            return CommandEnd(exit_code=0)
        causes = (status.get("details") or {}).get("causes") or []
        codes = [int(cause["message"]) for cause in causes if cause.get("reason") == "ExitCode"]
        return CommandEnd(exit_code=codes[0] if codes else None, message=str(status.get("message", ""))[:500])
    except (ValueError, KeyError, TypeError, AttributeError):
        return CommandEnd(exit_code=None, message=data[:500].decode("utf-8", "replace"))
