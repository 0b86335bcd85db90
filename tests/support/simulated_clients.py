"""Clients of a simulated cluster. They do what clients do about errors (they try again), and remember what they saw."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse

from agent_program.errors import PlatformError, ProgramNotFound
from agent_program.states import FINAL_STATES, ProgramState
from deployments.program import ProgramRecord
from support.chat_streams import events
from support.simulated_cluster import MODEL, IngressProcess, SimulatedCluster
from support.simulated_parts import TOKENS, Process

_T = TypeVar("_T")
_RETRY_S = 0.5


class ConnectionLost(Exception):
    """The ingress died under the request."""


async def at_ingress(process: Process, work: Awaitable[_T]) -> _T:
    """Have an ingress do something; it may die meanwhile."""
    task = process.spawn(work)
    try:
        return await task
    except asyncio.CancelledError:
        me = asyncio.current_task()
        if process.is_dead and (me is None or not me.cancelling()):
            raise ConnectionLost from None
        task.cancel()
        raise


@dataclass
class ProgramClient:
    """Submits one program and follows it to its end."""

    name: str
    record: ProgramRecord | None = None
    #: Of the events, as they came.
    seqs: list[int] = field(default_factory=list)
    is_over: bool = False
    #: It was accepted, and later the API knew of no such program: what a client is told after the store lost its data.
    is_unknown: bool = False
    end: ProgramState | None = None

    async def run(self, cluster: SimulatedCluster) -> None:
        body = {"input": f"Do {self.name}.", "tools": ["shell", "read_file"], "limits": {"max_turns": 8}}
        self.record = await self._insist(
            cluster, lambda ingress: ingress.programs.submit(body, idempotency_key=self.name)
        )
        while not self.is_over:
            await self._insist(cluster, self._follow)

    async def _follow(self, ingress: IngressProcess) -> None:
        assert self.record is not None
        after = self.seqs[-1] if self.seqs else 0
        async for step in ingress.programs.follow(self.record.id, after_seq=after):
            ingress.check()
            if step is not None:
                self.seqs.append(step.seq)
        try:
            state = (await ingress.programs.get(self.record.id)).state
        except ProgramNotFound:
            self.is_unknown = self.is_over = True
        else:
            self.is_over = state in FINAL_STATES
            self.end = state if self.is_over else None

    @staticmethod
    async def _insist(cluster: SimulatedCluster, ask: Callable[[IngressProcess], Awaitable[_T]]) -> _T:
        while True:
            ingress = cluster.ingress()
            if ingress is not None:
                try:
                    return await at_ingress(ingress, ask(ingress))
                except (PlatformError, ConnectionLost):
                    pass
            await asyncio.sleep(_RETRY_S)


@dataclass
class ChatClient:
    """An agent with its own loop: a few streamed turns, each tried again until it came whole."""

    name: str
    is_greedy: bool
    turns: int = 3
    answers: list[str] = field(default_factory=list)
    broken_streams: int = 0
    refused: int = 0
    #: What no client may see.
    complaints: list[str] = field(default_factory=list)

    async def run(self, cluster: SimulatedCluster) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
        for turn in range(self.turns):
            while (answer := await self._try(cluster, messages, turn)) is None:  # noqa: ASYNC110 - time is virtual
                await asyncio.sleep(_RETRY_S)
            self.answers.append(answer)
            messages = [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": "On."}]
            await asyncio.sleep(cluster.chosen.uniform(0.1, 2.0))

    async def _try(self, cluster: SimulatedCluster, messages: list[dict[str, Any]], turn: int) -> str | None:
        ingress = cluster.ingress()
        if ingress is None:
            return None
        body: dict[str, Any] = {"model": MODEL, "messages": messages, "stream": True, "program_id": self.name}
        if self.is_greedy:
            body["temperature"] = 0
        seen: list[str] = []
        try:
            await at_ingress(ingress, self._read(ingress, body, seen))
        except ConnectionLost:
            self._check(seen, is_whole=False)
            return None
        except PlatformError as error:
            self.refused += error.status == 429
            if error.status == 429 and turn > 0 and error.code == "overloaded":
                self.complaints.append(f"turn {turn} of a program that was let in was refused")
            return None
        has_error = any("error" in event for event in events(seen))
        self.broken_streams += has_error
        text = self._check(seen, is_whole=not has_error)
        return None if has_error else text

    @staticmethod
    async def _read(ingress: IngressProcess, body: dict[str, Any], seen: list[str]) -> None:
        response = await ingress.chat.answer(Request({"type": "http", "headers": []}), body)
        assert isinstance(response, StreamingResponse)
        stream = response.body_iterator
        try:
            async for event in stream:
                ingress.check()
                seen.append(str(event))
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    def _check(self, seen: list[str], *, is_whole: bool) -> str:
        parsed = [event for event in events(seen) if "choices" in event]
        text = "".join(event["choices"][0]["delta"].get("content") or "" for event in parsed)
        numbers = [int(token.partition("~")[0]) for token in text.split()]
        if numbers != list(range(len(numbers))):
            self.complaints.append(f"the stream has a gap or a repeat: {text!r}")
        if len({event["id"] for event in parsed}) > 1:
            self.complaints.append("one answer came under two ids")
        if is_whole and (len(numbers) != TOKENS or seen[-1] != "data: [DONE]\n\n"):
            self.complaints.append(f"the stream ended early: {json.dumps(seen[-2:])}")
        return text
