"""`continuum keys new`: an API key, and what the settings hold of it. Nothing is sent anywhere."""

from __future__ import annotations

from typing import Annotated

import typer
import yaml
from pydantic import ValidationError
from rich.text import Text

from agent_program.ids import DEFAULT_TENANT
from deployments.access import ApiKeySettings, Scope, digest, new_key
from deployments.cli_output import print_json
from deployments.cli_support import AsJson, ExitCode, err, fail, out

keys_app = typer.Typer(help="API keys.", no_args_is_help=True)


@keys_app.callback()
def _keys() -> None:
    """API keys."""


@keys_app.command("new")
def make_key(
    name: Annotated[str, typer.Argument(help="What people call it, in logs.")],
    scope: Annotated[
        list[Scope] | None, typer.Option(help="What it allows; repeat for several. read and submit.")
    ] = None,
    tenant: Annotated[str, typer.Option(help="Whose programs its holder sees and starts.")] = DEFAULT_TENANT,
    as_json: AsJson = False,
) -> None:
    """Make a key. It is printed once; the settings get its digest."""
    key = new_key()
    scopes = tuple(scope) if scope else (Scope.READ, Scope.SUBMIT)
    try:
        settings = ApiKeySettings(name=name, sha256=digest(key), scopes=scopes, tenant=tenant)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise fail(ExitCode.USAGE, f"{first['loc'][0]}: {first['msg']}", as_json=as_json) from error
    entry = settings.model_dump(mode="json")
    if as_json:
        print_json(out, {"key": key, "settings": entry})
        return
    out.print(Text(key))
    err.print("Clients send it as `Authorization: Bearer …`. Its entry in the settings:", style="dim")
    err.print(Text(yaml.safe_dump({"http": {"api_keys": [entry]}}, sort_keys=False)))
