"""A real Prometheus of a test's own, and what it answers."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from support.waiting import wait_for


class Prometheus:
    """Scrapes one address every second."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=10.0, trust_env=False)

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The samples of an instant query. Raises AssertionError where Prometheus refuses it."""
        answer = self._client.get("/api/v1/query", params={"query": expr}).json()
        assert answer["status"] == "success", (expr, answer)
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def is_ready(self) -> bool:
        """It answers."""
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def close(self) -> None:
        self._client.close()


@contextmanager
def scraping(address: str, directory: Path) -> Iterator[Prometheus]:
    """A server that scrapes `address`/metrics; skipped where a laptop has none."""
    program = shutil.which("prometheus")
    if program is None:
        if os.environ.get("CI"):
            pytest.fail("prometheus is needed: install Debian's `prometheus`")
        pytest.skip("prometheus is not installed")
    config = {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s"},
        "scrape_configs": [{"job_name": "platform", "static_configs": [{"targets": [address]}]}],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        program,
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    server = Prometheus(f"http://127.0.0.1:{port}")
    try:
        wait_for(server.is_ready, what="Prometheus to start")
        yield server
    finally:
        server.close()
        process.terminate()
        process.wait(30)
