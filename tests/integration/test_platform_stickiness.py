"""Programs keep their replica while the platform grows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.platform import START_DEADLINE_S, Platform
from support.waiting import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PROGRAMS, TURNS = 20, 4


def test_twenty_programs_keep_their_replicas_while_a_third_is_added(platform: Platform) -> None:
    names = [f"sticky-{number}" for number in range(PROGRAMS)]
    contexts: dict[str, list[Any]] = {name: [{"role": "user", "content": f"I am {name}."}] for name in names}
    replicas: dict[str, list[str]] = {name: [] for name in names}

    def turn(name: str) -> None:
        body = {"messages": contexts[name], "max_tokens": 8, "program_id": name}
        response = platform.client.post("/v1/chat/completions", json=body, timeout=240)
        assert response.status_code == 200, response.text
        replicas[name].append(response.headers["x-continuum-replica"])
        message = response.json()["choices"][0]["message"]
        contexts[name] += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": "Go on."}]

    deployments = platform.config["applications"][0].setdefault("deployments", [])
    with ThreadPoolExecutor(PROGRAMS) as pool:
        for number in range(TURNS):
            if number == TURNS // 2:
                deployments.append({"name": "EngineReplica", "num_replicas": 3})
                platform.deploy()
                wait_for(
                    lambda: platform.is_ready(engine=3), what="a third engine replica", deadline_s=START_DEADLINE_S
                )
            list(pool.map(turn, names))

    assert all(len(set(seen)) == 1 for seen in replicas.values()), replicas

    deployments[0]["num_replicas"] = 2
    platform.deploy()
    wait_for(
        lambda: len(platform.replica_processes("EngineReplica")) == 2,
        what="the third engine replica to leave",
        deadline_s=START_DEADLINE_S,
    )
