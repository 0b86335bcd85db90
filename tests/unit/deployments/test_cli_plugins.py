"""Commands that other packages bring to `continuum`."""

from importlib.metadata import EntryPoint

import typer
from typer.testing import CliRunner

from deployments.cli_plugins import GROUP, add_commands
from support.checkout import pyproject


def hello(name: str = "you") -> None:
    """Say hello."""
    typer.echo(f"hello {name}")


def command_line(**commands: str) -> typer.Typer:
    app = typer.Typer()
    app.command("other")(hello)
    add_commands(app, [EntryPoint(name=name, value=value, group=GROUP) for name, value in commands.items()])
    return app


def test_a_command_of_another_package_has_its_options_and_its_help():
    app = command_line(greet=f"{__name__}:hello")
    assert CliRunner().invoke(app, ["greet", "--name", "me"]).stdout == "hello me\n"
    assert "Say hello." in CliRunner().invoke(app, ["--help"]).stdout


def test_a_command_whose_package_is_missing_says_so_whatever_it_is_given():
    app = command_line(replay="no_such_package.cli:run")
    told = CliRunner().invoke(app, ["replay", "trace.jsonl", "--gpu", "h100"])
    assert told.exit_code == 1
    assert "needs the package no_such_package" in told.stderr
    assert "Not installed" in CliRunner().invoke(app, ["--help"]).stdout


def test_the_replay_is_declared_as_such_a_command():
    declared = pyproject()["project"]["entry-points"][GROUP]
    assert EntryPoint(name="replay", value=declared["replay"], group=GROUP).load().__name__ == "replay_command"
