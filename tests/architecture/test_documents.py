"""The documents: the site builds without a warning, generated pages are up to date, and what they tell people to type exists."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from pydantic import BaseModel

from deployments.cli import app
from deployments.settings import PlatformSettings
from support import chart
from support.api import ApiBench
from support.checkout import ROOT, pyproject
from support.reference import pages

DOCS = ROOT / "docs"
TYPED = (ROOT / "README.md", DOCS / "quickstart.md", DOCS / "operating.md", DOCS / "observability.md")
_BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    chart.need("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    built = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("index.html")}
    assert {"index.html", "quickstart/index.html", "settings/index.html", "runbooks/index.html"} <= built
    # What lies outside of the documents is named, for the site does not have it.
    quickstart = (tmp_path / "site" / "quickstart" / "index.html").read_text()
    assert "README.md</code>" in quickstart
    assert "README.md" not in "".join(re.findall(r'href="([^"]*)"', quickstart))


def test_every_page_is_in_the_navigation_or_linked_from_another_page() -> None:
    texts = {path: path.read_text() for path in (*DOCS.rglob("*.md"), ROOT / "mkdocs.yml")}
    for page in sorted(DOCS.rglob("*.md")):
        name = page.relative_to(DOCS).as_posix()
        others = [text for path, text in texts.items() if path != page]
        assert any(name in text or f"({page.name}" in text for text in others), f"nothing leads to docs/{name}"


@pytest.mark.parametrize("name", list(pages()))
def test_a_generated_page_is_what_the_code_makes(name: str) -> None:
    assert (DOCS / name).read_text() == pages()[name](), "run `PYTHONPATH=tests python -m support.reference`"


# --- what people type -------------------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, str]]:
    """(document, command) of every shell block; a line that ends with a backslash, or inside quotes, goes on."""
    for document in TYPED:
        for block in _BLOCK.findall(document.read_text()):
            pending = ""
            for line in block.splitlines():
                pending = f"{pending}\n{line}" if pending else line
                if pending.endswith("\\"):
                    pending = pending[:-1]
                elif pending.strip() and is_whole(pending):
                    yield document.name, pending
                    pending = ""
            assert not pending.strip(), f"{document.name}: {pending!r} has no end"


def is_whole(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return True


COMMANDS = list(commands())


@pytest.mark.parametrize(
    "command", [command for _, command in COMMANDS], ids=[f"{name}: {one[:50]}" for name, one in COMMANDS]
)
def test_a_command_of_the_documents_can_be_typed(command: str) -> None:
    words = shlex.split(command, comments=True)
    check = CHECKS[Path(words[0]).name]
    check(words[1:])


def check_continuum(arguments: list[str]) -> None:
    """Every word is a command, an option or an argument of it; nothing is run."""
    group: Any = typer.main.get_command(app)
    context = group.make_context("continuum", list(arguments), resilient_parsing=True)
    words = list(arguments)
    while hasattr(group, "commands"):
        name = words.pop(0)
        assert name in group.commands, arguments
        group = group.commands[name]
    group.make_context(name, words, parent=context)


def check_make(arguments: list[str]) -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for argument in arguments:
        assert argument in targets or "=" in argument, argument


def check_curl(arguments: list[str]) -> None:
    """The address is a route of the API, and the method one that it takes."""
    (url,) = (argument for argument in arguments if argument.startswith("http://"))
    path = re.sub(r"^http://[^/]+", "", url).partition("?")[0]
    method = "post" if "-d" in arguments else "get"
    routes: Mapping[str, Mapping[str, Any]] = ApiBench().app.openapi()["paths"]
    shapes = {re.sub(r"\{\w+\}", "[^/]+", route): methods for route, methods in routes.items()}
    found = [methods for shape, methods in shapes.items() if re.fullmatch(shape, path)]
    assert any(method in methods for methods in found), command_of(arguments)


def command_of(arguments: list[str]) -> str:
    return shlex.join(arguments)


def check_serve(arguments: list[str]) -> None:
    """Ray Serve's own command, with a file or an application of ours."""
    action, target = arguments[0], arguments[1]
    assert action in {"deploy", "run", "build"}
    if target.endswith(".yaml"):
        assert (ROOT / target).exists()
    else:
        module, _, name = target.partition(":")
        assert importlib.util.find_spec(module) is not None
        assert name == "app"


def check_pip(arguments: list[str]) -> None:
    (extra,) = re.findall(r"\.\[(\w+)\]", command_of(arguments))
    assert extra in pyproject()["project"]["optional-dependencies"]


def check_python(arguments: list[str]) -> None:
    assert arguments[0] == "-m"
    assert importlib.util.find_spec(arguments[1]) is not None


CHECKS = {
    "continuum": check_continuum,
    "make": check_make,
    "curl": check_curl,
    "serve": check_serve,
    "pip": check_pip,
    "python": check_python,
}


def test_a_command_that_does_not_exist_is_found() -> None:
    """The checks above can fail."""
    with pytest.raises(AssertionError):
        check_continuum(["programs", "explode"])
    with pytest.raises(typer.TyperException):
        check_continuum(["doctor", "--no-such-option"])
    with pytest.raises(AssertionError):
        check_curl(["-s", "http://127.0.0.1:8000/v1/nothing"])
    with pytest.raises(AssertionError):
        check_make(["explode"])


# --- settings that the documents name ---------------------------------------------------------------------------------

BRANCHES = "|".join(PlatformSettings.model_fields)
_SETTING = re.compile(rf"`(?:settings\.)?((?:{BRANCHES})\.[a-z_.]+)(?:: [^`]*)?`")
NAMES_SETTINGS = [
    DOCS / name for name in ("operating.md", "observability.md", "runbooks.md", "security.md", "troubleshooting.md")
]


@pytest.mark.parametrize("document", NAMES_SETTINGS, ids=lambda path: path.name)
def test_every_setting_that_a_document_names_exists(document: Path) -> None:
    for name in _SETTING.findall(document.read_text()):
        assert setting_exists(name), f"{document.name} names {name}"


def setting_exists(name: str) -> bool:
    model: type[BaseModel] | None = PlatformSettings
    for part in name.split("."):
        if model is None or part not in model.model_fields:
            return False
        model = model_in(model.model_fields[part].annotation)
    return True


def model_in(annotation: Any) -> type[BaseModel] | None:
    pending = [annotation]
    while pending:
        kind = pending.pop()
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
        pending.extend(get_args(kind))
    return None
