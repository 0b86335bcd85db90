"""docs/sandbox.md names a test for each attack: every one of them exists, and no attack on the sandbox is missing from the table."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ADVERSARIAL = ROOT / "tests" / "adversarial"
ATTACKS = 60
_ROW = re.compile(r"^\| (\d+) \| ([^|]+) \| (.+) \|$", re.MULTILINE)
_TEST = re.compile(r"`(?:([\w./]+\.py)::)?(test_\w+)`")


def table() -> dict[int, list[tuple[str, str]]]:
    """Number of the attack → its tests, as file and name. A test without a file is in that of the one before it."""
    found: dict[int, list[tuple[str, str]]] = {}
    for number, _, cell in _ROW.findall((ROOT / "docs" / "sandbox.md").read_text()):
        where = ""
        for file, name in _TEST.findall(cell):
            where = file or where
            found.setdefault(int(number), []).append((where, name))
    return found


def names_in(path: Path) -> set[str]:
    """What pytest collects there."""
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def test_every_attack_has_a_row_and_a_test() -> None:
    assert sorted(table()) == list(range(1, ATTACKS + 1))


def test_every_test_of_the_table_exists() -> None:
    for number, tests in table().items():
        for file, name in tests:
            assert name in names_in(ADVERSARIAL / file), f"attack {number}: {file} has no {name}"


def test_no_attack_on_the_sandbox_is_left_out_of_the_table() -> None:
    named = {(Path(file).name, name) for tests in table().values() for file, name in tests}
    left_out = [
        f"{path.name}::{name}"
        for path in sorted(ADVERSARIAL.glob("test_sandbox_*.py"))
        if path.name != "test_sandbox_as_plain_user.py"
        for name in sorted(names_in(path))
        if (path.name, name) not in named
    ]
    assert left_out == []
