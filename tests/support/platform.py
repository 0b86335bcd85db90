"""The whole platform as an operator runs it: a Ray head, `serve deploy` with the repository's serve_config.yaml, the embedded
model and store, two engine replicas. Tests speak to it over HTTP and kill its processes."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from support.waiting import wait_for

ROOT = Path(__file__).parents[2]
_BIN = Path(sys.executable).parent
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONPATH": str(ROOT),
    # Nothing in these tests speaks to anything but this machine.
    "NO_PROXY": "127.0.0.1,localhost",
}
#: Loading two engines takes a minute on an idle machine of two cores.
START_DEADLINE_S = 420.0
END_DEADLINE_S = 420.0

Json = dict[str, Any]


class Platform:
    """A running platform."""

    def __init__(self, directory: Path, args: Json) -> None:
        self._directory = directory
        self._dashboard, self._http = _free_ports(2)
        self.url = f"http://127.0.0.1:{self._http}"
        self.client = httpx.Client(base_url=self.url, timeout=60.0, trust_env=False)
        self.config: Json = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
        self.config["http_options"]["port"] = self._http
        self.args = self.config["applications"][0]["args"]
        _merge(
            self.args,
            {
                "engine": {"max_model_len": 2048, "kv_cache_gib": 0.25},
                "store": {"embedded_port": _free_ports(1)[0], "data_dir": str(directory / "store")},
                "tools": {"state_dir": str(directory / "tools")},
                "replicas": {"engine": 2, "engine_cpus": 0.5},
                "programs": {"lease_s": 4.0, "heartbeat_s": 1.0},
            },
        )
        _merge(self.args, args)
        self._ray: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start Ray, deploy, and wait until programs can be submitted."""
        port, client_port, agent_port = _free_ports(3)
        command = [
            # The platform must not outlive a test run that is killed.
            *(sys.executable, str(ROOT / "deployments" / "exec_with_parent.py"), str(os.getpid())),
            *(str(_BIN / "ray"), "start", "--head", "--block", "--disable-usage-stats", "--num-cpus=4"),
            *(f"--port={port}", "--node-ip-address=127.0.0.1", f"--ray-client-server-port={client_port}"),
            *(f"--dashboard-port={self._dashboard}", f"--dashboard-agent-listen-port={agent_port}"),
            *(f"--temp-dir={self._directory / 'ray'}", f"--object-store-memory={256 * 1024**2}"),
        ]
        with (self._directory / "ray.log").open("wb") as log:
            self._ray = subprocess.Popen(command, cwd=self._directory, env=_environment(), stdout=log, stderr=log)
        wait_for(self._dashboard_answers, what="Ray's dashboard to answer", deadline_s=START_DEADLINE_S)
        self.deploy()
        self.wait_until_ready()

    def deploy(self) -> None:
        """`serve deploy` of the configuration as it stands."""
        path = self._directory / "serve_config.yaml"
        path.write_text(yaml.safe_dump(self.config))
        command = [str(_BIN / "serve"), "deploy", str(path), "-a", f"http://127.0.0.1:{self._dashboard}"]
        result = subprocess.run(
            command, cwd=self._directory, env=_environment(), capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr

    def wait_until_ready(self) -> None:
        wait_for(self.is_ready, what=f"{self.url}/readyz to say ready", deadline_s=START_DEADLINE_S)

    def is_ready(self, **replicas: int) -> bool:
        """Programs can be submitted, and each named part has so many replicas that answer."""
        try:
            parts = self.client.get("/readyz", timeout=20).json()["parts"]
        except (httpx.TransportError, ValueError, KeyError):
            return False
        wanted = {"engine": self.args["replicas"]["engine"], **replicas}
        return all(part["ready"] for part in parts.values()) and all(
            parts[name]["replicas_ready"] >= count for name, count in wanted.items()
        )

    def _dashboard_answers(self) -> bool:
        assert self._ray is not None
        assert self._ray.poll() is None, (self._directory / "ray.log").read_text()
        try:
            address = f"http://127.0.0.1:{self._dashboard}/api/serve/applications/"
            return httpx.get(address, timeout=5, trust_env=False).is_success
        except httpx.TransportError:
            return False

    # Programs

    def submit(self, **body: Any) -> str:
        """Submit a program; returns its id."""
        response = self.client.post("/v1/programs", json=body)
        assert response.status_code == 202, response.text
        return str(response.json()["id"])

    def program(self, program_id: str) -> Json:
        response = self.client.get(f"/v1/programs/{program_id}")
        assert response.status_code == 200, response.text
        return dict(response.json())

    def journal(self, program_id: str) -> list[Json]:
        response = self.client.get(f"/v1/programs/{program_id}", params={"include": "journal"})
        return list(response.json()["journal"])

    def steps(self, program_id: str, kind: str) -> list[Json]:
        """The data of the program's steps of one kind."""
        return [step["data"] for step in self.journal(program_id) if step["kind"] == kind]

    def wait_for_step(self, program_id: str, kind: str, count: int = 1) -> None:
        wait_for(
            lambda: len(self.steps(program_id, kind)) >= count,
            what=f"step {kind} of {program_id}",
            deadline_s=END_DEADLINE_S,
        )

    def wait_for_end(self, program_id: str) -> Json:
        """The program object once it has ended."""
        return wait_for(
            lambda: next((program for program in [self._program_or_none(program_id)] if program), None),
            what=f"{program_id} to end",
            deadline_s=END_DEADLINE_S,
        )

    def _program_or_none(self, program_id: str) -> Json | None:
        try:
            response = self.client.get(f"/v1/programs/{program_id}")
        except httpx.TransportError:
            return None  # the ingress may be what a test has killed
        program = response.json()
        return program if response.status_code == 200 and program["finished_at"] else None

    def replica_of_turn(self, program_id: str) -> str | None:
        """The engine replica that has a turn of the program in its scheduler now."""
        explained = self.client.get(f"/v1/programs/{program_id}/explain")
        scheduler = explained.json()["scheduler"] if explained.is_success else None
        return scheduler["replica"] if scheduler and scheduler["live_turns"] else None

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        total = 0.0
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith((f"{name}{{", f"{name} ")) and all(
                f'{key}="{value}"' in line for key, value in labels.items()
            ):
                total += float(line.rpartition(" ")[2])
        return total

    # Processes

    def processes(self, *words: str) -> list[psutil.Process]:
        """Processes of the platform whose command line holds every word."""
        assert self._ray is not None
        found = []
        for process in psutil.Process(self._ray.pid).children(recursive=True):
            try:
                line = " ".join(process.cmdline())
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            if all(word in line for word in words):
                found.append(process)
        return found

    def replica_processes(self, deployment: str) -> list[psutil.Process]:
        return self.processes(f"ServeReplica:continuum:{deployment}")

    def kill_replica(self, deployment: str, replica_id: str) -> None:
        """Kill the process of one replica, named as Serve names it, as a crash would."""
        address = f"http://127.0.0.1:{self._dashboard}/api/serve/applications/"
        deployments = httpx.get(address, timeout=30, trust_env=False).json()["applications"]["continuum"]["deployments"]
        pids = {replica["replica_id"]: replica["pid"] for replica in deployments[deployment]["replicas"]}
        os.kill(pids[replica_id], signal.SIGKILL)

    def kill_one(self, deployment: str) -> int:
        """Kill a replica's process as a crash would; returns its id."""
        process = self.replica_processes(deployment)[0]
        process.send_signal(signal.SIGKILL)
        return process.pid

    def stop(self) -> None:
        """End Ray and everything under it, at once: an orderly end is other tests' matter."""
        self.client.close()
        if self._ray is None:
            return
        family = psutil.Process(self._ray.pid).children(recursive=True) if self._ray.poll() is None else []
        self._ray.kill()
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._ray.wait()
        psutil.wait_procs(family, timeout=30)


@contextmanager
def running_platform(args: Json | None = None) -> Iterator[Platform]:
    """A platform of one's own, with settings merged over those of `Platform`."""
    directory = Path(tempfile.mkdtemp(prefix="ctp-"))  # short: Ray's socket paths must stay under 108 bytes
    directory.chmod(0o711)  # sandboxes run as other users, below it
    platform = Platform(directory, args or {})
    try:
        platform.start()
        yield platform
    finally:
        platform.stop()
        shutil.rmtree(directory, ignore_errors=True)


def _environment() -> dict[str, str]:
    return {**os.environ, **_ENVIRONMENT, "PATH": f"{_BIN}:{os.environ.get('PATH', '')}"}


def _merge(into: Json, changes: Json) -> None:
    for key, value in changes.items():
        if isinstance(value, dict):
            _merge(into.setdefault(key, {}), value)
        else:
            into[key] = copy.deepcopy(value)


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
