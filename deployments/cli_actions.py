"""`continuum programs outputs|approve|deny`: what a program in `requires_action` waits for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from deployments.cli_output import print_json, required_action_lines, styled_state
from deployments.cli_support import DEFAULT_URL, ApiKey, AsJson, ExitCode, ProgramArgument, Url, connect, fail, out
from deployments.rest_client import RestClient

Call = Annotated[list[str] | None, typer.Option("--call", help="A call's id; repeat for several.")]


def post_outputs(
    program: ProgramArgument,
    call: Call = None,
    output: Annotated[
        list[str] | None,
        typer.Option(
            "--output", help="The output of each --call, in the same order; @FILE reads it from a file, - from stdin."
        ),
    ] = None,
    is_error: Annotated[bool, typer.Option("--error", help="The tool failed; the output says how.")] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Post outputs of the client's own tools; without --call, list what the program waits for."""
    calls, outputs = call or [], output or []
    if len(calls) != len(outputs):
        message = f"--call and --output come in pairs: {len(calls)} calls, {len(outputs)} outputs"
        raise fail(ExitCode.USAGE, message, as_json=as_json)
    try:
        texts = [_text_of(one) for one in outputs]
    except (OSError, UnicodeDecodeError) as error:
        raise fail(ExitCode.USAGE, f"--output: {error}", as_json=as_json) from error
    answers = [
        {"call_id": call_id, "output": text, "is_error": is_error} for call_id, text in zip(calls, texts, strict=True)
    ]
    with connect(url, api_key, as_json=as_json) as client:
        _show(client.program(program) if not answers else client.tool_outputs(program, answers), as_json=as_json)


def approve(
    program: ProgramArgument, call: Call = None, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False
) -> None:
    """Let calls run that need somebody's consent: those of --call, or all that wait."""
    with connect(url, api_key, as_json=as_json) as client:
        _decide(client, program, call, {"approve": True}, as_json=as_json)


def deny(
    program: ProgramArgument,
    call: Call = None,
    reason: Annotated[str | None, typer.Option(help="Told to the model.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Refuse calls that need somebody's consent: those of --call, or all that wait."""
    decision = {"approve": False} | ({"reason": reason} if reason is not None else {})
    with connect(url, api_key, as_json=as_json) as client:
        _decide(client, program, call, decision, as_json=as_json)


def _decide(
    client: RestClient, program: str, calls: list[str] | None, decision: dict[str, Any], *, as_json: bool
) -> None:
    if calls is None:
        waiting = (client.program(program).get("required_action") or {}).get("calls", ())
        calls = [one["call_id"] for one in waiting if one["kind"] == "approval"]
    if not calls:
        raise fail(ExitCode.FAILED, f"program {program} waits for nobody's consent", as_json=as_json)
    answers = [{"call_id": call_id, **decision} for call_id in calls]
    _show(client.tool_outputs(program, answers), as_json=as_json)


def _show(program: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(out, program)
        return
    out.print(Text.assemble(f"{program['id']} ", styled_state(program["state"])))
    for line in required_action_lines(program):
        out.print(line)


def _text_of(given: str) -> str:
    if given == "-":
        return typer.get_text_stream("stdin").read()
    return Path(given[1:]).read_text() if given.startswith("@") else given
