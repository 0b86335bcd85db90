"""What every command of `continuum` shares: its options, its exit codes, and how an error reaches the user.

Results go to stdout, and everything said about them to stderr. With `--json` an error is one JSON object on stderr, so that
stdout holds results only, whoever reads it:

    {"error": {"message": …, "code": …, "status": …, "retry_after_s": …}, "exit_code": 4}

`code` is the server's stable code, or one of `ExitCode`'s names in lower case; `status` and `retry_after_s` are there where
the server gave them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from deployments.cli_output import print_json
from deployments.rest_client import ClientError, RequestRefused, RestClient, ServerUnreachable

DEFAULT_URL = "http://127.0.0.1:8000"

#: Columns where there is no terminal: a table in a log or a pipe need not fit 80.
PIPE_COLUMNS = 200


def console(*, stderr: bool = False) -> Console:
    """A console that wraps nothing where no terminal wraps it."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, soft_wrap=True, width=None if stream.isatty() else PIPE_COLUMNS)


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
def connect(url: str, api_key: str | None = None, *, as_json: bool) -> Iterator[RestClient]:
    """A client for one command. An error of the server's or of the way there ends the command with its exit code."""
    if not url.startswith(("http://", "https://")):
        message = f"--url: {url!r} is not an address: it starts with http:// or https://"
        raise fail(ExitCode.USAGE, message, as_json=as_json)
    try:
        with RestClient(url, api_key=api_key) as client:
            yield client
    except ServerUnreachable as error:
        message = f"{error}\nIs it running? `continuum serve` starts it."
        raise fail(ExitCode.UNREACHABLE, message, as_json=as_json) from error
    except RequestRefused as error:
        raise _refused(error, as_json=as_json) from error
    except ClientError as error:
        raise fail(ExitCode.FAILED, str(error), as_json=as_json) from error


def _refused(error: RequestRefused, *, as_json: bool) -> typer.Exit:
    if as_json:
        details = {"code": error.code, "status": error.status, "retry_after_s": error.retry_after_s}
        return fail(ExitCode.REFUSED, str(error), as_json=True, details=details)
    wait = f" Try again in {error.retry_after_s:.0f} s." if error.retry_after_s is not None else ""
    return fail(ExitCode.REFUSED, f"{error} ({error.code or 'HTTP'} {error.status}).{wait}", as_json=False)


def fail(code: ExitCode, message: str, *, as_json: bool, details: dict[str, Any] | None = None) -> typer.Exit:
    """Say what went wrong; the caller raises what this returns. `details` are fields of the JSON error."""
    if as_json:
        given = {name: value for name, value in (details or {}).items() if value is not None}
        error = {"message": message, "code": code.name.lower(), **given}
        print_json(err, {"error": error, "exit_code": int(code)})
        return typer.Exit(code)
    err.print("error:", style="bold red", end=" ")
    err.print(message, markup=False)
    return typer.Exit(code)


class CommandGroup(TyperGroup):
    """The whole command line. A command line that cannot be parsed is answered in JSON where it asks for JSON."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        arguments = sys.argv[1:] if args is None else list(args)
        is_ours = standalone_mode and "--json" in arguments
        try:
            code = super().main(
                arguments, prog_name, complete_var, standalone_mode and not is_ours, windows_expand_args, **extra
            )
        except typer.TyperException as error:
            if not is_ours:
                raise
            raise SystemExit(fail(ExitCode.USAGE, error.format_message(), as_json=True).exit_code) from error
        if is_ours:
            raise SystemExit(code or 0)
        return code
