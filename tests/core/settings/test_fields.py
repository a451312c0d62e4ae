"""What a setting says of itself, and what it refuses."""

import math
from dataclasses import dataclass

import pytest

from sfi_core.errors import ConfigError
from sfi_core.settings.fields import Table, setting, settings_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    share: float = setting(0.5, "A share. More of it.", above=0, most=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made(Table):
    count: int = setting(3, "How many.", least=1)
    rate: float = setting(1.0, "How fast; 0 is not", above=0)
    mode: str = setting("on", "Which.", choices=("on", "off"))
    ids: tuple[int, ...] | None = setting(None, "Some.", least=0)
    free: int = setting(0, "Anything.")
    inner: Inner = Inner()


@pytest.mark.parametrize(
    ("name", "type_", "range_", "brief"),
    [
        ("count", "int", "at least 1", "How many."),
        ("rate", "float", "positive", "How fast; 0 is not."),
        ("mode", "str", "on, off", "Which."),
        ("ids", "list of int or none", "at least 0", "Some."),
        ("free", "int", "", "Anything."),
        ("inner.share", "float", "in (0, 1]", "A share."),
    ],
)
def test_a_setting_describes_itself(name: str, type_: str, range_: str, brief: str):
    one = settings_of(Made)[name]
    assert (one.name, one.type, one.range, one.brief) == (name, type_, range_, brief)


def test_settings_of_a_table_have_its_name():
    assert list(settings_of(Made, "made"))[-1] == "made.inner.share"
    assert settings_of(Made)["count"].default == 3


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("count", 0, "count must be at least 1, got 0"),
        ("count", True, "count must be int, got True"),
        ("rate", 0, "rate must be positive, got 0.0"),
        ("rate", math.inf, "rate must be positive and finite, got inf"),
        ("mode", "of", "unknown mode 'of'; expected one of ('on', 'off')"),
        ("count", 10**400, "count must be at most 9,007,199,254,740,992, got 1" + "0" * 199 + "..."),
        ("rate", 10**400, "rate must be float, got 1" + "0" * 199 + "..."),
        ("ids", [2, 10**5000], "ids must be at most 9,007,199,254,740,992 each, got list too long to show"),
        ("ids", [2, -1], "ids must be at least 0 each, got [2, -1]"),
        ("ids", 2, "ids must be a list of int, got 2"),
        ("inner", 2, "inner must be a table, got 2"),
    ],
)
def test_a_value_is_refused_by_type_and_range(name: str, value: object, words: str):
    with pytest.raises(ConfigError) as caught:
        Made(**{name: value})
    assert str(caught.value) == words


def test_a_list_becomes_a_tuple_and_a_whole_number_a_float():
    made = Made(ids=[1, 2], rate=2)
    assert (made.ids, made.rate, type(made.rate)) == ((1, 2), 2.0, float)


def test_a_field_without_a_meaning_is_a_mistake_of_ours():
    @dataclass
    class Silent:
        count: int = 3

    with pytest.raises(TypeError, match="meaning"):
        settings_of(Silent)
