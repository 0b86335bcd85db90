"""`continuum serve` and `continuum model prepare`: the commands that start things. What is heavy is imported inside them."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from deployments.cli_output import print_json
from deployments.cli_settings import SettingsError, load_settings
from deployments.cli_support import AsJson, ExitCode, err, fail, out
from deployments.environment import prepare_environment
from deployments.settings import PlatformSettings

model_app = typer.Typer(help="The embedded model.", no_args_is_help=True)


def serve(
    config: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Settings: a Serve configuration file, or its `args` alone."),
    ] = None,
    host: Annotated[str, typer.Option(envvar="CONTINUUM_HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar="CONTINUUM_PORT", min=0, max=65535, help="0 takes a free one.")] = 8000,
    replicas: Annotated[int | None, typer.Option(min=1, help="Engine replicas.")] = None,
    model: Annotated[str | None, typer.Option(help="Model directory or hub name; `embedded` comes along.")] = None,
    preset: Annotated[str | None, typer.Option(help="Scheduling policies: `continuum` or `vllm`.")] = None,
    redis_url: Annotated[
        str | None, typer.Option(envvar="CONTINUUM_REDIS_URL", help="The store; an embedded one where none is given.")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(envvar="RAY_ADDRESS", help="A running Ray cluster; a private one where none is given.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Start the platform on this machine and stay up. Ctrl-C or SIGTERM stops it and leaves no process."""
    options = {
        "replicas.engine": replicas,
        "engine.model": model,
        "scheduling.preset": preset,
        "store.redis_url": redis_url,
    }
    try:
        settings = load_settings(config, options)
    except SettingsError as error:
        raise fail(ExitCode.USAGE, str(error), as_json=as_json) from error

    prepare_environment()
    from deployments.local_platform import ListenOn, PlatformStartError, local_platform

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    listen = ListenOn(host=host, port=port, ray_address=ray_address)
    try:
        with local_platform(settings, listen, on_stage=_say) as url:
            _print_addresses(url, settings, as_json=as_json)
            _wait_for_a_signal()
    except PlatformStartError as error:
        raise fail(ExitCode.FAILED, str(error), as_json=as_json) from error
    except KeyboardInterrupt:
        err.print("stopped")


@model_app.command("prepare")
def prepare_model(as_json: AsJson = False) -> None:
    """Convert the embedded model, once per machine, and print where it is."""
    prepare_environment()
    from agent_program.errors import PlatformError
    from engine_replicas.embedded_model import prepare

    try:
        path = prepare()
    except PlatformError as error:
        raise fail(ExitCode.FAILED, error.message, as_json=as_json) from error
    print_json(out, {"path": str(path)}) if as_json else out.print(str(path), markup=False)


def _wait_for_a_signal() -> None:
    """Ends by KeyboardInterrupt."""
    while True:
        signal.pause()


def _say(stage: str) -> None:
    err.print(f"{stage} …", style="dim", markup=False)


def _print_addresses(url: str, settings: PlatformSettings, *, as_json: bool) -> None:
    addresses = {
        "url": url,
        "openai_base_url": f"{url}/v1",
        "model": settings.engine.model_name,
        "programs": f"{url}/v1/programs",
        "metrics": f"{url}/metrics",
        "store": settings.store.redis_url or f"embedded, {settings.store.embedded_data_dir}",
        "pid": os.getpid(),
    }
    if as_json:
        print_json(out, addresses)
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in addresses.items():
        table.add_row(name.replace("_", " "), str(value))
    out.print(table)
    err.print("Ctrl-C stops it", style="dim")
