"""`helm test`: the script of the hook's pod, run as the pod runs it, against servers that behave well and badly."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from support import chart


class ScriptedPlatform:
    """Answers as the platform does: `not_ready` times 503 on /readyz, then a program that takes `polls` reads to end."""

    def __init__(self, *, not_ready: int = 0, polls: int = 1, state: str = "completed", key: str | None = None) -> None:
        self.not_ready, self.polls, self.state, self.key = not_ready, polls, state, key
        self.submitted: dict[str, Any] | None = None

    def answer(self, method: str, path: str, body: Any, key: str | None) -> tuple[int, Any]:
        match method, path:
            case "GET", "/readyz":
                self.not_ready -= 1
                return (200, {"ready": True}) if self.not_ready < 0 else (503, {"error": {}})
            case _ if self.key is not None and key != f"Bearer {self.key}":
                return 401, {"error": {"message": "no such key"}}
            case "GET", "/v1/models":
                return 200, {"data": [{"id": "m"}]}
            case "POST", "/v1/programs":
                self.submitted = body
                return 202, {"id": "p1", "state": "queued", "finished_at": None}
            case "GET", "/v1/programs/p1":
                self.polls -= 1
                done = self.polls < 0
                return 200, {
                    "id": "p1",
                    "state": self.state if done else "running",
                    "finished_at": 1.0 if done else None,
                    "turns": 1 if self.state == "completed" else 0,
                    "error": None if self.state == "completed" else {"message": "the engine is gone"},
                }
        return 404, {"error": {"message": path}}


@contextmanager
def serving(platform: ScriptedPlatform) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, answer = platform.answer(
                self.command, self.path, json.loads(body or b"null"), self.headers.get("authorization")
            )
            payload = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_GET = do_POST = _handle

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run_hook(base_url: str, *, timeout_s: float = 60, key: str | None = None) -> subprocess.CompletedProcess[str]:
    (pod,) = chart.of_kind("Pod", {})
    (container,) = pod["spec"]["containers"]
    environment = {"PATH": os.environ["PATH"], "BASE_URL": base_url, "TIMEOUT_S": str(timeout_s)}
    if key is not None:
        environment["API_KEY"] = key
    return subprocess.run(
        [*container["command"], *container["args"]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_it_passes_once_the_platform_is_ready_and_a_program_has_run() -> None:
    platform = ScriptedPlatform(not_ready=1, polls=1)
    with serving(platform) as base_url:
        done = run_hook(base_url)
    assert (done.returncode, done.stderr) == (0, "")
    assert '"state": "completed"' in done.stdout
    assert platform.submitted is not None
    assert platform.submitted["limits"]["max_turns"] == 1


def test_it_fails_with_the_reason_when_the_program_fails() -> None:
    with serving(ScriptedPlatform(polls=0, state="failed")) as base_url:
        done = run_hook(base_url)
    assert done.returncode == 1
    assert "the engine is gone" in done.stderr


@pytest.mark.parametrize(("key", "code"), [("right", 0), ("wrong", 1), (None, 1)])
def test_it_sends_the_key_that_it_is_given(key: str | None, code: int) -> None:
    with serving(ScriptedPlatform(polls=0, key="right")) as base_url:
        assert run_hook(base_url, key=key).returncode == code


def test_it_fails_when_the_platform_is_not_ready_in_time() -> None:
    with serving(ScriptedPlatform(not_ready=1000)) as base_url:
        done = run_hook(base_url, timeout_s=11)
    assert done.returncode == 1
    assert "ready: not within the time allowed" in done.stderr


def test_it_calls_the_service_that_kuberay_makes() -> None:
    (pod,) = chart.of_kind("Pod", {})
    environment = {one["name"]: one.get("value") for one in pod["spec"]["containers"][0]["env"]}
    name = chart.rayservice({})["metadata"]["name"]
    assert environment["BASE_URL"] == f"http://{name}-serve-svc.{chart.NAMESPACE}.svc:8000"
