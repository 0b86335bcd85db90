"""The images: what they copy exists, and their versions are the project's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from support import chart
from support.checkout import PACKAGES, pyproject

DOCKERFILES = sorted((chart.ROOT / "docker").glob("Dockerfile.*"))
each_file = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)


def instructions(path: Path) -> list[tuple[str, str]]:
    """Instruction and arguments of each line, continuations joined, comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def copied(path: Path) -> list[str]:
    """What a Dockerfile copies from the checkout."""
    return [
        source
        for name, rest in instructions(path)
        if name == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    ]


@each_file
def test_everything_that_is_copied_exists_and_gets_past_dockerignore(path: Path) -> None:
    let_through = {
        line.removeprefix("!")
        for line in (chart.ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    for source in copied(path):
        assert (chart.ROOT / source).exists(), source
        assert source in let_through


@each_file
def test_every_package_of_the_wheel_is_copied(path: Path) -> None:
    assert set(PACKAGES) <= set(copied(path))


@each_file
def test_it_runs_as_the_user_of_the_chart_and_never_as_root(path: Path) -> None:
    users = [rest for name, rest in instructions(path) if name == "USER"]
    context = chart.ray_pods({})["head"]["spec"]["securityContext"]
    assert users[-1] == f"{context['runAsUser']}:{context['runAsGroup']}"


@each_file
def test_the_home_directory_is_the_one_that_the_chart_mounts(path: Path) -> None:
    assert any("HOME=/home/ray" in rest for name, rest in instructions(path) if name == "ENV")


def test_the_gpu_image_has_the_vllm_that_the_project_supports() -> None:
    (pin,) = pyproject()["project"]["optional-dependencies"]["gpu"]
    text = (chart.ROOT / "docker" / "Dockerfile.gpu").read_text()
    version = pin.removeprefix("vllm==")
    assert f"FROM vllm/vllm-openai:v{version}\n" in text
    assert f'version("vllm") == "{version}"' in text


def test_the_chart_names_the_ray_and_the_platform_of_the_project() -> None:
    ray = next(one for one in pyproject()["project"]["dependencies"] if one.startswith("ray["))
    assert yaml.safe_load((chart.CHART / "values.yaml").read_text())["ray"]["version"] == ray.split("==")[1]
    assert yaml.safe_load((chart.CHART / "Chart.yaml").read_text())["appVersion"] == pyproject()["project"]["version"]
