"""Two traces side by side, against plain loops over their rows."""

import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from sfi_core.errors import ConfigError, TraceError
from sfi_traces.model.trace import Trace
from sfi_traces.summary.diff import METRICS, SAME_MASS, Limit, compare
from tests.traces.made import CONFIG, MODEL, TOP, make_trace, overlap
from tests.traces.small import assert_spread, change_manifest, redact, rows, write_part, write_trace


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Trace, Trace]:
    """Equal up to step 23 of request 0 and to the end of request 1, which is longer in the second."""
    tmp_path = tmp_path_factory.mktemp("pair")
    first = make_trace(tmp_path / "a", steps=40, requests=2, policy="full-kv", seed=1)
    second = make_trace(
        tmp_path / "b", steps=50, requests=2, policy="sfi", seed=2, audit=2, config=CONFIG | {"t_max": 8}
    )
    trace = Trace.open(second)
    steps = rows(trace, "steps")
    for row in steps:
        if row["request"] == 0 and row["step"] in (23, 30):
            row |= {"token_id": 7, "token_text": " other"}
    write_part(second, "steps", steps)
    return Trace.open(first), Trace.open(second)


@pytest.fixture(scope="module")
def document(pair) -> dict:
    return compare(*pair)


@pytest.fixture
def own(pair, tmp_path) -> tuple[Trace, Trace]:
    folders = [shutil.copytree(trace.path, tmp_path / trace.path.name) for trace in pair]
    return Trace.open(folders[0]), Trace.open(folders[1])


def test_tokens_are_equal_up_to_the_first_that_differs(pair, document):
    first, second = document["requests"]
    assert first["equal_share"] == pytest.approx(38 / 40)
    assert first["steps"] == {"a": 40, "b": 50}
    difference = first["first_difference"]
    assert difference["step"] == 23
    texts = [row["token_text"] for row in rows(pair[0], "steps") if not row["request"]]
    assert difference["before"] == "".join(texts[11:23])
    assert difference["a"] == {"token_id": 23, "token_text": texts[23]}
    assert difference["b"] == {"token_id": 7, "token_text": " other"}
    assert first["compared_steps"] == 24  # the query of step 23 is still the same
    assert (second["equal_share"], second["first_difference"]) == (1.0, None)
    assert second["compared_steps"] == 40


def test_steps_that_are_slow_in_one_only(pair, document):
    first, second = document["requests"]
    assert first["slow_only_a"] == [s for s in range(24) if s % 10]
    assert second["slow_only_a"] == [s for s in range(40) if s % 10]
    assert first["slow_only_b"] == second["slow_only_b"] == []
    swapped = compare(pair[1], pair[0])["requests"][0]
    assert (swapped["slow_only_a"], swapped["slow_only_b"]) == ([], first["slow_only_a"])


@pytest.mark.parametrize("request_only", [None, 1])
def test_supports_are_compared_at_equal_steps_up_to_the_first_difference(pair, request_only):
    lists = [
        {(r["request"], r["step"], r["layer"], r["head"]): r["positions"] for r in rows(t, "supports")} for t in pair
    ]
    expected = defaultdict(list)
    for (number, step, layer, head), positions in lists[0].items():
        key = (number, step, layer, head)
        wanted = request_only in (None, number) and step < (24, 40)[number]
        if wanted and key in lists[1]:
            expected[layer].append(overlap(positions, lists[1][key]))
    supports = compare(*pair, request_only)["supports"]
    assert_spread(supports["overlap"], [value for values in expected.values() for value in values])
    assert [row["layer"] for row in supports["layers"]] == sorted(expected)
    for row in supports["layers"]:
        assert_spread(row["overlap"], expected[row["layer"]])


def test_supports_of_other_sizes_are_not_compared(pair):
    """Their overlap would be too high."""
    wide = Trace(pair[0].path, pair[0].manifest | {"audit": pair[0].manifest["audit"] | {"top": TOP + 1}})
    document = compare(wide, pair[1])
    assert document["supports"] is None
    assert set(document["settings"]["audit.top"].values()) == {TOP, TOP + 1}
    with pytest.raises(TraceError, match=r"needs overlap, .* and one audit.top"):
        Limit.parse("overlap<0.9").meets(document)


def test_selections_are_compared_where_both_have_positions(tmp_path):
    def trace(name: str, chosen: dict[int, list[int] | None]) -> Trace:
        tables = {
            "steps": [{"request": 0, "step": step, "slow": True} for step in range(3)],
            "selections": [
                {"request": 0, "step": step, "layer": 0, "head": 0, "positions": positions}
                for step, positions in chosen.items()
            ],
        }
        return Trace.open(write_trace(tmp_path / name, tables))

    first = trace("a", {0: [1, 2, 3, 4], 1: [5, 6], 2: None})
    second = trace("b", {0: [2, 3], 1: [6, 7], 2: [1]})
    assert_spread(compare(first, second)["selections"]["overlap"], [1.0, 0.5])
    assert compare(first, second)["supports"] is None


def test_numbers_of_both_and_their_ratios(pair, document):
    times = [{True: [], False: []} for _ in pair]
    for trace, elapsed in zip(pair, times, strict=True):
        for row in rows(trace, "steps"):
            if row["step"]:
                elapsed[row["slow"]].append(row["elapsed_us"])
    assert document["a"]["slow_p50_us"] == pytest.approx(np.median(times[0][True]))
    assert document["a"]["fast_p50_us"] is None
    ratio = np.median(times[1][True]) / np.median(times[0][True])
    assert document["ratios"]["slow_p50_us"] == pytest.approx(ratio)
    assert document["ratios"]["fast_p50_us"] is None
    speeds = [1e6 * sum(len(v) for v in elapsed.values()) / sum(sum(v) for v in elapsed.values()) for elapsed in times]
    assert document["ratios"]["tokens_per_second"] == pytest.approx(speeds[1] / speeds[0])
    fast = {(r["request"], r["step"]) for r in rows(pair[1], "steps") if not r["slow"]}
    masses = [r["retained_mass"] for r in rows(pair[1], "supports") if (r["request"], r["step"]) in fast]
    assert (document["a"]["retained_mass"], document["a"]["lambda_star"]) == (None, None)
    assert document["b"]["retained_mass"] == pytest.approx(np.mean(masses))
    assert document["a"]["reasons"] == {"full-kv": 80}
    assert document["b"]["reasons"] == {"trigger": 8, "first": 2}


def test_settings_that_differ_are_named(own):
    settings = compare(*own)["settings"]
    assert settings == {"policy": {"a": "full-kv", "b": "sfi"}, "t_max": {"a": 16, "b": 8}}
    change_manifest(own[1].path, config=CONFIG | {"selector": {"lambda_clip": 0.3}}, seed=4)
    settings = compare(own[0], Trace.open(own[1].path))["settings"]
    assert settings["selector.lambda_clip"] == {"a": 0.02, "b": 0.3}
    assert settings["seed"] == {"a": None, "b": 4}


@pytest.mark.parametrize(
    "model", [{"name": "other"}, {"architecture": "LlamaForCausalLM"}, {"layers": MODEL["layers"][:1]}]
)
def test_different_models_are_refused(own, model):
    change_manifest(own[1].path, model=MODEL | model)
    with pytest.raises(TraceError, match=r"traces must be of one model, got made-up in .*a and .* in .*b"):
        compare(own[0], Trace.open(own[1].path))


def prompts(*tokens: int, sha256: str | None = "0" * 64) -> list[dict]:
    return [{"request": r, "tokens": n, "sha256": sha256} for r, n in enumerate(tokens)]


@pytest.mark.parametrize("other", [prompts(200, 201), prompts(200, 200, sha256="1" * 64)])
def test_different_prompts_are_refused(own, other):
    change_manifest(own[1].path, prompts=other)
    with pytest.raises(TraceError, match=r"must have the same prompts, got another for request \d"):
        compare(own[0], Trace.open(own[1].path))


def test_one_of_several_requests_may_be_chosen(own, tmp_path):
    change_manifest(own[1].path, prompts=prompts(200, 201))
    second = Trace.open(own[1].path)
    assert [row["request"] for row in compare(own[0], second, 0)["requests"]] == [0]
    with pytest.raises(TraceError, match="got another for request 1: 200 tokens in"):
        compare(own[0], second, 1)
    alone = Trace.open(make_trace(tmp_path / "alone", steps=40))
    with pytest.raises(TraceError, match=r"same requests, got 2 in .* and 1 in .*; choose with --request"):
        compare(own[0], alone)
    assert compare(own[0], alone, 0)["requests"][0]["equal_share"] == 1.0
    with pytest.raises(ConfigError, match=r"request must be one of \[0\], got 1"):
        compare(own[0], alone, 1)


def test_redacted_traces_are_compared_in_numbers_only(own):
    redact(own[1].path)
    document = compare(own[0], Trace.open(own[1].path))
    assert document["requests"][0]["steps"] == {"a": 40, "b": 50}
    assert document["requests"][0]["compared_steps"] is None
    assert (document["supports"], document["selections"]) == (None, None)
    assert document["ratios"]["read_ratio"] < 1


def test_a_trace_beside_itself_differs_in_nothing(pair):
    document = compare(pair[1], pair[1])
    assert document["settings"] == {}
    assert {row["equal_share"] for row in document["requests"]} == {1.0}
    assert document["supports"]["overlap"]["min"] == document["selections"]["overlap"]["min"] == 1.0
    assert list(document["ratios"].values()) == pytest.approx([1.0] * len(document["ratios"]))


def changed(folder, table: str, changes: dict[tuple[int, int, int], dict]) -> Trace:
    originals = rows(Trace.open(folder), table)
    places = [(row["step"], row["layer"], row["head"]) for row in originals]
    write_part(folder, table, [row | changes.get(place, {}) for row, place in zip(originals, places, strict=True)])
    return Trace.open(folder)


def others(*positions):
    return {"positions": positions, "mass": [0.1] * len(positions), "read": [True] * len(positions)}


@pytest.mark.exhaustive
def test_the_first_layer_that_differs_is_the_lowest_of_the_first_step(tmp_path):
    first, second = (make_trace(tmp_path / name, steps=20, policy="sfi") for name in "ab")
    trace = Trace.open(first)
    assert compare(trace, Trace.open(second))["requests"][0]["first_layer"] is None
    support = next(r for r in rows(trace, "supports") if (r["step"], r["layer"], r["head"]) == (4, 1, 0))
    mass = support["retained_mass"]
    other = changed(second, "supports", {
        (4, 1, 0): {"retained_mass": mass + SAME_MASS / 2}, (7, 1, 0): others(1, 2),
        (7, 1, 1): others(3), (8, 0, 0): others(1),
    })  # fmt: skip
    place = {"table": "supports", "step": 7, "layer": 1, "heads": [0, 1], "positions": True}
    assert compare(trace, other)["requests"][0]["first_layer"] == place
    other = changed(second, "supports", {(4, 1, 0): {"retained_mass": mass + 2 * SAME_MASS}})
    document = compare(trace, other)
    assert document["requests"][0]["first_layer"] == {**place, "step": 4, "heads": [0], "positions": False}
    assert [document["metrics"][name] for name in ("first_layer_step", "first_layer")] == [4, 1]
    other = changed(second, "selections", {(0, 0, 1): {"positions": [9]}})
    assert compare(trace, other)["requests"][0]["first_layer"] == {
        **place, "table": "selections", "step": 0, "layer": 0, "heads": [1],
    }  # fmt: skip


def test_a_limit_compares_its_number(pair, document):
    for text, holds in (
        ("equal_share<0.96", True), ("equal_share >= 0.96", False), ("first_difference==23", True),
        ("first_difference!=23", False), ("first_layer_step<=0", True), ("speed>1e-3", True),
        (" overlap < .5 ", True),
    ):  # fmt: skip
        assert Limit.parse(text).meets(document) is holds, text
    same = compare(pair[1], pair[1])
    assert not Limit.parse("first_difference<1000000").meets(same)  # none ever comes
    assert Limit.parse("first_layer>1000").meets(same)
    assert set(document["metrics"]) == set(METRICS)
    docs = (Path(__file__).parents[2] / "docs" / "traces.md").read_text()
    assert all(f"`{name}`" in docs for name in METRICS)


@pytest.mark.parametrize("text", ["overlap", "overlap<", "<1", "overlap=1", "overlap<x", "overlap<nan", ""])
def test_a_limit_that_does_not_parse_is_refused_with_the_names(text):
    with pytest.raises(ConfigError, match=r"fail-if must be NAME, one of .* names: equal_share, "):
        Limit.parse(text)


def test_a_limit_without_its_number_is_refused(own, tmp_path):
    with pytest.raises(ConfigError, match=r"unknown fail-if name 'wer'; expected one of \('equal_share"):
        Limit.parse("wer<1")
    bare = Trace.open(make_trace(tmp_path / "bare", steps=40, audit=None))
    document = compare(bare, bare)
    for name in ("overlap", "first_layer", "retained_mass"):
        with pytest.raises(TraceError, match=f"needs {name}, which the traces do not have; record "):
            Limit.parse(f"{name}<1").meets(document)
    redact(own[1].path)
    document = compare(own[0], Trace.open(own[1].path))
    with pytest.raises(TraceError, match="needs first_difference"):
        Limit.parse("first_difference<9").meets(document)
