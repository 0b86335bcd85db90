"""What is wrong with a settings tree, in words that say what to write instead.

Pydantic names an unknown key and stops there ("Extra inputs are not permitted"). Here it is told which key was probably
meant, or else which keys exist. The places of the errors stay as they are, so that whoever validates (Serve, the command
line, a test) finds them where pydantic puts them.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

_VALUE_ERROR = "Value error, "
#: Keys that are listed where none is close; a branch with more names the first ones.
_KEYS_LISTED_MAX = 12


def explained(error: ValidationError, root: type[BaseModel]) -> ValidationError:
    """The same errors at the same places, with messages that name the closest key, or the keys that exist."""
    details = [
        InitErrorDetails(
            type=PydanticCustomError("settings", _message(one, root)),
            loc=one["loc"],
            input=one["input"],
        )
        for one in error.errors(include_url=False)
    ]
    return ValidationError.from_exception_data(error.title, details)


def _message(one: Any, root: type[BaseModel]) -> str:
    if one["type"] != "extra_forbidden":
        return str(one["msg"]).removeprefix(_VALUE_ERROR)
    *branch, key = one["loc"]
    keys = _keys_at(root, branch)
    where = ".".join(str(part) for part in branch) or "the settings"
    if close := difflib.get_close_matches(str(key), keys, n=1, cutoff=0.6):
        return f"there is no such key in {where}; did you mean {close[0]!r}?"
    listed = ", ".join(keys[:_KEYS_LISTED_MAX]) + (", …" if len(keys) > _KEYS_LISTED_MAX else "")
    return f"there is no such key in {where}; there are: {listed}"


def _keys_at(root: type[BaseModel], branch: Sequence[Any]) -> list[str]:
    """The keys of the branch; none where the path leaves the tree of models (a free mapping, a list)."""
    model: type[BaseModel] | None = root
    for part in branch:
        field = model.model_fields.get(str(part)) if model is not None else None
        model = _model_of(field.annotation) if field is not None else None
    return list(model.model_fields) if model is not None else []


def _model_of(annotation: Any) -> type[BaseModel] | None:
    for kind in (annotation, *typing.get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None
