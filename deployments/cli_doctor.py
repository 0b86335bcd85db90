"""`continuum doctor`: look at this machine before the platform is started on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from deployments.cli_output import print_json
from deployments.cli_settings import SettingsError, load_settings
from deployments.cli_support import AsJson, ExitCode, err, fail, out
from deployments.doctor import Finding, Verdict, examine, is_fit

_SHOWN = {
    Verdict.OK: ("ok", "green"),
    Verdict.WARNING: ("look", "yellow"),
    Verdict.PROBLEM: ("PROBLEM", "bold red"),
}


def doctor(
    config: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Settings: a Serve configuration file, or its `args` alone."),
    ] = None,
    host: Annotated[str, typer.Option(envvar="CONTINUUM_HOST", help="Address that it would listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar="CONTINUUM_PORT", min=0, max=65535, help="And the port.")] = 8000,
    redis_url: Annotated[
        str | None, typer.Option(envvar="CONTINUUM_REDIS_URL", help="The store; an embedded one where none is given.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check that the platform can run here: Python, vLLM, GPU, Ray, store, sandboxes, model, ports, disk, memory. Says what to do
    about what is wrong; exit code 1 where something is in the way."""
    try:
        settings = load_settings(config, {"store.redis_url": redis_url})
    except SettingsError as error:
        raise fail(ExitCode.USAGE, str(error), as_json=as_json) from error
    from deployments.machine_probes import gather

    if not as_json:
        err.print("looking at the machine; sandboxes take some seconds …", style="dim")
    findings = examine(gather(settings, host=host, port=port), settings)
    if as_json:
        print_json(out, report(findings))
    else:
        _print(findings)
    if not is_fit(findings):
        raise typer.Exit(ExitCode.FAILED)


def report(findings: tuple[Finding, ...]) -> dict[str, Any]:
    """The findings as JSON for programs."""
    rows = [
        {"check": one.check, "verdict": one.verdict.value, "found": one.found, "advice": one.advice or None}
        for one in findings
    ]
    return {"object": "doctor.report", "fit": is_fit(findings), "findings": rows}


def _print(findings: tuple[Finding, ...]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    for one in findings:
        word, style = _SHOWN[one.verdict]
        table.add_row(f"[{style}]{word}[/]", one.check, _plain(one.found))
        if one.advice:
            table.add_row("", "", f"[dim]→ {_plain(one.advice)}[/]")
    out.print(table)
    problems = sum(one.verdict is Verdict.PROBLEM for one in findings)
    err.print("nothing is in the way" if not problems else f"{problems} in the way", style="dim")


def _plain(text: str) -> str:
    """Text whose brackets are no markup."""
    return text.replace("[", r"\[")
