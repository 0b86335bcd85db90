"""Each alert fires when it should, is quiet otherwise, is made of metrics that exist, and has a runbook."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from support import chart
from support.alerts import CASES, rule_tests
from support.metrics import exported_page, needs_promtool, series_names, vllm_names
from support.promql import metrics_of

FILES = sorted((chart.CHART / "files" / "alerts").glob("*.yaml"))
ALERTS = [rule for path in FILES for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]
RUNBOOKS = chart.ROOT / "docs" / "runbooks.md"


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_has_a_runbook_where_it_says(alert: dict[str, Any]) -> None:
    document, _, anchor = alert["annotations"]["runbook"].partition("#")
    assert (chart.ROOT / document) == RUNBOOKS
    assert anchor == alert["alert"].lower()
    assert f"### {alert['alert']}\n" in RUNBOOKS.read_text()


def test_no_runbook_is_for_an_alert_that_is_gone() -> None:
    headings = {line.removeprefix("### ") for line in RUNBOOKS.read_text().splitlines() if line.startswith("### ")}
    assert headings == {alert["alert"] for alert in ALERTS}


async def test_alerts_are_made_of_metrics_that_exist(tmp_path: Path) -> None:
    known = series_names(await exported_page(tmp_path)) | vllm_names()
    for alert in ALERTS:
        used = {name for name in metrics_of(alert["expr"]) if not name.startswith("ray_serve_")}
        assert used <= known, alert["alert"]


def test_every_alert_has_series_under_which_it_fires() -> None:
    assert set(CASES) == {alert["alert"] for alert in ALERTS}


def test_prometheus_accepts_the_rules() -> None:
    command = [needs_promtool(), "check", "rules", *map(str, FILES)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    document = tmp_path / "alerts.test.yaml"
    document.write_text(yaml.safe_dump(rule_tests([str(path) for path in FILES], ALERTS), sort_keys=False, width=4096))
    result = subprocess.run(
        [needs_promtool(), "test", "rules", str(document)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
