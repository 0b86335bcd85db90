"""A report that is one file: tables and plots of a set of replays, for a screen or a phone, on white or on black.

No script, no font and no image is fetched: the plots are SVG elements of the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.replay import plots
from benchmarks.replay.comparison import Row, load_name, points_under_pressure, ratios
from benchmarks.replay.output import baseline_of, uncalibrated, verdict

Result = Mapping[str, Any]

_STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1f2328;--faint:#d0d7de;--soft:#f6f8fa;--warn:#9a6700;--warn-bg:#fff8c5}
@media(prefers-color-scheme:dark){:root{--bg:#0d1117;--fg:#e6edf3;--faint:#3d444d;--soft:#161b22;--warn:#e3b341;--warn-bg:#2b2410}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:76rem;padding:1rem;background:var(--bg);color:var(--fg);font:16px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem;line-height:1.25;margin:.5rem 0}h2{font-size:1.15rem;margin:2rem 0 .25rem}
p{max-width:46rem;margin:.4rem 0}.lead{font-size:1.1rem}
.warn{color:var(--warn);background:var(--warn-bg);border-left:4px solid var(--warn);padding:.5rem .75rem;max-width:none}
.panels{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,21rem),1fr));gap:1rem;align-items:start}
.panels svg{width:100%;height:auto;color:var(--fg)}
.table{overflow-x:auto;margin:.5rem 0}table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .6rem;text-align:right;border-bottom:1px solid var(--faint);white-space:nowrap}
th:first-child,td:first-child{position:sticky;left:0;background:var(--bg);text-align:left}
td:nth-child(2),th:nth-child(2){text-align:left}th{background:var(--soft)}tr.best td{font-weight:600}
footer{margin-top:2rem;font-size:.85rem;opacity:.75}
"""


def write_report(path: Path, results: Sequence[Result], rows: Sequence[Row]) -> None:
    """Write the report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report(results, rows), encoding="utf-8")


def report(results: Sequence[Result], rows: Sequence[Row]) -> str:
    """The page. The same results give the same bytes."""
    first = results[0]
    detailed = [result for result in results if result.get("by_program")]
    title = f"{first['workload']} on {first['replicas']} × {first['deployment']}"
    sections = [
        ("Comparison", "", [_comparison(rows)]),
        (
            "Throughput and waiting against load",
            "Load 1 is the rate at which the GPU has no idle time left if no token is ever computed twice.",
            plots.load_panels(rows),
        ),
        ("Completion times", "", plots.completion_panels(detailed)),
        (
            "Where the time goes",
            "Mean over programs. <b>queue</b>: ready, nothing scheduled; <b>load</b>: KV comes from an offload tier; "
            "<b>prefill</b>, <b>decode</b>: computing; <b>preempted</b>: from a preemption to the next token; "
            "<b>lost</b>: work that a replica's death threw away; <b>tool</b>: the tools' own time.",
            plots.cause_panels(results),
        ),
        ("Where each program's time goes", "One bar a program.", plots.program_panels(detailed)),
        (
            "KV cache over time",
            "<b>running</b>: used by turns; <b>retained</b>: held for paused programs; <b>cached</b>: would still be found, "
            "and given away when needed.",
            plots.occupancy_panels(detailed),
        ),
        (
            "Time to live against the wait",
            "One dot a tool wait. Above the line the program came back in time; below it the KV had been let go.",
            [*plots.ttl_panels(detailed), _calibration(results)],
        ),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1><p class=lead>{escape(verdict(rows))}</p>{_facts(results)}{_warnings(results)}"
        + "".join(_section(*section) for section in sections)
        + "<footer>Virtual-time replay on vLLM's own scheduler and KV cache; step times from "
        f"{escape(str(first.get('step_time_label', 'a model')))}. Loads are finite bursts: overload is how long it takes "
        "to drain. Runs of chaotic systems differ by 2–5 % between seeds.</footer></body></html>\n"
    )


def _section(title: str, text: str, parts: Sequence[str]) -> str:
    filled = [part for part in parts if part]
    if not filled:
        return ""
    panels = "".join(part for part in filled if part.startswith("<svg"))
    tables = "".join(part for part in filled if not part.startswith("<svg"))
    body = (f"<div class=panels>{panels}</div>" if panels else "") + tables
    return f"<section><h2>{escape(title)}</h2>{f'<p>{text}</p>' if text else ''}{body}</section>"


def _facts(results: Sequence[Result]) -> str:
    first = results[0]
    seeds = len({result["seed"] for result in results})
    facts = [
        f"{first['programs']} programs, {first['turns']} turns a run",
        f"{seeds} seed{'s' if seeds > 1 else ''}",
        f"{first['kv_tokens']:,} tokens of KV a replica",
    ]
    if first.get("tier", "none") != "none":
        facts.append(f"offload to {first['tier']}")
    if first.get("declared", "none") != "none":
        facts.append(f"remaining turns declared: {first['declared']}")
    facts += [f"left out: {count} programs {reason}" for reason, count in first["left_out"].items()]
    return f"<p>{escape('; '.join(facts))}.</p>"


def _warnings(results: Sequence[Result]) -> str:
    return "".join(
        f"<p class=warn>Uncalibrated: {escape(name)}: {escape('; '.join(reasons))}.</p>"
        for name, reasons in uncalibrated(results).items()
    )


def _comparison(rows: Sequence[Row]) -> str:
    baseline, pressed = baseline_of(rows), points_under_pressure(rows)
    over = {policy: ratios(rows, policy, baseline) for policy in {row.policy for row in rows}}
    best = {row.point: min(r.completion_mean_s for r in rows if r.point == row.point) for row in rows}
    body = [
        [
            row.policy,
            row.load + (" *" if row.point in pressed else ""),
            f"{row.completion_mean_s:.1f}",
            f"{over[row.policy][row.point]:.2f}×" if row.point in over[row.policy] else "",
            f"{row.completion_p50_s:.1f}",
            f"{row.completion_p95_s:.1f}",
            f"{row.completion_p99_s:.1f}",
            f"{row.first_token_p99_s:.2f}",
            f"{row.programs_per_s:.3f}",
            f"{row.reused_fraction:.0%}",
            f"{row.slowdown_max:.1f}×",
        ]
        for row in rows
    ]
    head = [
        "preset",
        "load",
        "mean s",
        f"over {baseline}",
        "P50 s",
        "P95 s",
        "P99 s",
        "first token P99 s",
        "programs/s",
    ]
    marked = [row.completion_mean_s == best[row.point] for row in rows]
    note = (
        f"<p>* under pressure: {escape(baseline)} loses KV that its turns could reuse, or queues.</p>"
        if pressed
        else ""
    )
    return _table([*head, "KV reused", "largest slowdown"], body, marked) + note


def _calibration(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        found = result.get("ttl_calibration") or {}
        for reason, part in found.get("by_reason", {}).items():
            rows.append(
                [
                    result["policy"],
                    reason,
                    load_name(result),
                    str(result["seed"]),
                    f"{part['waits']}",
                    f"{part['within']:.0%}",
                    _seconds(part["ttl_s_mean"]),
                    _seconds(part["waited_s_mean"]),
                ]
            )
    head = ["preset", "why that long", "load", "seed", "waits", "back in time", "mean time to live", "mean wait"]
    return _table(head, rows, [False] * len(rows)) if rows else ""


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], marked: Sequence[bool]) -> str:
    cells = "".join(
        f"<tr{' class=best' if is_best else ''}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
        for row, is_best in zip(rows, marked, strict=True)
    )
    return (
        f"<div class=table><table><tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>{cells}</table></div>"
    )
