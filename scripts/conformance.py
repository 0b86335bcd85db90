"""vLLM's own scheduler tests, on vLLM's scheduler and on ours under each preset: the same ones must pass.

The tests come from vLLM's source distribution, which pip fetches from wherever it is configured to; they are kept below
`$CONTINUUM_CACHE` (`~/.cache/continuum`), and nothing of them is part of this repository. Each variant runs in a process of its
own. Models are needed as configurations only, and are written beside the tests (`conformance_models.py`).

Exit codes: 0 every variant passes what stock passes; 1 one does not; 3 the tests could not be obtained.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from conformance_models import write_models
from conformance_plugin import PROGRAMS, REPORT, STOCK, VARIANT
from rich.console import Console
from rich.table import Table

from engine_replicas.config import SchedulingPreset
from engine_replicas.embedded_model import cache_dir

VERSION = "0.32.0"
#: Over the names and contents of the files below `tests/v1/core`.
DIGEST = "d4e169fd26ea91c7415c69e3de8b5e21594fb657d827c73d6a737a06128c46a0"
DOWNLOAD_S_MAX = 300
VARIANT_S_MAX = 3600

SCRIPTS = Path(__file__).resolve().parent
CORE = "tests/v1/core"
FULL = (
    f"{CORE}/test_scheduler.py",
    f"{CORE}/test_async_scheduler.py",
    f"{CORE}/test_deferred_block_free.py",
    f"{CORE}/test_priority_preemption_bug.py",
    f"{CORE}/test_priority_scheduler_random.py",
    f"{CORE}/test_swa_inflight_window_free.py",
    f"{CORE}/test_mamba_align_chunk_split.py",
    f"{CORE}/test_prefix_caching.py",
    f"{CORE}/test_prefix_replay.py",
    f"{CORE}/prefix_cache/test_partial_prefix_cache_hits.py",
    "tests/v1/streaming_input/test_scheduler_streaming.py",
    "tests/v1/kv_connector/unit/test_remote_prefill_lifecycle.py",
    "tests/v1/kv_connector/unit/test_remote_decode_lifecycle.py",
    "tests/v1/kv_connector/unit/test_kv_load_failure_recovery.py",
    "tests/v1/kv_connector/unit/test_invalid_blocks_correctness.py",
    "tests/v1/kv_connector/unit/test_error_propagation.py",
    "tests/v1/kv_connector/unit/offloading_connector/test_scheduler.py",
)
QUICK = (
    f"{CORE}/test_scheduler.py",
    f"{CORE}/test_async_scheduler.py",
    f"{CORE}/test_deferred_block_free.py",
    f"{CORE}/test_priority_preemption_bug.py",
    "tests/v1/streaming_input/test_scheduler_streaming.py",
)
#: Left out unless `--all` is given: minutes apiece, and the same walk with less memory, which is in, meets more.
LONG = (f"{CORE}/test_priority_scheduler_random.py::test_priority_scheduling_blast[standard",)
PRESETS = tuple(preset.value for preset in SchedulingPreset)
#: Where nothing is retained and nothing reordered, program ids change nothing either.
VARIANTS = (*PRESETS, f"{SchedulingPreset.VLLM.value}+{PROGRAMS}")

#: Tests that may differ, by the start of their name, with the reason.
_NO_INIT = "the test makes its scheduler by `object.__new__`, without `__init__`, and ours has state of its own"
KNOWN_DIFFERENCES: dict[str, str] = {
    f"{CORE}/test_scheduler.py::test_abort_request_when_structured_output_fsm_cannot_advance": _NO_INIT,
    f"{CORE}/test_async_scheduler.py::test_abort_request_when_structured_output_fsm_cannot_advance": _NO_INIT,
}


class NoTests(Exception):
    """vLLM's tests are not at hand and could not be fetched."""


@dataclass(kw_only=True)
class Result:
    """One variant's run."""

    variant: str
    seconds: float
    passed: int
    failed: int
    skipped: int
    #: Tests that pass on stock and not here, with what was said.
    lost: dict[str, str] = field(default_factory=dict)
    #: Tests that pass here and not on stock.
    gained: list[str] = field(default_factory=list)


# --- the tests -----------------------------------------------------------------------------------------------------------


def obtained(archive: Path | None) -> Path:
    """The directory that holds vLLM's `tests`, fetched if need be.

    Raises:
        NoTests: they cannot be had, or are not those of the version.
    """
    home = cache_dir() / "vllm-tests" / VERSION
    if not (home / "tests").is_dir():
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent) as scratch:
            source = _unpacked(archive, Path(scratch)) if archive is not None else _fetched(Path(scratch))
            whole = Path(scratch) / "whole"
            shutil.copytree(source / "tests", whole / "tests")
            _check(whole)
            try:
                whole.rename(home)
            except OSError:
                # Another run was faster.
                if not (home / "tests").is_dir():
                    raise
    write_models(home / "models")
    return home


def _fetched(scratch: Path) -> Path:
    """vLLM's source tree. pip unpacks a source distribution to read its metadata, which fails here for want of a compiler;
    the unpacked tree is all that is wanted."""
    _say(f"fetching the source distribution of vLLM {VERSION}")
    command = [sys.executable, "-m", "pip", "download", f"vllm=={VERSION}", "--no-deps", "--no-binary", "vllm"]
    command += ["--no-build-isolation", "--no-clean", "--retries", "1", "--quiet", "--dest", str(scratch / "dest")]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "TMPDIR": str(scratch)},
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_S_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise NoTests(f"pip took longer than {DOWNLOAD_S_MAX} s") from error
    for info in scratch.glob("*/vllm*/PKG-INFO"):
        return info.parent
    raise NoTests(f"pip could not fetch the source distribution of vLLM {VERSION}: {done.stderr.strip()[-400:]}")


def _unpacked(archive: Path, scratch: Path) -> Path:
    with tarfile.open(archive) as tar:
        tar.extractall(scratch, filter="data")
    for info in scratch.glob("vllm*/PKG-INFO"):
        return info.parent
    raise NoTests(f"{archive} is no source distribution of vLLM")


def _check(home: Path) -> None:
    found = digest(home)
    if found != DIGEST:
        raise NoTests(f"these are not the tests of vLLM {VERSION}: digest {found}")


def digest(home: Path) -> str:
    """Of the files below `tests/v1/core`."""
    whole = hashlib.sha256()
    for path in sorted((home / CORE).rglob("*.py")):
        whole.update(path.relative_to(home).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return whole.hexdigest()


# --- the runs ------------------------------------------------------------------------------------------------------------


def run(home: Path, variant: str, selection: tuple[str, ...], left_out: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """Run the selection on one variant; how each test ended, and what those said that did not pass."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "--quiet", "--tb=no", "--color=no"),
                # The suite's outermost conftest wants what a scheduler does not need.
                *("--confcutdir", str(home / "tests" / "v1")),
                *(word for name in left_out for word in ("--deselect", name)),
                *("-p", "conformance_plugin", "-p", "no:cacheprovider", "-p", "no:randomly"),
                *("-o", "asyncio_default_fixture_loop_scope=function", "--rootdir", str(home), *selection),
            ],
            cwd=home,
            env=_environment(home, variant, report),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=VARIANT_S_MAX,
            check=False,
        )
        # 0: all passed, 1: some failed. Anything else, or no report, is a run that did not happen.
        if done.returncode not in (0, 1) or not report.exists():
            raise RuntimeError(f"pytest ended with {done.returncode} on {variant}:\n{done.stdout[-4000:]}")
        return json.loads(report.read_text(encoding="utf-8"))


def _environment(home: Path, variant: str, report: Path) -> dict[str, str]:
    return {
        **os.environ,
        VARIANT: variant,
        REPORT: str(report),
        "PYTHONPATH": os.pathsep.join([str(SCRIPTS), str(SCRIPTS / "stand_ins")]),
        "HF_HOME": str(home / "models"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "CUDA_VISIBLE_DEVICES": "",
    }


def compared(variant: str, seconds: float, found: dict[str, dict[str, str]], stock: dict[str, str]) -> Result:
    """A variant's run beside stock's outcomes."""
    outcomes, why = found["outcomes"], found["why"]
    count = list(outcomes.values()).count
    return Result(
        variant=variant,
        seconds=round(seconds, 1),
        passed=count("passed"),
        failed=count("failed"),
        skipped=count("skipped"),
        lost={
            name: why.get(name, "did not run")
            for name, outcome in stock.items()
            if outcome == "passed" and outcomes.get(name) != "passed"
        },
        gained=[name for name, outcome in outcomes.items() if outcome == "passed" and stock.get(name) != "passed"],
    )


def unexplained(result: Result) -> dict[str, str]:
    """Tests that a variant loses for no known reason."""
    return {name: why for name, why in result.lost.items() if _reason(name) is None}


def _reason(name: str) -> str | None:
    return next((reason for start, reason in KNOWN_DIFFERENCES.items() if name.startswith(start)), None)


# --- what is said --------------------------------------------------------------------------------------------------------


def _table(results: list[Result]) -> Table:
    table = Table(title=f"vLLM {VERSION}'s scheduler tests")
    for column in ("scheduler", "passed", "failed", "skipped", "lost", "unexplained", "gained", "seconds"):
        table.add_column(column, justify="left" if column == "scheduler" else "right")
    for result in results:
        counts = (result.passed, result.failed, result.skipped, len(result.lost), len(unexplained(result)))
        table.add_row(result.variant, *map(str, counts), str(len(result.gained)), f"{result.seconds:.0f}")
    return table


def _say(text: str) -> None:
    sys.stderr.write(f"conformance: {text}\n")
    sys.stderr.flush()


def main() -> int:
    """Run, compare, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default=",".join(VARIANTS), help="which presets, by commas (default: all)")
    parser.add_argument("--quick", action="store_true", help="the fast files only")
    parser.add_argument("--all", action="store_true", help="also the tests that take minutes apiece")
    parser.add_argument("--json", action="store_true", help="print one JSON document in place of the table")
    parser.add_argument("--out", type=Path, help="also write the JSON document to this file")
    parser.add_argument("--archive", type=Path, help="vLLM's source distribution, where pip cannot fetch it")
    arguments = parser.parse_args()
    presets = [name for name in arguments.presets.split(",") if name]
    if unknown := sorted({name.removesuffix(f"+{PROGRAMS}") for name in presets} - set(PRESETS)):
        parser.error(f"no such preset: {', '.join(unknown)}")
    try:
        home = obtained(arguments.archive)
    except NoTests as error:
        _say(str(error))
        return 3

    selection = QUICK if arguments.quick else FULL
    results: list[Result] = []
    stock: dict[str, dict[str, str]] = {}
    for variant in (STOCK, *presets):
        started_s = time.monotonic()
        found = run(home, variant, selection, () if arguments.all else LONG)
        stock = stock or found
        results.append(compared(variant, time.monotonic() - started_s, found, stock["outcomes"]))
        last = results[-1]
        _say(f"{variant}: {last.passed} passed, {last.failed} failed, {len(last.lost)} lost, {last.seconds:.0f} s")

    document = {
        "vllm": VERSION,
        "files": list(selection),
        "variants": [{**asdict(result), "unexplained": unexplained(result)} for result in results],
        "known_differences": KNOWN_DIFFERENCES,
        "passed_on_stock": sorted(name for name, outcome in stock["outcomes"].items() if outcome == "passed"),
        "not_passed_on_stock": stock["why"],
    }
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(document, indent=1), encoding="utf-8")
    if arguments.json:
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
        console.print(_table(results))
        for result in results:
            for name, why in result.lost.items():
                console.print(f"{result.variant} loses {name}: {_reason(name) or why}", soft_wrap=True, markup=False)
    return 1 if any(unexplained(result) for result in results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
