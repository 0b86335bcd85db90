"""Commands that other packages bring: `continuum replay` comes from the benchmarks, which nothing here imports.

A command is an entry point of the group `continuum.commands`: its name, and a function that Typer can make a command of. One
that cannot be loaded still has its place in the help, and says what is missing when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points

import typer

from deployments.cli_support import ExitCode, err

GROUP = "continuum.commands"


def add_commands(app: typer.Typer, commands: Iterable[EntryPoint] | None = None) -> None:
    """Add every command of the group, or those given."""
    for entry_point in entry_points(group=GROUP) if commands is None else commands:
        try:
            command = entry_point.load()
        except ImportError as error:
            command = _missing(entry_point, error)
        app.command(entry_point.name, context_settings=_settings(command))(command)


def _missing(entry_point: EntryPoint, error: ImportError) -> Callable[..., None]:
    package = entry_point.module.partition(".")[0]

    def command(context: typer.Context) -> None:
        err.print(
            f"error: `continuum {entry_point.name}` needs the package {package}, which this installation cannot load: {error}",
            markup=False,
        )
        raise typer.Exit(ExitCode.FAILED)

    command.__doc__ = f"Not installed: needs the package {package}."
    return command


def _settings(command: Callable[..., None]) -> dict[str, bool]:
    """What stands in for a missing command takes whatever that would have taken."""
    is_missing = command.__module__ == __name__
    return {"ignore_unknown_options": True, "allow_extra_args": True} if is_missing else {}
