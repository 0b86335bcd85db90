"""The whole platform in one command: `python -m deployments.demo`, or `make demo`.

Starts a private Ray cluster, the embedded store and a real engine, submits several agent programs at once by REST, shows how
they go, and stops everything. The model is small and chooses its tools badly; its calls are well-formed because the engine
constrains them (`tool_choice: required`), they really run, and each program ends at its turn limit. Nothing is scripted.

Exit code 0 where every program completed, 1 otherwise.
"""

from __future__ import annotations

import logging
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from agent_program.errors import PlatformError
from agent_program.states import FINAL_STATES
from deployments.cli_output import print_json
from deployments.cli_support import console, out
from deployments.demo_view import ProgressView, label, summary_table, totals
from deployments.environment import prepare_environment
from deployments.rest_client import ClientError, RestClient
from deployments.settings import PlatformSettings

MAX_TOKENS_PER_TURN = 160
MAX_SECONDS = 300.0
POLL_S = 0.5
#: Of 32 tokens each: about half of what the eight programs hold at their ends.
KV_BLOCKS = 80

INSTRUCTIONS = (
    "You work in a sandbox: your workspace is the current directory, and there is no network. In every step you call one tool "
    "with short arguments. You do the steps of the task in their order, one in each turn, and never repeat a step."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One program of the demo."""

    name: str
    task: str
    tools: tuple[str, ...]
    max_turns: int

    def submission(self) -> dict[str, Any]:
        """The body of POST /v1/programs."""
        return {
            "instructions": INSTRUCTIONS,
            "input": self.task,
            "tools": list(self.tools),
            "tool_choice": "required",
            "limits": {
                "max_turns": self.max_turns,
                "max_tokens_per_turn": MAX_TOKENS_PER_TURN,
                "max_seconds": MAX_SECONDS,
                "tool_timeout_s": 20,
            },
            "sampling": {"temperature": 0.3},
            "metadata": {"name": self.name},
        }


TASKS = (
    Task(name="disk", task="1. Run df -h\n2. Run du -sh .\n3. Run ls -la", tools=("shell",), max_turns=4),
    Task(name="system", task="1. Run uname -a\n2. Run nproc\n3. Run uptime\n4. Run env", tools=("shell",), max_turns=5),
    Task(name="folders", task="1. Run mkdir notes\n2. Run ls\n3. Run find .", tools=("shell",), max_turns=4),
    Task(name="clock", task="What is the date today? Use the date command.", tools=("shell", "python"), max_turns=5),
    Task(name="sum", task="Run this code: print(2 ** 10)", tools=("python",), max_turns=4),
    Task(name="files", task="List the files in the current directory.", tools=("list_files",), max_turns=5),
    Task(name="hello", task="Write the word hello to hello.txt.", tools=("write_file",), max_turns=4),
    Task(name="pause", task="1. Run date\n2. Run sleep 2\n3. Run date", tools=("shell",), max_turns=5),
)


class DemoFailed(Exception):
    """The demo did not end as it should; the message says why."""


def demo_settings(directory: Path) -> PlatformSettings:
    """A KV pool in which the programs do not all fit at once, so that keeping one's KV has a price.

    Everything that is kept on disk is below `directory`, on a port that nobody else uses.
    """
    return PlatformSettings.model_validate(
        {
            "engine": {"max_model_len": 2048, "num_gpu_blocks_override": KV_BLOCKS},
            "store": {"embedded_port": _free_port(), "data_dir": directory / "store"},
            "programs": {"keep_finished_s": 3600},
        }
    )


def run_demo(url: str, tasks: Sequence[Task], *, screen: Console) -> list[dict[str, Any]]:
    """Submit the tasks at once, follow them to their ends, and return the program objects.

    Raises:
        DemoFailed: a program was still going long after its own time limit.
        ClientError: the platform refused a program or stopped answering.
    """
    with RestClient(url, timeout_s=60.0) as client, ProgressView(screen) as view:
        ids = [client.submit(task.submission())["id"] for task in tasks]
        deadline_s = time.monotonic() + MAX_SECONDS + 60
        while True:
            programs = [client.program(program_id) for program_id in ids]
            view.show(programs)
            going = [label(program) for program in programs if program["state"] not in FINAL_STATES]
            if not going:
                return programs
            if time.monotonic() > deadline_s:
                raise DemoFailed(f"still going after {MAX_SECONDS + 60:.0f} s: {', '.join(going)}")
            time.sleep(POLL_S)


def failures(programs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each program that did not complete."""
    return [
        f"{label(program)}: {program['state']} ({program['end_reason']}) {(program['error'] or {}).get('message', '')}"
        for program in programs
        if program["state"] != "completed"
    ]


def main(
    programs: Annotated[int, typer.Option(min=1, max=len(TASKS), help="How many to run.")] = len(TASKS),
    as_json: Annotated[bool, typer.Option("--json", help="Print the finished programs as JSON at the end.")] = False,
) -> None:
    """Run several agent programs on a private platform and show what happened."""
    screen = console(stderr=as_json)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    prepare_environment()
    from deployments.local_platform import ListenOn, PlatformStartError, local_platform

    started_s = time.monotonic()

    def say(stage: str) -> None:
        screen.print(f"[dim]{time.monotonic() - started_s:5.0f} s[/dim]  {stage} …")

    try:
        with tempfile.TemporaryDirectory(prefix="continuum-demo-", ignore_cleanup_errors=True) as directory:
            listen = ListenOn(port=0)
            with local_platform(demo_settings(Path(directory)), listen, on_stage=say) as url:
                say(f"{url} is ready; submitting {programs} programs")
                finished = run_demo(url, TASKS[:programs], screen=screen)
    except (PlatformStartError, PlatformError, DemoFailed, ClientError) as error:
        screen.print(f"the demo failed: {error}", style="bold red", markup=False)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        screen.print("interrupted; everything is stopped")
        raise typer.Exit(130) from None

    screen.print(summary_table(finished))
    screen.print(totals(finished), markup=False)
    if as_json:
        print_json(out, finished)
    if lines := failures(finished):
        screen.print("\n".join(lines), style="bold red", markup=False)
        raise typer.Exit(1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    typer.run(main)
