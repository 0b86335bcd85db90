"""The store's address as a client dials it: `${NAME}` stands for the environment variable NAME.

A password belongs in a secret, and a secret reaches a process as an environment variable. The address itself is part of the
settings, which are shown in dashboards and logs: so it is completed here, where a client connects, and nowhere before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import quote

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def dialled_url(url: str, environment: Mapping[str, str]) -> str:
    """`url` with each `${NAME}` replaced by the variable's value, quoted for a URL.

    Raises:
        ValueError: a variable that the address names is not set.
    """

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in environment:
            raise ValueError(f"store.redis_url names the environment variable {name}, which is not set")
        return quote(environment[name], safe="")

    return _VARIABLE.sub(value, url)
