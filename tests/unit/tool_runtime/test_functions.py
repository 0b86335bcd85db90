"""`@tool`: what a function's hints and docstring come to, and which functions are refused."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from datetime import date
from importlib.metadata import EntryPoint
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from support import sample_tools
from tool_runtime.function_loading import ENTRY_POINT_GROUP, load_functions
from tool_runtime.functions import BadTool, FunctionTool, RunsIn, tool
from tool_runtime.registry import ArgumentsInvalid, ToolKind, parse_arguments

in_actor = tool(runs_in=RunsIn.ACTOR)


def test_the_schema_comes_from_the_hints_and_the_docstring() -> None:
    spec = sample_tools.double.spec
    assert (spec.name, spec.description, spec.kind) == ("double", "Double some numbers.", ToolKind.FUNCTION)
    assert spec.parameters == {
        "type": "object",
        "properties": {
            "numbers": {"type": "array", "items": {"type": "number"}, "description": "What to double."},
            "label": {
                "anyOf": [{"type": "string"}, {"type": "null"}],
                "default": None,
                "description": "A name for the result, which may go over two lines.",
            },
        },
        "required": ["numbers"],
        "additionalProperties": False,
    }


def test_a_decorated_function_is_still_a_function() -> None:
    assert sample_tools.double([1, 2]) == {"label": None, "doubled": [2, 4]}


def test_options_take_the_place_of_what_the_function_says() -> None:
    @tool(
        name="other",
        description="Said otherwise.",
        runs_in=RunsIn.ACTOR,
        idempotent=True,
        needs_approval=True,
        timeout_s=3,
    )
    def function() -> None: ...

    spec = function.spec
    assert (spec.name, spec.description, spec.idempotent, spec.needs_approval) == (
        "other",
        "Said otherwise.",
        True,
        True,
    )
    assert function.timeout_s == 3


def test_arguments_are_checked_before_and_become_the_parameters_types() -> None:
    weekday = sample_tools.weekday
    arguments = parse_arguments(weekday.spec, '{"day": "2026-11-30"}', bytes_max=1000)
    assert weekday.parsed(arguments) == {"day": date(2026, 11, 30)}
    with pytest.raises(ArgumentsInvalid, match="'day' is a required property"):
        parse_arguments(weekday.spec, "{}", bytes_max=1000)
    # What the schema lets pass and the type does not.
    with pytest.raises(ValueError, match="arguments of weekday are wrong: day"):
        weekday.parsed({"day": "2026-02-31"})


def test_the_context_is_no_argument_of_the_models() -> None:
    assert list(sample_tools.weekday.spec.parameters["properties"]) == ["day"]
    assert sample_tools.weekday.context_parameter == "context"


def test_parameters_may_be_called_what_pydantic_calls_its_own() -> None:
    @in_actor
    def function(model_config: int, schema: str, copy: bool = True) -> None:
        """Names that are taken elsewhere."""

    assert list(function.spec.parameters["properties"]) == ["model_config", "schema", "copy"]
    assert function.parsed({"model_config": 1, "schema": "s"}) == {"model_config": 1, "schema": "s"}


def test_annotated_limits_are_part_of_the_schema() -> None:
    @in_actor
    def function(share: Annotated[float, Field(ge=0, le=1, description="A part.")]) -> None:
        """Limited."""

    assert function.spec.parameters["properties"]["share"] == {
        "type": "number",
        "minimum": 0,
        "maximum": 1,
        "description": "A part.",
    }


class Colour(enum.Enum):
    RED = "red"


def undocumented(a: int) -> None: ...


def unannotated(a) -> None:  # type: ignore[no-untyped-def]
    """A."""


def starred(*a: int) -> None:
    """A."""


def by_position(a: int, /) -> None:
    """A."""


def of_an_object(a: threading_event) -> None:  # type: ignore[name-defined]  # noqa: F821
    """A."""


def of_a_class(a: Colour) -> None:
    """A."""


def of_a_tuple(a: tuple[int, int]) -> None:
    """A."""


def of_a_callable(a: Callable[[], None]) -> None:
    """A."""


def wordy(a: int) -> None:
    pass


wordy.__doc__ = "word " * 3000


@pytest.mark.parametrize(
    ("function", "options", "says"),
    [
        (print, {}, "is not a function"),
        (undocumented, {}, "needs a docstring"),
        (unannotated, {}, "the parameter a needs a type annotation"),
        (starred, {}, "cannot be given by name"),
        (by_position, {}, "cannot be given by name"),
        (of_an_object, {}, "annotations cannot be read"),
        (of_a_class, {}, "does not travel into the sandbox"),
        (of_a_tuple, {}, "does not travel into the sandbox"),
        (of_a_callable, {"runs_in": RunsIn.ACTOR}, "has no JSON Schema"),
        (undocumented, {"description": "A.", "name": "two words"}, "letters, digits"),
        (wordy, {}, "longer than"),
        (undocumented, {"description": "A.", "timeout_s": 0}, "must be positive"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_when_it_is_declared(
    function: Callable[..., Any], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadTool, match=says) as refused:
        tool(**options)(function)
    assert options.get("name", getattr(function, "__name__", "")) in str(refused.value)


def test_a_function_within_a_function_cannot_go_to_the_sandbox() -> None:
    with pytest.raises(BadTool, match="top level"):

        @tool
        def inner() -> None:
            """Within."""


def entry(name: str, value: str) -> EntryPoint:
    return EntryPoint(name=name, value=value, group=ENTRY_POINT_GROUP)


def test_modules_and_entry_points_bring_their_tools() -> None:
    found = load_functions(["support.sample_tools:double"], installed=[entry("more", "support.sample_tools")])
    assert {"double", "surroundings", "wait"} <= set(found)
    assert all(isinstance(value, FunctionTool) for value in found.values())


class Clashing:
    """Objects that entry points name."""

    not_a_tool = 7
    nothing: list[FunctionTool] = []
    builtin = tool(name="shell", description="Takes a name.", runs_in=RunsIn.ACTOR)(undocumented)
    twice = [
        tool(name="same", description="One.", runs_in=RunsIn.ACTOR)(undocumented),
        tool(name="same", description="Two.", runs_in=RunsIn.ACTOR)(undocumented),
    ]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("no_such_module_anywhere", "cannot be imported: ModuleNotFoundError"),
        ("support.sample_tools:absent", "cannot be imported: AttributeError"),
        (f"{__name__}:Clashing.not_a_tool", "holds no tool"),
        (f"{__name__}:Clashing.nothing", "holds no tool"),
        (f"{__name__}:Clashing.builtin", "shell is the name of a built-in tool"),
        (f"{__name__}:Clashing.twice", "two tools are called same"),
    ],
)
def test_a_bad_registration_stops_the_start_and_is_named(value: str, says: str) -> None:
    sys.modules.setdefault(__name__, sys.modules[Clashing.__module__])
    with pytest.raises(BadTool, match=says):
        load_functions([], installed=[entry("theirs", value)])
    with pytest.raises(BadTool, match=says):
        load_functions([value], installed=[])


def test_a_literal_and_nested_containers_travel_into_the_sandbox() -> None:
    assert sample_tools.surroundings.spec.parameters["properties"]["detail"]["enum"] == ["files", "user"]
    hints: dict[str, Any] = {"a": dict[str, list[int | None]], "b": Annotated[Literal[1], "why"]}

    def function(a: int, b: int) -> None:
        """A."""

    function.__annotations__.update(hints)
    with pytest.raises(BadTool, match="top level"):  # the types are in order, only its place is not
        tool(function)
