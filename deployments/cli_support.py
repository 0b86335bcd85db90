"""What every command of `continuum` shares: its options, its exit codes, and how an error reaches the user."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Annotated

import typer
from rich.console import Console

from deployments.rest_client import ClientError, RequestRefused, RestClient, ServerUnreachable

DEFAULT_URL = "http://127.0.0.1:8000"

#: Columns where there is no terminal: a table in a log or a pipe need not fit 80.
PIPE_COLUMNS = 200


def console(*, stderr: bool = False) -> Console:
    """A console that wraps nothing where no terminal wraps it."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, soft_wrap=True, width=None if stream.isatty() else PIPE_COLUMNS)


#: Results go to stdout, everything said about them to stderr: `--json` output stays clean in a pipe.
out = console()
err = console(stderr=True)


class ExitCode(IntEnum):
    """What the command's exit status says."""

    OK = 0
    #: The program did not complete, or a part of the platform broke.
    FAILED = 1
    #: The command line, or a setting, is wrong.
    USAGE = 2
    UNREACHABLE = 3
    REFUSED = 4
    INTERRUPTED = 130


Url = Annotated[str, typer.Option("--url", envvar="CONTINUUM_URL", help="Address of the platform.")]
ApiKey = Annotated[str | None, typer.Option("--api-key", envvar="CONTINUUM_API_KEY", help="Sent as a bearer token.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
ProgramArgument = Annotated[str, typer.Argument(metavar="PROGRAM", help="A program id.", show_default=False)]


@contextmanager
def connect(url: str, api_key: str | None = None) -> Iterator[RestClient]:
    """A client for one command. An error of the server's or of the way there ends the command with its exit code."""
    if not url.startswith(("http://", "https://")):
        raise usage_error(f"{url!r} is not an address: it starts with http:// or https://", option="--url")
    try:
        with RestClient(url, api_key=api_key) as client:
            yield client
    except ServerUnreachable as error:
        raise fail(ExitCode.UNREACHABLE, f"{error}\nIs it running? `continuum serve` starts it.") from error
    except RequestRefused as error:
        wait = f" Try again in {error.retry_after_s:.0f} s." if error.retry_after_s is not None else ""
        raise fail(ExitCode.REFUSED, f"{error} ({error.code or 'HTTP'} {error.status}).{wait}") from error
    except ClientError as error:
        raise fail(ExitCode.FAILED, str(error)) from error


def fail(code: ExitCode, message: str) -> typer.Exit:
    """Say what went wrong; the caller raises what this returns."""
    err.print("error:", style="bold red", end=" ")
    err.print(message, markup=False)
    return typer.Exit(code)


def usage_error(message: str, *, option: str) -> typer.Exit:
    """A wrong value that only the command itself can see is wrong."""
    return fail(ExitCode.USAGE, f"{option}: {message}")
