"""A hook of mkdocs: what a page links to outside of the documents is named instead, since the site does not have it.

In a checkout these links lead to the source; tests hold them to that.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
_ROOT = Path(__file__).resolve().parents[1]


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """The page without links that lead out of `docs`."""
    documents = Path(config["docs_dir"]).resolve()
    here = Path(page.file.abs_src_path).resolve().parent

    def named(match: re.Match[str]) -> str:
        text, target = match.groups()
        if "://" in target or target.startswith(("#", "mailto:")):
            return match.group(0)
        path = (here / target.partition("#")[0]).resolve()
        if path.is_relative_to(documents):
            return match.group(0)
        name = path.relative_to(_ROOT).as_posix() if path.is_relative_to(_ROOT) else target
        return f"`{name}`" if text in (name, path.name) else f"{text} (`{name}`)"

    return _LINK.sub(named, markdown)
