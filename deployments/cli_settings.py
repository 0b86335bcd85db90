"""From a settings file and command-line options to one settings tree. An option wins over the file, the file over defaults.

The file is a Serve configuration (`serve_config.yaml`, as for `serve deploy`), of which the application's `args` count, or a
file that holds those `args` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from deployments.settings import PlatformSettings


class SettingsError(Exception):
    """The settings are wrong; the message names each wrong one."""


def load_settings(file: Path | None, options: Mapping[str, Any]) -> PlatformSettings:
    """The settings tree.

    Args:
        file: a YAML file, or None for the defaults.
        options: dotted names of settings (`scheduling.preset`) and their values; None values are options not given.

    Raises:
        SettingsError: the file is not YAML or not of the expected shape, a key is unknown or a value is not allowed.
    """
    tree = {} if file is None else _arguments_of(file)
    for name, value in options.items():
        if value is not None:
            _set(tree, name.split("."), value)
    try:
        return PlatformSettings.model_validate(tree)
    except ValidationError as error:
        given = {name for name, value in options.items() if value is not None}
        raise SettingsError("\n".join(_describe(one, file, given) for one in error.errors())) from error


def _arguments_of(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"{file}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"{file}: holds no settings")
    if "applications" not in content:
        return content
    applications = content["applications"]
    if not isinstance(applications, list) or len(applications) != 1 or not isinstance(applications[0], dict):
        raise SettingsError(f"{file}: `applications` must list one application")
    arguments = applications[0].get("args") or {}
    if not isinstance(arguments, dict):
        raise SettingsError(f"{file}: `args` holds no settings")
    return arguments


def _set(tree: dict[str, Any], path: list[str], value: Any) -> None:
    *parents, leaf = path
    for name in parents:
        branch = tree.setdefault(name, {})
        if not isinstance(branch, dict):
            raise SettingsError(f"{'.'.join(path)}: {name} holds no settings")
        tree = branch
    tree[leaf] = value


def _describe(error: Mapping[str, Any], file: Path | None, options: Set[str]) -> str:
    """Where the wrong setting was written, its dotted name, and what is wrong with it."""
    name = ".".join(str(part) for part in error["loc"])
    where = f"{file}: " if file is not None and name not in options else ""
    return f"{where}{name}: {error['msg']}" if name else f"{where}{error['msg']}"
