"""`continuum run`, `continuum programs …` and `continuum tools …`: clients of the REST API, which import no Ray and no engine."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from agent_program.states import FINAL_STATES, ProgramState
from deployments.cli_actions import approve, deny, post_outputs
from deployments.cli_explain import explanation
from deployments.cli_latency import latency_lines
from deployments.cli_output import (
    event_line,
    latency_table,
    print_json,
    program_details,
    program_table,
    tool_table,
)
from deployments.cli_support import (
    DEFAULT_URL,
    ApiKey,
    AsJson,
    ExitCode,
    ProgramArgument,
    Url,
    connect,
    err,
    fail,
    out,
)
from deployments.journal_export import export_program
from deployments.rest_client import RequestRefused, RestClient

programs_app = typer.Typer(help="List, look at and stop programs.", no_args_is_help=True)
tools_app = typer.Typer(help="The tools that programs may call.", no_args_is_help=True)


def run(
    task: Annotated[str, typer.Argument(help="What the program is to do; - reads it from standard input.")],
    tool: Annotated[list[str] | None, typer.Option(help="A tool that it may call; repeat for several.")] = None,
    tools_file: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="More tools, as a JSON list in OpenAI's shape; the client runs new ones."
        ),
    ] = None,
    tool_choice: Annotated[str | None, typer.Option(help="auto, required or none.")] = None,
    instructions: Annotated[str | None, typer.Option(help="The system message.")] = None,
    model: Annotated[str | None, typer.Option(help="Name of a served model.")] = None,
    max_turns: Annotated[int | None, typer.Option(min=1)] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Output tokens of one turn.")] = None,
    max_seconds: Annotated[float | None, typer.Option(help="Seconds from submission to end.")] = None,
    tool_timeout: Annotated[float | None, typer.Option(help="Seconds of one tool call.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0)] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    program_id: Annotated[str | None, typer.Option("--id", help="Use this id instead of a random one.")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Print the id and return at once.")] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Submit a program and follow it to its end. Ctrl-C stops following; the program goes on."""
    text = typer.get_text_stream("stdin").read() if task == "-" else task
    body = _without_none(
        input=text,
        instructions=instructions,
        model=model,
        tools=[*(tool or ()), *_tools_in(tools_file, as_json=as_json)] or None,
        tool_choice=tool_choice,
        program_id=program_id,
        limits=_without_none(
            max_turns=max_turns, max_tokens_per_turn=max_tokens, max_seconds=max_seconds, tool_timeout_s=tool_timeout
        ),
        sampling=_without_none(temperature=temperature, seed=seed),
    )
    with connect(url, api_key, as_json=as_json) as client:
        program = client.submit(body)
        if detach:
            print_json(out, program) if as_json else out.print(program["id"])
            return
        if not as_json:
            err.print(Text(f"program {program['id']}", style="bold"))
        raise typer.Exit(_follow(client, program["id"], as_json=as_json))


@programs_app.command("ls")
def list_programs(
    state: Annotated[ProgramState | None, typer.Option(help="Only those in this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 20,
    after: Annotated[str | None, typer.Option(help="The last id of the page before.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Programs, newest first."""
    with connect(url, api_key, as_json=as_json) as client:
        page = client.programs(state=state.value if state else None, limit=limit, after=after)
    if as_json:
        print_json(out, page)
        return
    out.print(program_table(page["data"]))
    if page.get("has_more"):
        err.print(f"there are more: --after {page['last_id']}", style="dim", markup=False)


@programs_app.command("show")
def show_program(
    program: ProgramArgument,
    include: Annotated[str | None, typer.Option(help="journal: with every step.")] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Why its KV was kept or dropped, and where it ran.")
    ] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """One program."""
    with connect(url, api_key, as_json=as_json) as client:
        found = client.explain(program) if explain else client.program(program, include=include)
    if as_json or include:
        print_json(out, found)
    elif explain:
        for line in explanation(found):
            out.print(line)
    else:
        out.print(program_details(found))


@programs_app.command("export")
def export_programs(
    state: Annotated[ProgramState | None, typer.Option(help="Only those that ended in this state.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many, the newest.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """What finished programs did, one JSON object a line, oldest first: sizes, times and tools, no text. For analysis and
    replay; the format is described in `deployments/journal_export.py`."""
    if state is not None and state not in FINAL_STATES:
        message = f"--state: only programs that have ended are exported; one of {', '.join(sorted(FINAL_STATES))}"
        raise fail(ExitCode.USAGE, message, as_json=as_json)
    with connect(url, api_key, as_json=as_json) as client:
        finished = (one["id"] for one in client.all_programs(state=state) if one["state"] in FINAL_STATES)
        chosen = list(islice(finished, limit))
        for program_id in reversed(chosen):
            try:
                program = client.program(program_id, include="journal")
            except RequestRefused as error:
                if error.status == 404:
                    continue  # forgotten since it was listed
                raise
            print_json(out, export_program(program))


@programs_app.command("cancel")
def cancel_program(
    program: ProgramArgument, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False
) -> None:
    """Stop a program: its turn is aborted, its tools are killed, its KV is freed."""
    with connect(url, api_key, as_json=as_json) as client:
        found = client.cancel(program)
    if as_json:
        print_json(out, found)
    else:
        out.print(Text(f"{found['id']} {found['state']}"))


@programs_app.command("events")
def program_events(
    program: ProgramArgument,
    after: Annotated[str | None, typer.Option(help="Begin after the event with this id.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """A program's steps as they happen, until it ends. Exits with 1 where the program failed."""
    with connect(url, api_key, as_json=as_json) as client:
        raise typer.Exit(_follow(client, program, after=after, as_json=as_json))


@tools_app.command("ls")
def list_tools(url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """The registered tools."""
    with connect(url, api_key, as_json=as_json) as client:
        found = client.tools()
    if as_json:
        print_json(out, found)
    else:
        out.print(tool_table(found["data"]))


@tools_app.command("latency")
def show_latency(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A tool, or a program that a shell ran, such as pytest; without it, all that were measured."
        ),
    ] = None,
    context_tokens: Annotated[
        int | None, typer.Option(min=1, help="Context of the program for which the retention time is shown.")
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """How long tools take, by the history that the scheduler uses."""
    with connect(url, api_key, as_json=as_json) as client:
        found = client.tool_latency(name, context_tokens=context_tokens) if name else client.tool_latencies()
    if as_json:
        print_json(out, found)
    elif name is None:
        out.print(latency_table(found["data"]))
    else:
        for line in latency_lines(found):
            out.print(line)


programs_app.command("outputs")(post_outputs)
programs_app.command("approve")(approve)
programs_app.command("deny")(deny)


def _follow(client: RestClient, program_id: str, *, after: str | None = None, as_json: bool) -> ExitCode:
    """Print the events, then the program as it ended."""
    try:
        for event in client.events(program_id, after=after):
            if as_json:
                print_json(out, {"id": event.id, "event": event.name, "data": event.data})
            else:
                out.print(event_line(event))
    except KeyboardInterrupt:
        err.print(
            f"stopped following; `continuum programs events {program_id}` goes on, "
            f"`continuum programs cancel {program_id}` stops it",
            markup=False,
        )
        return ExitCode.INTERRUPTED
    program = client.program(program_id)
    if as_json:
        print_json(out, program)
    else:
        out.print(program_details(program))
    if program["state"] not in FINAL_STATES:
        message = f"the event stream ended while the program was {program['state']}"
        raise fail(ExitCode.FAILED, message, as_json=as_json)
    return ExitCode.OK if program["state"] == ProgramState.COMPLETED else ExitCode.FAILED


def _tools_in(file: Path | None, *, as_json: bool) -> list[Any]:
    if file is None:
        return []
    try:
        tools = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise fail(ExitCode.USAGE, f"--tools-file: {file}: {error}", as_json=as_json) from error
    if not isinstance(tools, list):
        raise fail(ExitCode.USAGE, f"--tools-file: {file} holds no JSON list", as_json=as_json)
    return tools


def _without_none(**values: Any) -> dict[str, Any]:
    """The values that were given; what is left out takes the server's default."""
    return {name: value for name, value in values.items() if value is not None and value != {}}
