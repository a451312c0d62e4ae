"""The tree of errors a user can mend, and their exit codes."""

import re

import pytest

from sfi_core import errors

CODES = {
    "SfiError": 1, "ConfigError": 2, "InputError": 3, "TraceError": 3, "BackendError": 4,
    "UnsupportedModelError": 4, "MemoryForecastError": 4, "NumericsError": 1, "RankLostError": 1,
}  # fmt: skip


def classes() -> dict[str, type[errors.SfiError]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.SfiError)
    }


def test_every_error_has_the_documented_exit_code():
    """Scripts that call `sfi` rely on these codes."""
    assert {name: cls.exit_code for name, cls in classes().items()} == CODES


@pytest.mark.parametrize("name", CODES)
def test_the_tree_in_the_docstring_tells_exit_code_and_parent(name: str):
    lines = errors.__doc__.splitlines()
    found = [line for line in lines if re.match(rf"\s*[*x] {name}\b", line)]
    assert len(found) == 1
    assert f"exit code {CODES[name]}" in found[0]
    indent = re.match(r"\s*", found[0]).end()
    above = lines[: lines.index(found[0])]
    nearer = [line for line in above if re.match(rf"\s{{0,{max(0, indent - 1)}}}[*x] ", line)]
    parent = re.search(r"[*x] (\w+)", nearer[-1]).group(1) if indent else "Exception"
    assert classes()[name].__bases__[0].__name__ == parent


def test_a_setting_s_error_is_also_a_value_error():
    """Who uses the library need not know our tree."""
    assert issubclass(errors.ConfigError, ValueError)
