"""vLLM's own API server, without Ray, on our scheduler: what docs/vllm_without_ray.md says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_replicas import embedded_model
from support.redis_server import free_port
from support.waiting import wait_for

pytestmark = pytest.mark.integration

BLOCK_TOKENS = 32
ENVIRONMENT = {
    "VLLM_PLUGINS": "continuum",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """The server, with a pool of 160 blocks."""
    port = free_port()
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(embedded_model.prepare()), "--served-model-name", "small"),
        *("--scheduler-cls", "engine_replicas.vllm_scheduler.make_scheduler"),
        *("--additional-config", '{"continuum": {"preset": "adaptive"}}'),
        *("--host", "127.0.0.1", "--port", str(port), "--enable-prompt-tokens-details", "--enforce-eager"),
        *("--max-model-len", "2048", "--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", "160"),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **ENVIRONMENT},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=180) as client:
            wait_for(lambda: is_up(client, process, log), what="the server", deadline_s=300)
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def is_up(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, f"the server ended:\n{log.read_text(errors='replace')[-4000:]}"
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def turn(client: httpx.Client, messages: list[dict[str, str]], **body: Any) -> dict[str, Any]:
    request = {"model": "small", "messages": messages, "temperature": 0, "max_tokens": 40, "min_tokens": 40, **body}
    response = client.post("/v1/chat/completions", json=request)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_a_programs_next_turn_finds_its_kv_and_the_server_says_why(server: httpx.Client) -> None:
    messages = [{"role": "user", "content": "The build is green and the tests ran. " * 30}]
    first = turn(server, messages, session_id="agent-1", vllm_xargs={"continuum_next_tool": "pytest"})

    stats = server.get("/continuum/stats").json()
    assert (stats["retention"], stats["live_leases"]) == ("adaptive", 1)
    known = server.get("/continuum/programs/agent-1").json()
    (lease,) = known["leases"]
    written = first["usage"]["prompt_tokens"] + 39
    assert lease["tokens"] > written - 2 * BLOCK_TOKENS

    armed = server.post("/continuum/programs/agent-1/lease", json={"tool": "pytest"}).json()
    assert armed["ttl_s"] > 0
    for event in ({"kind": "started"}, {"kind": "finished", "elapsed_s": 1.5, "outcome": "ok"}):
        assert (
            server.post("/continuum/programs/agent-1/tool_events", json={"tool": "pytest", **event}).status_code == 202
        )

    messages += [
        {"role": "assistant", "content": first["choices"][0]["message"]["content"]},
        {"role": "user", "content": "Go on."},
    ]
    second = turn(server, messages, session_id="agent-1")
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    # The prompt at least; the answer too where its text gives the same tokens again.
    assert cached >= first["usage"]["prompt_tokens"] // BLOCK_TOKENS * BLOCK_TOKENS - BLOCK_TOKENS
    assert server.get("/continuum/stats").json()["leases"]["reused"] == 1

    assert server.delete("/continuum/programs/agent-1").json()["leases"] == 1
    after = server.get("/continuum/stats").json()
    assert (after["live_leases"], after["free_blocks"]) == (0, after["total_blocks"])


def test_hints_by_header_and_last_turns_and_nonsense(server: httpx.Client) -> None:
    question = [{"role": "user", "content": "Say something about caches. " * 20}]
    request = {"model": "small", "messages": question, "max_tokens": 8, "min_tokens": 8}
    by_header = server.post("/v1/chat/completions", json=request, headers={"X-Session-ID": "agent-2"})
    assert by_header.status_code == 200
    assert len(server.get("/continuum/programs/agent-2").json()["leases"]) == 1
    turn(server, question, session_id="agent-2", vllm_xargs={"continuum_last_turn": 1})
    turn(
        server, question, session_id="agent-3", vllm_xargs={"continuum_last_turn": 1, "continuum_remaining_turns": "x"}
    )
    turn(server, question)
    stats = server.get("/continuum/stats").json()
    assert (stats["live_leases"], stats["programs"], stats["live_turns"]) == (0, 0, 0)
    assert server.post("/continuum/programs/agent-2/lease", json={"tol": "x"}).status_code == 400
