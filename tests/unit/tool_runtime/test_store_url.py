import pytest

from tool_runtime.store_url import dialled_url


@pytest.mark.parametrize(
    ("url", "environment", "dialled"),
    [
        ("redis://host:6379/0", {}, "redis://host:6379/0"),
        ("redis://:${PASSWORD}@host", {"PASSWORD": "p@ss/w"}, "redis://:p%40ss%2Fw@host"),
        ("redis://${USER}:${PASSWORD}@host", {"USER": "u", "PASSWORD": "${USER}"}, "redis://u:%24%7BUSER%7D@host"),
    ],
)
def test_variables_take_their_values_quoted_once(url: str, environment: dict[str, str], dialled: str) -> None:
    assert dialled_url(url, environment) == dialled


def test_a_variable_that_is_not_set_is_named() -> None:
    with pytest.raises(ValueError, match="PASSWORD, which is not set"):
        dialled_url("redis://:${PASSWORD}@host", {})
