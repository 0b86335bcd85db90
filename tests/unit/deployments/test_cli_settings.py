"""A settings file and command-line options become one tree; what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.cli import app
from deployments.cli_settings import SettingsError, load_settings
from deployments.settings import PlatformSettings

SERVE_CONFIG = """
applications:
  - name: continuum
    import_path: deployments.app:build_app
    args:
      replicas: {engine: 3}
      scheduling: {preset: vllm}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "settings.yaml"


def test_nothing_given_is_the_defaults() -> None:
    assert load_settings(None, {"engine.model": None}) == PlatformSettings()


def test_an_empty_file_is_the_defaults(file: Path) -> None:
    file.write_text("")
    assert load_settings(file, {}) == PlatformSettings()


@pytest.mark.parametrize("text", [SERVE_CONFIG, "replicas: {engine: 3}\nscheduling: {preset: vllm}\n"])
def test_a_file_is_a_serve_configuration_or_its_arguments(file: Path, text: str) -> None:
    file.write_text(text)
    settings = load_settings(file, {})
    assert (settings.replicas.engine, settings.scheduling.preset) == (3, "vllm")


def test_an_option_wins_over_the_file_and_leaves_the_rest_of_it(file: Path) -> None:
    file.write_text(SERVE_CONFIG)
    settings = load_settings(file, {"replicas.engine": 2, "scheduling.preset": None})
    assert (settings.replicas.engine, settings.scheduling.preset) == (2, "vllm")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "engine: {modle: x}",
            r"settings\.yaml: engine\.modle: there is no such key in engine; did you mean 'model'\?",
        ),
        ("engines: {}", r"settings\.yaml: engines: there is no such key in the settings; did you mean 'engine'\?"),
        (
            "programs: {limit_defaults: {speed: 1}}",
            r"there is no such key in programs\.limit_defaults; there are: max_t",
        ),
        ("store: {redis_url: http://x}", r"settings\.yaml: store\.redis_url: redis_url starts with"),
        ("replicas: {engine: 0}", r"replicas\.engine: .*greater than or equal to 1"),
        ("scheduling: {preset: fastest}", r"scheduling\.preset: "),
        ("- a list", "holds no settings"),
        ("applications: []", "must list one application"),
        ("applications: [{args: 7}]", "`args` holds no settings"),
        ("{", "settings.yaml: "),
        ("store: none", r"store\.redis_url: store holds no settings"),
    ],
)
def test_what_is_wrong_is_named(file: Path, text: str, said: str) -> None:
    file.write_text(text)
    with pytest.raises(SettingsError, match=said):
        load_settings(file, {"store.redis_url": "redis://localhost"} if text == "store: none" else {})


def test_a_wrong_option_is_not_blamed_on_the_file(file: Path) -> None:
    file.write_text("replicas: {engine: 2}\n")
    with pytest.raises(SettingsError, match=r"^scheduling\.preset: "):
        load_settings(file, {"scheduling.preset": "fastest"})


def test_every_wrong_setting_is_named_at_once(file: Path) -> None:
    file.write_text("engine: {modle: x}\nhttp: {porrt: 1}\n")
    with pytest.raises(SettingsError, match=r"(?s)engine\.modle.*http\.porrt"):
        load_settings(file, {})


@pytest.mark.parametrize(
    "arguments", [["--preset", "fastest"], ["--redis-url", "localhost:6379"], ["--port", "70000"], ["--replicas", "0"]]
)
def test_serve_with_a_wrong_setting_starts_nothing_and_exits_with_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2
    assert arguments[0].removeprefix("--").replace("-", "_") in result.stderr.replace("-", "_")
