"""The dashboards, as the tests look at them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

from support import chart
from support.checkout import ROOT

WRITTEN_TO = ROOT / "helm" / "continuum" / "files" / "dashboards"


@cache
def boards() -> dict[str, str]:
    """What the code makes of each board, by name."""
    chart.need("grafana_foundation_sdk")
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))  # a program of the checkout, no package of ours
    from dashboards.__main__ import BOARDS
    from dashboards.boards import to_json

    return {board.name: to_json(board) for board in BOARDS}


def expressions(name: str) -> Iterator[tuple[str, str]]:
    """Title of the panel and expression of every query of a board."""
    board: dict[str, Any] = json.loads(boards()[name])
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
