"""The checkout as the architecture tests see it: its files, its modules, and what imports what."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("agent_program", "benchmarks", "continuum_router", "deployments", "engine_replicas", "tool_runtime")

#: `package.module`, `package.module:name` or `package.module.name` in a string: how Ray and vLLM are told what to load.
_MODULE_IN_STRING = re.compile(rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)+")
#: `from package import module, module` in a string: code that another interpreter is started with.
_IMPORT_IN_STRING = re.compile(rf"from ((?:{'|'.join(PACKAGES)})(?:\.\w+)*) import ([\w, ]+)")


@cache
def pyproject() -> Mapping[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def contract(name: str) -> Mapping[str, Any]:
    """The import-linter contract with the id `name`."""
    contracts = pyproject()["tool"]["importlinter"]["contracts"]
    return next(one for one in contracts if one["id"] == name)


@cache
def files() -> tuple[Path, ...]:
    """Every file that is or will be committed."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    paths = (ROOT / name for name in listing.stdout.split("\0") if name)
    return tuple(sorted(path for path in paths if path.is_file()))


def text_files() -> Iterator[tuple[Path, str]]:
    """The files that are text, with their text."""
    for path in files():
        content = path.read_bytes()
        if b"\0" not in content:
            yield path, content.decode()


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def modules() -> Mapping[str, Path]:
    """The modules of the shipped packages, by dotted name."""
    found = {}
    for path in files():
        parts = path.relative_to(ROOT).with_suffix("").parts
        if path.suffix == ".py" and parts[0] in PACKAGES:
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def named_by(path: Path) -> set[str]:
    """The modules that a Python file imports, anywhere in it, or names in a string."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import():
                found.update(alias.name for alias in node.names)
            case ast.ImportFrom(module=str(module)):
                found.update({module, *(f"{module}.{alias.name}" for alias in node.names)})
            case ast.Constant(value=str(text)):
                found.update(modules_in(text))
    return found & set(modules())


def modules_in(text: str) -> set[str]:
    """The modules that a text names by dotted path, or imports if it is code."""
    found: set[str] = set()
    for match in _IMPORT_IN_STRING.finditer(text):
        found.update(f"{match.group(1)}.{name.strip()}" for name in match.group(2).split(","))
    for match in _MODULE_IN_STRING.finditer(text):
        parts = match.group().split(".")
        found.update(".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return found & set(modules())
