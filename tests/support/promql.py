"""PromQL as the tests read it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from support import chart


def filled_in(expr: str) -> str:
    """An expression of a dashboard as Grafana sends it, with every cluster chosen."""
    return expr.replace("$__rate_interval", "1m").replace('"$cluster"', '".*"')


def metrics_of(expr: str) -> set[str]:
    """Names of the metrics in an expression. Raises where it does not parse."""
    return set(_names(chart.need("promql_parser").parse(filled_in(expr))))


def _names(node: Any) -> Iterator[str]:
    if type(node).__name__ == "VectorSelector":
        yield node.name
        return
    for attribute in ("expr", "lhs", "rhs", "vector_selector", "param"):
        child = getattr(node, attribute, None)
        if child is not None and not isinstance(child, str | int | float):
            yield from _names(child)
    args = getattr(node, "args", None) or ()
    for child in args if isinstance(args, list | tuple) else (args,):
        yield from _names(child)
