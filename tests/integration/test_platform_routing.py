"""The router's promises on the running platform: placements are explained, streams outlive their replica, replicas are emptied."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from support.platform import END_DEADLINE_S, START_DEADLINE_S, Platform
from support.waiting import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow]

TOKENS = 300
STORY: dict[str, Any] = {
    "messages": [{"role": "system", "content": "Tell long stories."}, {"role": "user", "content": "Begin."}],
    "temperature": 0,
    "max_tokens": TOKENS,
    "ignore_eos": True,
}


@pytest.fixture(autouse=True)
def healed(platform: Platform) -> None:
    """Each test begins on a whole platform."""
    wait_for(platform.is_ready, what="the platform to be whole", deadline_s=START_DEADLINE_S)


def chat(platform: Platform, program_id: str, **changes: Any) -> httpx.Response:
    body = {**STORY, "model": "smollm2-135m-instruct", "program_id": program_id, **changes}
    response = platform.client.post("/v1/chat/completions", json=body, timeout=END_DEADLINE_S)
    assert response.status_code == 200, response.text
    return response


def test_why_a_program_was_placed_is_explained_and_a_sub_program_goes_with_its_parent(platform: Platform) -> None:
    parent = chat(platform, "routing-parent", max_tokens=4)
    hints = {"parent_program_id": "routing-parent"}
    child = chat(platform, "routing-child", max_tokens=4, continuum=hints)
    assert child.headers["x-continuum-replica"] == parent.headers["x-continuum-replica"]
    explained = platform.client.get("/v1/programs/routing-child/explain").json()["placement"]
    assert explained["replica"] == child.headers["x-continuum-replica"]
    assert explained["reason"] == explained["came"]["reason"] == "parent"


def test_a_greedy_stream_whose_replica_is_killed_is_one_stream_with_the_same_text(platform: Platform) -> None:
    whole = chat(platform, "routing-whole").json()["choices"][0]["message"]["content"]
    pieces: list[str] = []
    ids: set[str] = set()
    body = {**STORY, "model": "smollm2-135m-instruct", "program_id": "routing-broken", "stream": True}
    with platform.client.stream("POST", "/v1/chat/completions", json=body, timeout=END_DEADLINE_S) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            ids.add(event["id"])
            pieces += [choice["delta"].get("content") or "" for choice in event["choices"]]
            if len(pieces) == 30:
                platform.kill_replica("EngineReplica", response.headers["x-continuum-replica"])
    assert len(ids) == 1
    assert "".join(pieces) == whole


def test_a_drained_replica_is_left_and_replaced(platform: Platform) -> None:
    first = chat(platform, "routing-drained", max_tokens=4).headers["x-continuum-replica"]
    ordered = platform.client.post(f"/v1/replicas/{first}/drain", json={"deadline_s": 120})
    assert ordered.status_code == 202, ordered.text

    def state() -> str | None:
        replicas = platform.client.get("/v1/replicas").json()["data"]
        return next((replica["drain"]["state"] for replica in replicas if replica["id"] == first), None)

    wait_for(lambda: state() != "serving", what="the replica to hear of its order")

    def has_moved() -> bool:
        return chat(platform, "routing-drained", max_tokens=4).headers["x-continuum-replica"] != first

    wait_for(has_moved, what="the program's next turn to go elsewhere")
    wait_for(lambda: state() is None, what="the replica to leave", deadline_s=START_DEADLINE_S)
