"""The attacks once more, on a platform that does not run as root: its sandboxes share its user, which other walls must make up for.

Where tests run as a plain user in the first place, they are these tests, and what is left out is the platform that runs as root.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

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


@pytest.mark.usefixtures("_can_drop")
@pytest.mark.parametrize("attacks", ATTACKS)
def test_attacks_fail_for_a_platform_of_a_plain_user_too(attacks: str) -> None:
    with tempfile.TemporaryDirectory(prefix="ct-plain-") as home:
        os.chown(home, UID, UID)
        pytest_command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--tb=short"),
            str(Path("tests", "adversarial", f"test_sandbox_{attacks}.py")),
        ]
        environment = {**os.environ, "HOME": home, "TMPDIR": home, "PYTHONDONTWRITEBYTECODE": "1"}
        ran = subprocess.run(
            as_plain_user(pytest_command), env=environment, capture_output=True, text=True, check=False, timeout=580
        )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout.splitlines()[-1]
