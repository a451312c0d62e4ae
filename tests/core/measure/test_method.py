"""How a method is written, and what it reads at a size."""

import pytest

from sfi_core.errors import ConfigError
from sfi_core.measure.evaluation.grid import Method, at_share, at_sizes
from sfi_core.settings.config import SfiConfig


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("sfi:span=10,slow_start=2", {"span": 10, "slow_start": 2}),
        ("sfi:selector.eta=0,selector.radius=5", {"selector": {"eta": 0, "radius": 5}}),
        ("sfi:trigger_policy=t-max , t_max=8", {"trigger_policy": "t-max", "t_max": 8}),
        (
            'sfi:triggers=[".", ",]\\n"],dense_layers=[0,1],span=1',
            {"triggers": (".", ",]\n"), "dense_layers": (0, 1), "span": 1},
        ),
        ("quest:baseline.page=32", {"baseline": {"page": 32}}),
        ("freekv:freekv.tau=0.9,freekv.page=16", {"freekv": {"tau": 0.9, "page": 16}}),
    ],
)
def test_settings_follow_a_colon(text, changes):
    method = Method.parse(text)
    assert method.label == text
    assert method.config == SfiConfig().replace(**changes)


def test_settings_of_a_table_keep_the_preset_s_others():
    method = Method.parse("freekv@freekv-long-generation:freekv.page=16")
    assert (method.config.freekv.page, method.config.freekv.tau) == (16, 0.9)
    assert method.config.sink == 512


def test_a_file_is_a_preset_that_keeps_its_sizes(tmp_path):
    file = tmp_path / "tuned.toml"
    file.write_text(SfiConfig().replace(t_max=8, budget=77).to_toml())
    method = Method.parse(f"tuned=sfi@{file}")
    (sized,) = at_sizes([method], shares=[0.1, 0.2])
    assert sized.key == ("tuned", "own")
    assert sized.config_for(1000) == SfiConfig().replace(t_max=8, budget=77)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sfl", "method sfl: unknown policy 'sfl'; did you mean 'sfi'? expected one of ('"),
        ("sfi@fast", "method sfi@fast: unknown preset 'fast'; expected one of ('default'"),
        ("sfi:spam=1", "method sfi:spam=1: unknown setting 'spam'; did you mean span?"),
        ("sfi:span=wide", "method sfi:span=wide: span must be int, got 'wide'"),
        ("sfi:span=10x", "method sfi:span=10x: span must be int, got '10x'"),
        ("sfi:span=", "method sfi:span=: span must be int, got ''"),
        ("sfi:span=-1", "method sfi:span=-1: span must be at least 0, got -1"),
        ("sfi:span", "method sfi:span: setting must be key=value, got 'span'"),
        ("sfi:span=1,span=2", "method sfi:span=1,span=2: setting span must be given once"),
        ("sfi:selector.alpha=0", "method sfi:selector.alpha=0: alpha must be in (0, 1], got 0.0"),
        ("", "method must be POLICY[@PRESET][:key=value,...], got ''"),
        ("sfi:", "method must be POLICY[@PRESET][:key=value,...], got 'sfi:'"),
    ],
)
def test_mistakes_are_named(text, message):
    with pytest.raises(ConfigError) as caught:
        Method.parse(text)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("share", "context", "sizes"), [(0.1, 4096, (4, 277, 128)), (0.05, 1024, (4, 22, 25)), (1.0, 4096, (4, 3964, 128))]
)
def test_a_share_is_sink_and_recent_and_selected_tokens(share, context, sizes):
    found = at_share(SfiConfig().replace(recent=128), context, share)
    assert (found.sink, found.budget, found.recent) == sizes
    assert sum(sizes) == int(share * context)


def test_a_method_may_have_a_recent_window_of_its_own():
    own, other = at_sizes([Method.parse("sfi:recent=40"), Method.parse("sfi@paper")], shares=[0.25], recent=60)
    assert (own.config_for(1024).recent, other.config_for(1024).recent) == (40, 60)


@pytest.mark.parametrize(("text", "size"), [("full-kv", "all"), ("sfi:budget=7", "own")])
def test_what_no_share_changes_runs_once(text, size):
    (method,) = at_sizes([Method.parse(text)], shares=[0.1, 0.2])
    assert method.key == (text, size)
    assert method.config_for(1000) == Method.parse(text).config


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"shares": [0.0]}, "share must be in (0, 1], got 0"),
        ({"shares": [1.5]}, "share must be in (0, 1], got 1.5"),
        ({"budgets": [0]}, "budget must be positive, got 0"),
        ({"shares": [0.1], "recent": 0}, "recent must be positive, got 0"),
        ({}, "size must be given at least once, got none"),
        ({"budgets": [8, 8]}, "each size must differ, got K 8, K 8"),
    ],
)
def test_sizes_that_are_none_are_refused(sizes, message):
    with pytest.raises(ConfigError) as caught:
        at_sizes([Method.parse("sfi")], **sizes)
    assert str(caught.value) == message


def test_columns_are_plain():
    (method,) = at_sizes([Method.parse("wide=sfi:span=3")], shares=[0.1])
    assert method.columns(1000) == {
        "method": "wide", "policy": "sfi", "preset": "default", "settings": {"span": 3}, "size": "10%",
        "share": 0.1, "budget": 46, "recent": 50,
    }  # fmt: skip
