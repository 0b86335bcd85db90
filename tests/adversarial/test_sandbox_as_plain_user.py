"""The attacks once more, on a platform that does not run as root: its sandboxes share its user, which other walls must make up for.

Where tests run as a plain user in the first place, they are these tests, and what is left out is the platform that runs as root.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from support.plain_user import UID, as_plain_user, why_not

pytestmark = [pytest.mark.adversarial, pytest.mark.slow]

ATTACKS = ("files", "kernel", "network", "life", "resources", "protocol")


@pytest.fixture(scope="module")
def _can_drop() -> None:
    if os.geteuid() != 0:
        pytest.skip("these tests run as a plain user already; run them as root to attack root's sandboxes")
    if (reason := why_not()) is not None:
        pytest.skip(f"tests cannot be run as a plain user here: {reason}")


@pytest.fixture(scope="module")
def second_run(_can_drop: None) -> Iterator[dict[str, list[str]]]:
    """All the attacks in one process, as that user: by file, what went wrong in it, and nothing for a file where all went well."""
    with tempfile.TemporaryDirectory(prefix="ct-plain-") as home:
        os.chown(home, UID, UID)
        report = Path(home, "report.xml")
        pytest_command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", f"--junitxml={report}"),
            *(str(Path("tests", "adversarial", f"test_sandbox_{attacks}.py")) for attacks in ATTACKS),
        ]
        environment = {**os.environ, "HOME": home, "TMPDIR": home, "PYTHONDONTWRITEBYTECODE": "1"}
        environment["CONTINUUM_TEST_CYCLES"] = "64"
        ran = subprocess.run(
            as_plain_user(pytest_command), env=environment, capture_output=True, text=True, check=False, timeout=580
        )
        assert report.exists(), ran.stdout[-8000:] + ran.stderr[-2000:]
        yield _faults_by_file(report)


def _faults_by_file(report: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        faults = found.setdefault(case.get("classname", "").split("test_sandbox_")[-1].split(".")[0], [])
        faults += [f"{case.get('name')}: {one.text}" for one in case if one.tag in ("failure", "error")]
    return found


@pytest.mark.parametrize("attacks", ATTACKS)
def test_attacks_fail_for_a_platform_of_a_plain_user_too(second_run: dict[str, list[str]], attacks: str) -> None:
    assert attacks in second_run, f"none of them ran; those that did: {sorted(second_run)}"
    assert second_run[attacks] == []
