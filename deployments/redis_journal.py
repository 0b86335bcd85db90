"""The journal on the Redis protocol (Redis or Valkey, 7 or newer).

    continuum:program:<id>                HASH    spec, record (JSON); state; seq of the last step; token (fencing); order;
                                                  runner; tenant; cancel (present once asked for)
    continuum:program:<id>:steps          STREAM  entry <seq>-0, field s: the step (JSON)
    continuum:programs:queue              ZSET    id by order of acceptance: nobody has run it yet
    continuum:programs:leases             ZSET    id by the server's time (ms) at which its runner's lease runs out, or its wait
                                                  for its client is over
    continuum:programs:all, :in:<state>, :of:<tenant>   ZSET   id by order of acceptance
    continuum:programs:finished           ZSET    id by Unix seconds of its end
    continuum:programs:order              INT     the last order given
    continuum:programs:counters           HASH    see `journal.counter_increments`
    continuum:idempotency:<sha256>        HASH    fingerprint, program; expires

Every change is one Lua script (`journal_lua/`), so it is atomic, and lease times are the server's: runners need no common
clock. A call may be sent again after a lost answer; each script notices that. Scripts build key names from ids, so this
needs one Redis primary, not Redis Cluster. Durability is the server's: append-only file with fsync every second.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import BusyLoadingError, OutOfMemoryError, ReadOnlyError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from agent_program.clock import Clock
from agent_program.errors import IllegalTransition, InvalidRequest, Overloaded, ProgramNotFound, StoreUnavailable
from agent_program.states import ProgramState
from deployments.journal import (
    FORGET_BATCH,
    Claim,
    IdempotencyKey,
    IdempotencyMismatch,
    JournalTotals,
    LeaseLost,
    LeaseStatus,
    Page,
    ProgramExists,
    StoredProgram,
    counter_increments,
)
from deployments.program import ProgramRecord, ProgramSpec, new_record
from deployments.record_steps import cancelled_while_queued, queued_step
from deployments.redis_signals import RedisSignals
from deployments.signals import Signal
from deployments.steps import Step
from tool_runtime.store_url import dialled_url

_PROGRAM = "continuum:program:"
_PROGRAMS = "continuum:programs:"
_IDEMPOTENCY_KEEP_S = 24 * 3600
_STORE_RETRY_S = 2.0
_LIST_BATCH = 100
#: In place of a fencing token: what a program's client did while no runner wrote.
_NO_CLAIM = "client"
_SCRIPTS = ("create", "claim", "extend", "append", "hand_back", "cancel", "delete")


class RedisJournal:
    """`Journal` over a Redis client. Use it on one event loop only."""

    def __init__(self, url: str, clock: Clock) -> None:
        self._clock = clock
        url = dialled_url(url, os.environ)
        self._client = Redis.from_url(
            url, decode_responses=True, socket_timeout=5, socket_connect_timeout=2, health_check_interval=15
        )
        # A signal connection is quiet for long: it has no read timeout.
        self._signal_client = Redis.from_url(url, decode_responses=True, socket_timeout=None, socket_connect_timeout=2)
        self._signals = RedisSignals(self._signal_client)
        directory = Path(__file__).parent / "journal_lua"
        self._scripts = {
            name: self._client.register_script((directory / f"{name}.lua").read_text()) for name in _SCRIPTS
        }

        #: The server's clock less ours, in ms, as of the last claim.
        self._server_ms: int | None = None

    async def _run(self, script: str, *arguments: str | int | float) -> Any:
        with _driver_errors():
            return await self._scripts[script](args=arguments)

    async def create(
        self, spec: ProgramSpec, *, queued_max: int, idempotency: IdempotencyKey | None = None
    ) -> ProgramRecord:
        record = new_record(spec)
        answer = await self._run(
            "create",
            spec.id,
            spec.model_dump_json(),
            record.model_dump_json(),
            _encode(queued_step(spec)),
            queued_max,
            _idempotency_name(idempotency) if idempotency else "",
            idempotency.fingerprint if idempotency else "",
            _IDEMPOTENCY_KEEP_S,
            spec.tenant_id,
        )
        match answer[0]:
            case "KNOWN":
                return await self.get(answer[1])
            case "MISMATCH":
                raise IdempotencyMismatch(param="Idempotency-Key")
            case "EXISTS":
                raise ProgramExists(f"a program with the id {spec.id!r} exists", param="program_id")
            case "FULL":
                raise Overloaded(f"{queued_max} programs are queued; try again later", retry_after_s=5)
        return record

    async def get(self, program_id: str) -> ProgramRecord:
        with _driver_errors():
            row: Any = await self._client.hmget(_PROGRAM + program_id, ["record", "cancel"])
        if row[0] is None:
            raise _not_found(program_id)
        return _decode_record(*row)

    async def load(self, program_id: str) -> StoredProgram:
        with _driver_errors():
            async with self._client.pipeline(transaction=True) as pipeline:
                pipeline.hmget(_PROGRAM + program_id, ["spec", "record", "cancel"])
                pipeline.xrange(f"{_PROGRAM}{program_id}:steps")
                (spec, record, cancel), entries = await pipeline.execute()
        if spec is None:
            raise _not_found(program_id)
        return StoredProgram(
            spec=ProgramSpec.model_validate_json(spec),
            record=_decode_record(record, cancel),
            steps=tuple(_decode_steps(entries)),
        )

    async def steps(self, program_id: str, *, after_seq: int = 0, limit: int = 1000) -> tuple[Step, ...]:
        with _driver_errors():
            async with self._client.pipeline(transaction=True) as pipeline:
                pipeline.exists(_PROGRAM + program_id)
                pipeline.xrange(f"{_PROGRAM}{program_id}:steps", min=f"({after_seq}-0", count=limit)
                exists, entries = await pipeline.execute()
        if not exists:
            raise _not_found(program_id)
        return tuple(_decode_steps(entries))

    async def list(
        self, *, state: ProgramState | None, limit: int, after: str | None, tenant_id: str | None = None
    ) -> Page:
        with _driver_errors():
            below = "+inf"
            if after is not None:
                order = await self._client.zscore(_PROGRAMS + "all", after)
                if order is None:
                    raise InvalidRequest(f"no program {after!r} to continue the list after", param="after")
                below = f"({order:.0f}"
            found: list[ProgramRecord] = []
            async for record in self._newest(below, state, tenant_id):
                found.append(record)
                if len(found) > limit:
                    break
        return Page(records=tuple(found[:limit]), has_more=len(found) > limit)

    async def _newest(
        self, below: str, state: ProgramState | None, tenant_id: str | None
    ) -> AsyncIterator[ProgramRecord]:
        """Records from an order on downwards. There is an index by tenant and one by state; of a tenant's, the state is looked
        at here, over as many programs as the tenant has."""
        index = _PROGRAMS + "all" if state is None else f"{_PROGRAMS}in:{state.value}"
        if tenant_id is not None:
            index = f"{_PROGRAMS}of:{tenant_id}"
        while True:
            scored: Any = await self._client.zrevrangebyscore(
                index, below, "-inf", start=0, num=_LIST_BATCH, withscores=True
            )
            if not scored:
                return
            ids = [program_id for program_id, _ in scored]
            async with self._client.pipeline(transaction=False) as pipeline:
                for program_id in ids:
                    pipeline.hmget(_PROGRAM + program_id, ["record", "cancel"])
                rows = await pipeline.execute()
            for record in (_decode_record(*row) for row in rows if row[0] is not None):
                if state in (None, record.state):
                    yield record
            below = f"({scored[-1][1]:.0f}"

    async def claim(self, runner: str, *, lease_s: float, take_lapsed: bool = True) -> Claim | None:
        sent_s = self._clock.now_s()
        until_ms = "" if self._server_ms is None else self._server_ms + int((sent_s + lease_s / 2) * 1000)
        server_ms, *claimed = await self._run("claim", int(lease_s * 1000), runner, int(take_lapsed), until_ms)
        self._server_ms = server_ms - int(self._clock.now_s() * 1000)
        return Claim(program_id=claimed[0], token=int(claimed[1])) if claimed else None

    async def extend(self, claims: Sequence[Claim], *, lease_s: float) -> dict[str, LeaseStatus]:
        if not claims:
            return {}
        pairs = [part for claim in claims for part in (claim.program_id, claim.token)]
        answer = await self._run("extend", int(lease_s * 1000), *pairs)
        return {claim.program_id: LeaseStatus(status) for claim, status in zip(claims, answer, strict=True)}

    async def append(self, claim: Claim, steps: Sequence[Step], record: ProgramRecord) -> None:
        if await self._write_steps(claim.program_id, claim.token, steps, record) != "OK":
            raise LeaseLost(f"another runner has program {claim.program_id}")

    async def _write_steps(
        self, program_id: str, token: int | str, steps: Sequence[Step], record: ProgramRecord
    ) -> Any:
        counters = counter_increments(steps, record)
        return await self._run(
            "append",
            program_id,
            token,
            steps[0].seq,
            len(steps),
            record.model_dump_json(),
            record.state.value,
            int(record.state.is_final),
            len(counters),
            *(_encode(step) for step in steps),
            *_flat(counters),
        )

    async def hand_back(self, claim: Claim, *, after_s: float = 0.0) -> None:
        await self._run("hand_back", claim.program_id, claim.token, math.ceil(after_s * 1000))

    async def act(self, program_id: str, steps: Sequence[Step], record: ProgramRecord) -> bool:
        answer = await self._write_steps(program_id, _NO_CLAIM, steps, record)
        if answer == "GONE":
            raise _not_found(program_id)
        return bool(answer == "OK")

    async def request_cancel(self, program_id: str) -> ProgramRecord:
        record = await self.get(program_id)
        final: list[str | int | float] = [2, "", "", 0]
        if record.state is ProgramState.QUEUED:
            step, ended = cancelled_while_queued(record, seq=2, at=self._clock.wall_s())
            counters = counter_increments([step], ended)
            final = [step.seq, _encode(step), ended.model_dump_json(), len(counters), *_flat(counters)]
        answer = await self._run("cancel", program_id, *final)
        if answer == "GONE":
            raise _not_found(program_id)
        if answer not in ("OK", ProgramState.CANCELLED.value):
            raise IllegalTransition(f"the program has ended: {answer}")
        return await self.get(program_id)

    async def delete(self, program_id: str) -> None:
        answer = await self._run("delete", program_id)
        if answer == "GONE":
            raise _not_found(program_id)
        if answer != "OK":
            raise IllegalTransition("the program has not ended; cancel it first")

    async def forget_finished(self, *, keep_s: float, keep_count: int) -> int:
        finished = _PROGRAMS + "finished"
        with _driver_errors():
            server_s, _ = await self._client.time()
            old = await self._client.zrangebyscore(finished, "-inf", server_s - keep_s, start=0, num=FORGET_BATCH)
            surplus = await self._client.zcard(finished) - keep_count
            extra = await self._client.zrange(finished, 0, min(surplus, FORGET_BATCH) - 1) if surplus > 0 else []
        forgotten = list(dict.fromkeys([*old, *extra]))[:FORGET_BATCH]
        for program_id in forgotten:
            await self._run("delete", program_id)
        return len(forgotten)

    async def totals(self) -> JournalTotals:
        states = list(ProgramState)
        with _driver_errors():
            async with self._client.pipeline(transaction=False) as pipeline:
                for state in states:
                    pipeline.zcard(f"{_PROGRAMS}in:{state.value}")
                pipeline.hgetall(_PROGRAMS + "counters")
                *counts, counters = await pipeline.execute()
        return JournalTotals(
            by_state={state.value: count for state, count in zip(states, counts, strict=True)},
            counters={name: float(amount) for name, amount in counters.items()},
        )

    def listen(self, topic: str) -> AbstractAsyncContextManager[Signal]:
        return self._signals.listen(topic)

    async def check(self) -> None:
        with _driver_errors():
            await self._client.ping()

    async def close(self) -> None:
        await self._signals.close()
        await self._signal_client.aclose()
        await self._client.aclose()


@contextmanager
def _driver_errors() -> Iterator[None]:
    """Errors of the driver that mean "not now" become `StoreUnavailable`."""
    try:
        yield
    except (
        RedisConnectionError,
        RedisTimeoutError,
        BusyLoadingError,
        ReadOnlyError,
        OutOfMemoryError,
        OSError,
    ) as error:
        raise StoreUnavailable(f"the store does not answer: {error}", retry_after_s=_STORE_RETRY_S) from error


def _encode(step: Step) -> str:
    return json.dumps(step.to_wire(), separators=(",", ":"))


def _decode_steps(entries: Sequence[tuple[str, Mapping[str, str]]]) -> Iterator[Step]:
    return (Step.from_wire(json.loads(fields["s"])) for _, fields in entries)


def _decode_record(record: str, cancel: str | None) -> ProgramRecord:
    return ProgramRecord.model_validate_json(record).model_copy(update={"cancel_requested": cancel is not None})


def _flat(counters: Mapping[str, float]) -> list[str | int | float]:
    return [part for name, amount in counters.items() for part in (name, amount)]


def _idempotency_name(idempotency: IdempotencyKey) -> str:
    # The key is the client's free text; a digest bounds it and keeps it out of key names.
    digest = hashlib.sha256(f"{idempotency.tenant_id}\0{idempotency.key}".encode()).hexdigest()
    return f"continuum:idempotency:{digest}"


def _not_found(program_id: str) -> ProgramNotFound:
    return ProgramNotFound(f"no program {program_id!r}", param="program_id")
