"""The dashboards that the chart ships are those of the code, ask Prometheus nothing it cannot parse, and name no metric that is not there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from continuum_router.placement import Reason
from support.checkout import ROOT
from support.dashboards import WRITTEN_TO, boards, expressions
from support.metrics import exported_page, series_names, vllm_names
from support.promql import metrics_of

NAMES = ("overview", "scheduler", "tools", "router", "program")


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (panel for panel in board["panels"] if panel["type"] != "row")


def test_the_committed_files_are_what_the_code_writes() -> None:
    found = {path.stem: path.read_text() for path in WRITTEN_TO.glob("*.json")}
    assert set(found) == set(NAMES)
    for name, text in boards().items():
        assert found[name] == text, f"run `python -m dashboards` ({name} differs)"


@pytest.mark.parametrize("name", NAMES)
async def test_every_expression_parses_and_every_metric_exists(name: str, tmp_path: Path) -> None:
    known = series_names(await exported_page(tmp_path)) | vllm_names()
    for title, expr in expressions(name):
        assert metrics_of(expr) <= known, title
        assert metrics_of(expr), title


@pytest.mark.parametrize("name", NAMES)
def test_every_query_is_limited_to_the_chosen_clusters(name: str) -> None:
    for title, expr in expressions(name):
        assert expr.count("{") == expr.count('ray_io_cluster=~"$cluster"'), title


@pytest.mark.parametrize("name", NAMES)
def test_every_panel_says_how_to_read_it_and_stands_on_its_own(name: str) -> None:
    board = json.loads(boards()[name])
    shown = list(panels(board))
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in shown:
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["type"] == "text" or panel["targets"], panel["title"]
        assert len({target["refId"] for target in panel.get("targets", ())}) == len(panel.get("targets", ()))
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]}
    assert len(places) == len(board["panels"]), "two panels at one place"


def test_boards_are_told_apart_by_uid_and_fit_the_chart() -> None:
    uids = {json.loads(text)["uid"] for text in boards().values()}
    assert uids == {f"continuum-{name}" for name in NAMES}
    assert (ROOT / "helm" / "continuum" / "files" / "dashboards") == WRITTEN_TO


def test_the_board_of_one_program_leads_to_its_trace() -> None:
    text = boards()["program"]
    for path in ("trace", "explain"):
        assert f"/v1/programs/${{program}}/{path}" in text


def test_every_reason_of_a_placement_either_stays_or_moves() -> None:
    """A reason that is added later would silently count as a move."""
    stays = {"bound", "new", "parent", "previous", "shared_prefix", "unbound"}
    moves = {"migrated", "replica_lost", "draining", "suspect", "turn_failed"}
    assert {reason.value for reason in Reason} == stays | moves
    text = boards()["router"]
    assert f'reason!~\\"{"|".join(("bound", "new", "parent", "previous", "shared_prefix", "unbound"))}\\"' in text
