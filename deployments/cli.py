"""`continuum`: start the platform, submit programs, look at them.

Exit codes, so that scripts can tell what happened:

    0  it worked                               3  no answer from the server
    1  the program failed, or a part broke     4  the server refused the request
    2  the command line or a setting is wrong  130  interrupted

With `--json` results are JSON on stdout and an error is a JSON object on stderr; the exit codes are the same.

Only `serve` and `model` import Ray or the engine; the rest is a REST client and starts at once.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from deployments.cli_doctor import doctor
from deployments.cli_keys import keys_app
from deployments.cli_plugins import add_commands
from deployments.cli_programs import programs_app, run, tools_app
from deployments.cli_serve import model_app, serve
from deployments.cli_support import CommandGroup, out

app = typer.Typer(
    name="continuum",
    cls=CommandGroup,
    help="Serve agent programs, and keep their KV cache while their tools run.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(serve)
app.command()(run)
app.command()(doctor)
app.add_typer(programs_app, name="programs")
app.add_typer(tools_app, name="tools")
app.add_typer(model_app, name="model")
app.add_typer(keys_app, name="keys")
add_commands(app)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        out.print(version("continuum-agents"), markup=False)
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
