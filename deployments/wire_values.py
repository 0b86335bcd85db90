"""From what a client sent to values, with an error that names the field where it does not fit. Pure."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from agent_program.errors import InvalidRequest

_Body = TypeVar("_Body", bound=BaseModel)


class Strict(BaseModel):
    """What a client sends: no field that is not known, no value of another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def validated(kind: type[_Body], body: object, *, within: str | None = None) -> _Body:
    """`body` as a `kind`.

    Args:
        within: the field that `body` is the value of; None for a whole body.

    Raises:
        InvalidRequest: naming the first field that is wrong.
    """
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        parts = [within] if within else []
        path = ".".join([*parts, *(str(part) for part in first["loc"] if not str(part).startswith("function-"))])
        text = first["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"{path}: {text}" if path else text, param=path or None) from None


def parse_whole_number(text: str | None, *, what: str, default: int, least: int, most: int) -> int:
    """A number from a query string or a header.

    Raises:
        InvalidRequest: not a whole number from `least` to `most`.
    """
    if text is None:
        return default
    try:
        number = int(text)
    except ValueError:
        number = None
    if number is None or not least <= number <= most:
        raise InvalidRequest(f"{what} must be a whole number from {least} to {most}", param=what)
    return number
