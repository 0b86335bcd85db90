"""Every error that a client can meet has its stable code in the documents."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import agent_program
import continuum_router
import deployments
import tool_runtime
from agent_program.errors import PlatformError

PAGE = Path(__file__).parents[3] / "docs" / "programs-api.md"


def kinds(error: type[PlatformError]) -> set[type[PlatformError]]:
    return {error}.union(*(kinds(child) for child in error.__subclasses__()))


def test_every_code_is_documented() -> None:
    for package in (agent_program, continuum_router, deployments, tool_runtime):
        for module in pkgutil.iter_modules(package.__path__):
            # The sandbox's own programs run elsewhere; the demo and the command line raise nothing over HTTP.
            if not module.ispkg and module.name not in ("demo",):
                importlib.import_module(f"{package.__name__}.{module.name}")
    page = PAGE.read_text()
    internal = {"lease_lost"}  # between a runner and the journal
    packages = {package.__name__ for package in (agent_program, continuum_router, deployments, tool_runtime)}
    ours = {error for error in kinds(PlatformError) if error.__module__.partition(".")[0] in packages}
    codes = {error.code for error in ours} - internal
    assert sorted(code for code in codes if f"`{code}`" not in page) == []
