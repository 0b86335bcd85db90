"""Decision modules need no framework: each one imports in an interpreter where Ray, vLLM and the rest do not exist.

import-linter proves that no module of ours leads from a decision to a framework. It does not see what a package's
`__init__` drags in; this does.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.checkout import ROOT, contract, modules

LISTED = contract("decisions")["source_modules"]
#: A listed package stands for every module in it.
DECISIONS = sorted(name for name in modules() if any(f"{name}.".startswith(f"{listed}.") for listed in LISTED))
BLOCKED = sorted(set(contract("decisions")["forbidden_modules"]) - sys.stdlib_module_names)

IMPORT_WITHOUT = """
import importlib, sys
blocked, name = sys.argv[1].split(","), sys.argv[2]
sys.modules.update(dict.fromkeys(blocked))  # None makes an import of it fail
importlib.import_module(name)
"""


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", DECISIONS)
def test_it_imports_where_no_framework_is_installed(name: str) -> None:
    result = run_python(IMPORT_WITHOUT, ",".join(BLOCKED), name)
    assert result.returncode == 0, result.stderr


def test_every_listed_module_exists() -> None:
    assert [listed for listed in LISTED if listed not in modules()] == []


def test_the_block_works() -> None:
    result = run_python(IMPORT_WITHOUT, "json", "json")
    assert result.returncode != 0
    assert "ModuleNotFoundError" in result.stderr
