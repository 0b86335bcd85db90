"""Habits that matter enough to be tests. Each names the file that breaks it."""

from __future__ import annotations

import ast
import re

import pytest

from support.checkout import PACKAGES, ROOT, files, modules, modules_in, named_by, pyproject, relative, text_files

LINES_MAX = 500

#: Where packages come from is the user's own configuration. The one exception is where the CPU build of torch lives.
HOSTS_OF_REGISTRIES = [
    "py" + "pi.org",
    "python" + "hosted.org",
    "npm" + "js.org",
    "deb." + "debian.org",
    "crates" + ".io",
]
MARKDOWN_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def test_no_file_is_too_long_to_want_to_open() -> None:
    lengths = {relative(path): len(text.splitlines()) for path, text in text_files() if path.suffix == ".py"}
    assert {name: lines for name, lines in lengths.items() if lines > LINES_MAX} == {}


def test_package_files_hold_a_docstring_and_nothing_else() -> None:
    """Ray and vLLM import the packages; what an `__init__` imports, every decision module would import too."""
    for name, path in modules().items():
        if path.name == "__init__.py":
            body = ast.parse(path.read_text()).body
            assert len(body) == 1, name
            assert ast.get_docstring(ast.parse(path.read_text())), name


def test_every_module_is_reached_from_an_entry_point() -> None:
    """An entry point is a console script, a plugin, a program (`python -m`), or a module that a configuration file names.

    In-memory implementations of a port are shipped for tests, which may be all that reach them.
    """
    project = pyproject()["project"]
    plugins = [value for group in project["entry-points"].values() for value in group.values()]
    entry_points = [*project["scripts"].values(), *plugins]
    roots = modules_in(" ".join(entry_points))
    roots |= {name for name, path in modules().items() if 'if __name__ == "__main__"' in path.read_text()}
    for path, text in text_files():
        if path.suffix in (".yaml", ".yml"):
            roots |= modules_in(text)
    roots |= {name for name, path in modules().items() if path.name.startswith("memory_")}

    reached, pending = set(roots), list(roots)
    while pending:
        for name in named_by(modules()[pending.pop()]) - reached:
            reached.add(name)
            pending.append(name)
    packages = {name for name, path in modules().items() if path.name == "__init__.py"}
    assert sorted(set(modules()) - reached - packages) == []


def test_no_file_names_this_machine_or_a_registry() -> None:
    forbidden = [str(ROOT), *HOSTS_OF_REGISTRIES]
    found = [(relative(path), word) for path, text in text_files() for word in forbidden if word in text]
    assert found == []


def test_the_lock_names_packages_and_versions_only() -> None:
    lines = (ROOT / "requirements/cpu.lock").read_text().splitlines()
    for line in lines:
        assert line.startswith("#") or re.fullmatch(r"[a-z0-9-]+(\[[a-z,]+\])?==([0-9]+!)?[0-9][\w.+]*", line), line


@pytest.mark.parametrize("path", [path for path in files() if path.suffix == ".md"], ids=relative)
def test_links_between_documents_lead_somewhere(path) -> None:
    text = path.read_text()
    for match in MARKDOWN_LINK.finditer(text):
        target = match.group(1) or match.group(2)
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        document = (path.parent / name).resolve() if name else path
        assert document.exists(), f"{relative(path)} links to {target}"
        if anchor:
            assert anchor in anchors(document.read_text()), f"{relative(path)} links to {target}"


def anchors(markdown: str) -> set[str]:
    """The names that headings can be linked by: lower case, without punctuation, spaces as hyphens."""
    headings = re.findall(r"^#+ (.+)$", markdown, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_document_has_one_title() -> None:
    for path in files():
        if path.suffix == ".md":
            prose = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
            assert len(re.findall(r"^# ", prose, flags=re.MULTILINE)) == 1, relative(path)


def test_the_wheel_holds_every_package() -> None:
    assert sorted(pyproject()["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == sorted(PACKAGES)
    assert sorted(pyproject()["tool"]["importlinter"]["root_packages"]) == sorted(PACKAGES)
