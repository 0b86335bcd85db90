"""What a dashboard of ours is made of, and how it becomes Grafana's JSON.

A board is rows of panels, a panel is a question with the queries that answer it: its title is what is asked, its description how to
read the answer. Everything else (places, colours, legends) follows from here, so that the boards look alike.

Every query is limited to the chosen clusters by `SCOPE`, which also matches series without the label. The sums of the journal are the
same from every ingress, so they are joined with `max`; what replicas count is added up.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from string import ascii_uppercase
from typing import Any

from grafana_foundation_sdk.builders import common as common_builder
from grafana_foundation_sdk.builders import dashboard as dashboard_builder
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, text, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as dashboard_model
from grafana_foundation_sdk.models import prometheus as prometheus_model
from grafana_foundation_sdk.models import text as text_model

#: Goes into the braces of every selector.
SCOPE = 'ray_io_cluster=~"$cluster"'
TAG = "continuum"
_WIDTH = 24
_SOURCE = dashboard_model.DataSourceRef(type_val="prometheus", uid="${datasource}")


class Show(Enum):
    """How a panel draws its answer."""

    LINES = "lines"
    #: Parts of a whole, one above the other.
    STACK = "stack"
    #: The latest number.
    NUMBER = "number"
    #: Buckets of a histogram over time.
    HEATMAP = "heatmap"
    TEXT = "text"


@dataclass(frozen=True, kw_only=True)
class Query:
    """One PromQL expression, and what its series are called."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One question."""

    title: str
    description: str
    #: Grafana's name of the unit: `s`, `percentunit`, `short`, `ops`, `bytes`.
    unit: str = "short"
    show: Show = Show.LINES
    queries: tuple[Query, ...] = ()
    #: Markdown, of a text panel.
    content: str = ""
    #: Of the board's 24.
    columns: int = 12
    #: Values from which it is yellow, and red; None where there is no such value.
    warn_at: float | None = None
    bad_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """Panels under one headline."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, kw_only=True)
class Board:
    """One dashboard."""

    #: Name of its file, and the end of its uid.
    name: str
    title: str
    description: str
    rows: tuple[Row, ...]
    #: Text boxes above the panels: name → what stands in it at first.
    text_boxes: dict[str, str] = field(default_factory=dict)


def to_json(board: Board) -> str:
    """The board as Grafana imports it."""
    builder = (
        dashboard_builder.Dashboard(board.title)
        .uid(f"continuum-{board.name}")
        .description(board.description)
        .tags([TAG])
        .timezone("browser")
        .time("now-1h", "now")
        .refresh("30s")
        .tooltip(dashboard_model.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard_builder.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(_cluster_variable())
        .link(_links_to_other_boards())
    )
    for name, value in board.text_boxes.items():
        builder = builder.with_variable(dashboard_builder.TextBoxVariable(name).label(name).default_value(value))
    ids = count(1)
    for row in board.rows:
        builder = builder.with_row(dashboard_builder.Row(row.title).id(next(ids)))
        for panel in row.panels:
            builder = builder.with_panel(_panel(panel).id(next(ids)))
    built = json.loads(json.dumps(builder.build(), cls=JSONEncoder))
    return json.dumps(_known(built), indent=1, sort_keys=True) + "\n"


def _known(node: Any) -> Any:
    """Without what is null, which Grafana fills in and some of its versions stumble over."""
    if isinstance(node, list):
        return [_known(one) for one in node]
    if isinstance(node, dict):
        return {key: _known(value) for key, value in node.items() if value is not None or key == "value"}
    return node


def _cluster_variable() -> dashboard_builder.QueryVariable:
    # A label that nothing has (a platform outside Kubernetes) leaves "All", which matches series without it.
    return (
        dashboard_builder.QueryVariable("cluster")
        .label("Ray cluster")
        .query("label_values(continuum_store_up, ray_io_cluster)")
        .datasource(_SOURCE)
        .refresh(dashboard_model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .include_all(True)
        .all_value(".*")
        .multi(True)
    )


def _links_to_other_boards() -> dashboard_builder.DashboardLink:
    return (
        dashboard_builder.DashboardLink("Continuum")
        .type(dashboard_model.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .keep_time(True)
        .include_vars(True)
    )


def _panel(panel: Panel) -> Any:
    height = 4 if panel.show is Show.NUMBER else 8
    if panel.show is Show.TEXT:
        written = text.Panel().mode(text_model.TextMode.MARKDOWN).content(panel.content)
        return written.title(panel.title).description(panel.description).span(panel.columns).height(height)
    kinds: dict[Show, Any] = {
        Show.LINES: timeseries.Panel,
        Show.STACK: timeseries.Panel,
        Show.NUMBER: stat.Panel,
        Show.HEATMAP: heatmap.Panel,
    }
    builder = kinds[panel.show]().title(panel.title).description(panel.description).datasource(_SOURCE)
    builder = builder.unit(panel.unit).span(panel.columns).height(height).no_value("nothing yet")
    if panel.show in (Show.LINES, Show.STACK):
        builder = builder.min(0).legend(
            common_builder.VizLegendOptions()
            .show_legend(True)
            .display_mode(common_model.LegendDisplayMode.TABLE)
            .placement(common_model.LegendPlacement.BOTTOM)
            .calcs(["lastNotNull", "max"])
        )
    if panel.show is Show.STACK:
        builder = builder.fill_opacity(30).stacking(
            common_builder.StackingConfig().mode(common_model.StackingMode.NORMAL)
        )
    if panel.warn_at is not None or panel.bad_at is not None:
        builder = builder.thresholds(_thresholds(panel))
    for letter, query in zip(ascii_uppercase, panel.queries, strict=False):
        builder = builder.with_target(_target(query, panel.show).ref_id(letter))
    return builder


def _thresholds(panel: Panel) -> dashboard_builder.ThresholdsConfig:
    steps = [("green", None), ("yellow", panel.warn_at), ("red", panel.bad_at)]
    known = [
        dashboard_model.Threshold(color=color, value=value)
        for color, value in steps
        if color == "green" or value is not None
    ]
    return dashboard_builder.ThresholdsConfig().mode(dashboard_model.ThresholdsMode.ABSOLUTE).steps(known)


def _target(query: Query, show: Show) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend or "__auto").datasource(_SOURCE)
    if show is Show.HEATMAP:
        return target.format(prometheus_model.PromQueryFormat.HEATMAP)
    return target.instant() if show is Show.NUMBER else target.range()


# --- queries that occur everywhere -----------------------------------------------------------------------------------


def rate(metric: str, labels: str = "", *, by: str = "") -> str:
    """How fast a counter of the replicas grows, added up over them."""
    return f"sum{_by(by)}(rate({_series(metric, labels)}[$__rate_interval]))"


def journal_rate(metric: str, labels: str = "", *, by: str = "") -> str:
    """How fast a counter of the journal grows."""
    return f"max{_by(by)}(rate({_series(metric, labels)}[$__rate_interval]))"


def total(metric: str, labels: str = "", *, by: str = "") -> str:
    """A gauge of the replicas, added up over them."""
    return f"sum{_by(by)}({_series(metric, labels)})"


def mean(metric: str, labels: str = "", *, by: str = "") -> str:
    """The mean of a histogram over the last while."""
    return f"{rate(f'{metric}_sum', labels, by=by)} / {rate(f'{metric}_count', labels, by=by)}"


def quantile(q: float, metric: str, labels: str = "", *, by: str = "") -> str:
    """A quantile of a histogram over the last while."""
    keys = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{metric}_bucket', labels, by=keys)})"


def quantiles(metric: str, labels: str = "") -> tuple[Query, ...]:
    """Median, P95 and P99."""
    shown = ((0.5, "P50"), (0.95, "P95"), (0.99, "P99"))
    return tuple(Query(expr=quantile(q, metric, labels), legend=legend) for q, legend in shown)


def _series(metric: str, labels: str) -> str:
    return f"{metric}{{{SCOPE}{', ' + labels if labels else ''}}}"


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else " "
