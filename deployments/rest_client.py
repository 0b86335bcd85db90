"""A client of the platform's REST API: what the command line and the demo use, and nothing that only they could do.

    ClientError
    ├── ServerUnreachable   no answer came: the address is wrong, or nothing runs there
    └── RequestRefused      an answer came and it was no; the message says why

An event stream whose connection breaks is reopened with `Last-Event-ID`, so a reader sees every event once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import httpx

from agent_program.states import FINAL_STATES

Json = dict[str, Any]

#: The event after which there are no more.
END_EVENT = "program.ended"
#: How often a stream is reopened that brings nothing at all before its reader is told.
RECONNECTS_MAX = 5
RECONNECT_WAIT_S = 1.0
#: Programs in a page of a whole list; no server allows fewer by default.
_PAGE = 100
#: The server sends a heartbeat at least this often; a stream that is silent for longer is broken.
STREAM_SILENCE_MAX_S = 60.0
#: No event of the platform comes near this; a longer one is not ours.
EVENT_BYTES_MAX = 16 * 1024 * 1024


class ClientError(Exception):
    """The request did not succeed."""


class ServerUnreachable(ClientError):
    """No answer came from the server."""


class RequestRefused(ClientError):
    """The server answered with an error."""

    def __init__(self, message: str, *, status: int, code: str | None = None, retry_after_s: float | None = None):
        super().__init__(message)
        self.status = status
        #: The stable code of the error, `program_not_found` for one; None where the answer was not in OpenAI's shape.
        self.code = code
        #: Seconds after which another attempt may succeed; None where the server says nothing.
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerEvent:
    """One server-sent event."""

    #: What `Last-Event-ID` is to be for the stream to go on after this event; None where the server gave none.
    id: str | None
    name: str
    data: Json


def parse_events(lines: Iterable[str]) -> Iterator[ServerEvent]:
    """Server-sent events from the lines of a stream; comments (heartbeats) and events without data are passed over.

    Raises:
        ClientError: an event's data is not a JSON object, or is longer than `EVENT_BYTES_MAX`.
    """
    event_id: str | None = None
    name, data = "message", ""
    for line in lines:
        if not line:
            if data:
                yield ServerEvent(id=event_id, name=name, data=_json_object(data))
            name, data = "message", ""
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "id":
            event_id = value
        elif field == "event":
            name = value
        elif field == "data":
            data = f"{data}\n{value}" if data else value
            if len(data) > EVENT_BYTES_MAX:
                raise ClientError(f"an event is longer than {EVENT_BYTES_MAX} bytes")


class RestClient:
    """Calls one server. Use it in a `with`, or call `close`.

    Every method raises `ServerUnreachable` or `RequestRefused`.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = url.rstrip("/")
        self._sleep = sleep
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        # The server is named by the user; a proxy for the outside world has no part in it.
        self._http = httpx.Client(
            base_url=self.url, headers=headers, timeout=timeout_s, transport=transport, trust_env=False
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def submit(self, program: Json) -> Json:
        """Start a program; the answer is its object, with the id."""
        return self._call("POST", "/v1/programs", body=program)

    def program(self, program_id: str, *, include: str | None = None) -> Json:
        return self._call("GET", f"/v1/programs/{program_id}", params={"include": include})

    def programs(self, *, state: str | None = None, limit: int | None = None, after: str | None = None) -> Json:
        """One page: `data`, `has_more`, `last_id`."""
        return self._call("GET", "/v1/programs", params={"state": state, "limit": limit, "after": after})

    def all_programs(self, *, state: str | None = None) -> Iterator[Json]:
        """Every program, newest first, page by page."""
        after: str | None = None
        while True:
            page = self.programs(state=state, limit=_PAGE, after=after)
            yield from page["data"]
            if not page.get("has_more"):
                return
            after = page["last_id"]

    def cancel(self, program_id: str) -> Json:
        return self._call("POST", f"/v1/programs/{program_id}/cancel")

    def tool_outputs(self, program_id: str, answers: list[Json]) -> Json:
        """Answer calls that the program waits for; the answer is the program."""
        return self._call("POST", f"/v1/programs/{program_id}/tool_outputs", body={"tool_outputs": answers})

    def explain(self, program_id: str) -> Json:
        """Why the program's KV was kept or dropped and where it was placed."""
        return self._call("GET", f"/v1/programs/{program_id}/explain")

    def tools(self) -> Json:
        return self._call("GET", "/v1/tools")

    def tool_latencies(self) -> Json:
        """The times of every tool key that was measured; see `GET /v1/tools/latency`."""
        return self._call("GET", "/v1/tools/latency")

    def tool_latency(self, name: str, *, context_tokens: int | None = None) -> Json:
        """The times of one tool key, and for how long a context would be kept for it."""
        return self._call("GET", f"/v1/tools/{name}/latency", params={"context_tokens": context_tokens})

    def models(self) -> Json:
        return self._call("GET", "/v1/models")

    def is_ready(self) -> bool:
        """True once programs can be submitted; a server that is not there yet is not ready."""
        try:
            self._call("GET", "/readyz")
        except ClientError:
            return False
        return True

    def events(self, program_id: str, *, after: str | None = None) -> Iterator[ServerEvent]:
        """The program's events from the first, or after the one with id `after`, until the program has ended.

        A stream that ends earlier was cut off on the way, whether it looks so or not (a proxy's time limit closes it in
        good order), and is reopened.

        Raises:
            ServerUnreachable: the stream brought nothing `RECONNECTS_MAX + 1` times in a row.
        """
        last_id, failures = after, 0
        while True:
            has_progressed, cause = (
                False,
                ServerUnreachable(f"{self.url} ends the event stream before the program ends"),
            )
            try:
                for event in self._stream_once(program_id, last_id):
                    last_id, has_progressed = event.id or last_id, True
                    yield event
                    if event.name == END_EVENT:
                        return
                if not has_progressed and self.program(program_id)["state"] in FINAL_STATES:
                    return
            except ServerUnreachable as error:
                cause = error
            failures = 0 if has_progressed else failures + 1
            if failures > RECONNECTS_MAX:
                raise cause
            self._sleep(RECONNECT_WAIT_S)

    def _stream_once(self, program_id: str, last_id: str | None) -> Iterator[ServerEvent]:
        headers = {"accept": "text/event-stream"} | ({"last-event-id": last_id} if last_id else {})
        timeout = httpx.Timeout(STREAM_SILENCE_MAX_S, connect=10.0)
        try:
            with self._http.stream(
                "GET", f"/v1/programs/{program_id}/events", headers=headers, timeout=timeout
            ) as response:
                if response.is_error:
                    response.read()
                    raise _refusal(response)
                yield from parse_events(response.iter_lines())
        except httpx.TransportError as error:
            raise _unreachable(self.url, error) from error

    def _call(self, method: str, path: str, *, body: Json | None = None, params: Json | None = None) -> Json:
        given = {key: value for key, value in (params or {}).items() if value is not None}
        try:
            response = self._http.request(method, path, json=body, params=given)
        except httpx.TransportError as error:
            raise _unreachable(self.url, error) from error
        except httpx.InvalidURL as error:
            raise ServerUnreachable(f"{self.url} is not an address: {error}") from error
        if response.is_error:
            raise _refusal(response)
        return _json_object(response.text) if response.content else {}


def _json_object(text: str) -> Json:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ClientError(f"the server's answer is not JSON: {text[:200]!r}") from error
    if not isinstance(value, dict):
        raise ClientError(f"the server's answer is not a JSON object: {text[:200]!r}")
    return value


def _unreachable(url: str, error: httpx.TransportError) -> ServerUnreachable:
    return ServerUnreachable(f"no answer from {url}: {error or type(error).__name__}")


def _refusal(response: httpx.Response) -> RequestRefused:
    """The error of OpenAI's shape; a proxy in between may answer in any shape, and its text then is the message."""
    code, message = None, response.text.strip()[:500] or response.reason_phrase
    try:
        error = response.json()["error"]
        code, message = error.get("code"), str(error["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    retry_after = response.headers.get("retry-after", "")
    return RequestRefused(
        message,
        status=response.status_code,
        code=code,
        retry_after_s=float(retry_after) if retry_after.isdecimal() else None,
    )
