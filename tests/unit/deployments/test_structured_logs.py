"""A log line says which program, turn and request it is about."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from agent_program.errors import TurnFailed
from deployments.memory_clients import ScriptedEngine, answer
from deployments.ports import ReplicaLost
from deployments.structured_logs import PACKAGES, install, log_fields
from deployments.telemetry_settings import LogFormat
from support.api import ApiBench
from support.programs import Bench, spec

logger = logging.getLogger("deployments.some_module")


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What our modules log, as JSON lines."""
    stream = io.StringIO()
    before = {name: (logging.getLogger(name).propagate, logging.getLogger(name).level) for name in PACKAGES}
    install(LogFormat.JSON, stream)
    yield stream
    for name, (propagate, level) in before.items():
        package = logging.getLogger(name)
        package.handlers.clear()
        package.propagate = propagate
        package.setLevel(level)


def records(lines: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.getvalue().splitlines()]


def test_a_record_carries_the_ids_of_its_context(lines: io.StringIO) -> None:
    with log_fields(program_id="p"), log_fields(turn=3):
        logger.warning("it is %s", "gone")
    (record,) = records(lines)
    assert (record["program_id"], record["turn"], record["message"]) == ("p", 3, "it is gone")
    assert record["level"] == "WARNING"
    assert record["at"].endswith("Z")


def test_a_records_own_word_wins_and_nothing_else_gets_in(lines: io.StringIO) -> None:
    with log_fields(program_id="p"):
        logger.info("x", extra={"program_id": "q", "action": "store_away", "secret": "s"})
    (record,) = records(lines)
    assert (record["program_id"], record["action"]) == ("q", "store_away")
    assert "secret" not in record


def test_a_context_ends(lines: io.StringIO) -> None:
    with log_fields(program_id="p"):
        pass
    logger.info("x")
    assert "program_id" not in records(lines)[0]


async def test_tasks_take_their_context_along_and_do_not_mix(lines: io.StringIO) -> None:
    async def work(name: str) -> None:
        with log_fields(program_id=name):
            await asyncio.sleep(0)
            logger.info("in %s", name)

    await asyncio.gather(work("a"), work("b"))
    assert [record["program_id"] for record in records(lines)] == ["a", "b"]


def test_an_error_brings_its_traceback_in_one_line(lines: io.StringIO) -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("it failed")
    (record,) = records(lines)
    assert "ValueError: broken" in record["traceback"]


def test_people_get_a_line_with_the_same_ids() -> None:
    stream = io.StringIO()
    install(LogFormat.TEXT, stream)
    with log_fields(program_id="p", turn=2):
        logger.warning("the replica is gone")
    assert stream.getvalue().endswith("WARNING deployments.some_module program=p turn=2: the replica is gone\n")
    for name in PACKAGES:
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
        logging.getLogger(name).setLevel(logging.NOTSET)


async def test_what_a_program_logs_names_it_and_its_turn(lines: io.StringIO) -> None:
    bench = Bench(spec(id="mine"), engine=ScriptedEngine([ReplicaLost("gone"), answer("done")]))
    await bench.run()
    lost = next(record for record in records(lines) if "lost its replica" in record["message"])
    assert (lost["program_id"], lost["turn"]) == ("mine", 1)


async def test_an_answer_has_the_request_id_that_was_sent_or_one_of_its_own() -> None:
    bench = ApiBench()
    async with bench.client() as client:
        given = await client.get("/healthz", headers={"X-Request-ID": "abc-1"})
        made = await client.get("/healthz")
        hostile = await client.get("/healthz", headers={"X-Request-ID": 'a b"c'})
    assert given.headers["x-request-id"] == "abc-1"
    assert made.headers["x-request-id"].startswith("req_")
    assert hostile.headers["x-request-id"].startswith("req_")


async def test_what_a_request_logs_carries_its_id(lines: io.StringIO) -> None:
    bench = ApiBench([[TurnFailed("no")]])
    async with bench.client() as client:
        body = {"model": "small", "messages": [{"role": "user", "content": "x"}]}
        response = await client.post("/v1/chat/completions", json=body, headers={"X-Request-ID": "abc-2"})
    assert response.status_code >= 500
    assert [record["request_id"] for record in records(lines) if record["logger"] == "deployments.http_errors"] == [
        "abc-2"
    ]
