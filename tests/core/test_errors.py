"""The tree of errors a user can mend, and their exit codes."""

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
    assert {name: cls.exit_code for name, cls in classes().items()} == CODES


def test_a_setting_s_error_is_also_a_value_error():
    """Who uses the library need not know our tree."""
    assert issubclass(errors.ConfigError, ValueError)
