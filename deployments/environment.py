"""The process environment that Ray and vLLM are started with.

Both read switches from environment variables at import time, so this runs before either is imported, and what it sets
reaches the workers that Ray starts. A variable that the operator has set is left alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

#: variable → value where the operator names none.
DEFAULTS: Mapping[str, str] = {
    # Ray turns token authentication on for local clusters unless it is told; two clusters on one machine then refuse each
    # other's workers. An operator who wants it sets `token`.
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Converting the model takes seconds, and a bar in a log is a line a hundred times.
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    # vLLM would pin each engine's threads to the same first cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def prepare_environment() -> None:
    """Set what is unset."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
