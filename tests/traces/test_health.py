"""Each rule of selection health: a trace that trips it, and a sound one that does not."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sfi_core
from sfi_core import AuditConfig, SfiConfig
from sfi_core.bundled.example import load_example
from sfi_traces import ParquetObserver, Trace, health
from sfi_traces.health import RULES, Watch, judge, line
from sfi_traces.model.request import Request
from tests.covering import first
from tests.traces.made import CONFIG
from tests.traces.small import spoil, write_trace
from tests.traces.test_recorded import bundled

STEPS, CONTEXT, EVERY, BUDGET = 240, 2000, 10, 20
Rows = list[dict[str, Any]]
Tables = dict[str, Rows]

BY_NAME = {rule.name: rule for rule in RULES}


def sound() -> Tables:
    """Make a run that refreshes every 10 steps, selects anew, and reads what dense attention does."""
    rng = random.Random(0)
    tables: Tables = {"steps": [], "selections": [], "supports": [], "logits": []}
    chosen: dict[tuple[int, int], list[int]] = {}
    for step in range(STEPS):
        slow, context = step % EVERY == 0, CONTEXT + step
        tables["steps"].append(
            {
                "request": 0, "step": step, "position": context - 1, "context_tokens": context,
                "slow": slow, "reason": "trigger" if slow else "", "trigger": step % EVERY == EVERY - 1,
                "audited": not slow,
            }
        )  # fmt: skip
        for layer, head in [(0, 0), (0, 1), (1, 0), (1, 1)]:
            key = {"request": 0, "step": step, "layer": layer, "head": head}
            if slow:
                new = sorted(rng.sample(range(4, CONTEXT - 100), BUDGET))
                tables["selections"].append(_selection(key, new, chosen.get((layer, head))))
                chosen[layer, head] = new
            else:
                read = [*chosen[layer, head], *range(context - 4, context)]
                tables["supports"].append(
                    {
                        **key, "positions": read, "mass": [0.9 / len(read)] * 22 + [1e-5, 0.2],
                        "read": [True] * len(read), "top_1_read": 1.0, "retained_mass": 0.9,
                        "retained_mass_min": 0.8,
                    }
                )  # fmt: skip
        if not slow:
            row = {"request": 0, "step": step, "kl_next_token": 0.02 + 0.01 * rng.random()}
            tables["logits"].append({**row, "argmax_agrees": step % 29 != 1})
    return tables


def _selection(key: dict[str, int], new: list[int], old: list[int] | None) -> dict:
    both = len(set(new) & set(old or ()))
    return {
        **key, "selected": len(new), "positions": new, "reason": "", "lambda_star": 0.01,
        "evidence_norm2": 0.1, "evidence_dot_prior": 0.001, "prior_norm2": 0.0005, "evidence_entropy": 3.0,
        "added": len(new) - both, "removed": len(old) - both if old else 0,
        "jaccard_previous": both / (2 * BUDGET - both) if old else None,
    }  # fmt: skip


def each(table: str, **changes):
    """Change rows of a table; a function is called with the row."""

    def apply(tables: Tables) -> None:
        for row in tables[table]:
            for name, value in changes.items():
                row[name] = value(row) if callable(value) else value

    return apply


def unread(position: int, mass: float):
    """Let dense attention look at a position that was not read, in the head of layer 1."""

    def apply(tables: Tables) -> None:
        for row in tables["supports"]:
            row["positions"], row["read"] = [position, *row["positions"]], [False, *row["read"]]
            row["mass"] = [mass, *row["mass"]]

    return apply


def late(row: dict) -> bool:
    return row["step"] > 170


def end(row: dict) -> list[int]:
    """The last positions before the recent window."""
    last = CONTEXT + row["step"] - CONFIG["recent"]
    return list(range(last - BUDGET, last))


# what trips each rule: changes of the tables, and of the config
BROKEN: dict[str, tuple[Any, dict[str, Any]]] = {
    "never_fast": (each("steps", slow=True, reason="t_max"), {}),
    "trigger_never": (each("steps", trigger=False), {}),
    "trigger_always": (each("steps", trigger=lambda row: row["step"] % 2 == 0), {}),
    "evidence_broken": (each("selections", evidence_norm2=0.0, lambda_star=None), {}),
    "evidence_flat": (each("selections", evidence_entropy=math.log(CONTEXT - 20 + 100)), {}),
    "selection_trailing": (each("selections", positions=end), {}),
    "selection_same": (each("selections", positions=lambda row: [*range(40, 59), 60 + row["step"]]), {}),
    "selection_frozen": (each("selections", added=0, removed=0), {}),
    "selection_missed": (lambda tables: tables.update(selections=tables["selections"][:8]), {}),
    "sink_unread": (unread(0, 0.3), {}),
    "top_1_dropped": (each("supports", top_1_read=0.5), {}),
    "look_back": (unread(5, 0.3), {}),
    "fast_disagrees": (each("logits", argmax_agrees=lambda row: row["step"] % 3 != 0), {}),
    "fast_kl": (each("logits", kl_next_token=0.2), {}),
    "drift_agreement": (each("logits", argmax_agrees=lambda row: not late(row) or row["step"] % 2 == 0), {}),
    "drift_kl": (each("logits", kl_next_token=lambda row: 0.5 if late(row) else 0.01), {}),
}


def judged(folder, tables: Tables, config: dict[str, Any] | None = None, **manifest) -> dict:
    settings = CONFIG | {"recent": 16} | (config or {})
    trace = Trace.open(write_trace(folder, tables, config=settings, **manifest))
    return judge(Request.of(trace))


def tripped(verdict: dict) -> set[str]:
    return {finding["rule"] for finding in verdict["findings"]}


def not_judged(verdict: dict) -> dict[str, str]:
    return {rule["rule"]: rule["reason"] for rule in verdict["not_judged"]}


def test_a_sound_trace_trips_no_rule_and_all_are_judged(tmp_path):
    verdict = judged(tmp_path / "run", sound())
    assert (verdict["findings"], verdict["not_judged"], verdict["sound"]) == ([], [], True)
    assert {rule["rule"] for rule in verdict["judged"]} == set(BY_NAME)


@pytest.mark.parametrize("name", [rule.name for rule in RULES])
def test_each_rule_is_tripped_by_its_trace(name, tmp_path, monkeypatch):
    monkeypatch.setattr(health, "RULES", (BY_NAME[name],))
    change, config = BROKEN[name]
    tables = sound()
    change(tables)
    verdict = judged(tmp_path / "run", tables, config)
    (finding,) = [row for row in verdict["findings"] if row["rule"] == name]
    assert finding["value"] >= finding["threshold"] == BY_NAME[name].threshold
    assert not verdict["sound"]
    assert line(finding).startswith(f"{name}: ")
    assert "{" not in line(finding)


def test_heads_of_a_cluster_may_select_the_same(tmp_path):
    """SyncKV's representative head selects for the others: its default has one cluster of two KV heads."""
    tables = sound()
    BROKEN["selection_same"][0](tables)
    verdict = judged(tmp_path / "run", tables, policy="synckv")
    assert "selection_same" not in tripped(verdict)
    assert "share a selection" in not_judged(verdict)["selection_same"]


def test_a_share_of_the_first_steps_is_said_to_be_theirs_beside_that_of_all(tmp_path):
    """Five of the first 32 fast steps differ and none of the 77 others: 16 %, and 4.6 % of all."""
    tables = sound()
    for at, row in enumerate(tables["logits"]):
        row["argmax_agrees"] = at not in (1, 5, 9, 20, 30)
    verdict = judged(tmp_path / "run", tables)
    (finding,) = [row for row in verdict["findings"] if row["rule"] == "fast_disagrees"]
    share = f"{100 * 5 / len(tables['logits']):.1f} % of all {len(tables['logits'])}; request 0"
    assert finding["message"].startswith("16 % of the first 32 fast steps have another")
    assert finding["message"].endswith(f"({share})")


def test_a_drop_that_is_no_more_than_noise_is_no_drift(tmp_path):
    tables = sound()
    logits = [row for row in tables["logits"] if row["step"] < 36][:30]
    for at, row in enumerate(logits):  # 9 of 10 agree first, 7 of 10 last
        row["argmax_agrees"] = at not in (3, 20, 24, 27)
    tables["logits"] = logits
    assert "drift_agreement" not in tripped(judged(tmp_path / "run", tables))


def test_the_worst_place_is_named_and_a_lone_head_is_no_frozen_selection(tmp_path):
    tables = sound()
    for row in tables["selections"]:
        if (row["layer"], row["head"]) == (1, 0):
            row["added"] = row["removed"] = 0
    assert "selection_frozen" not in tripped(judged(tmp_path / "one", tables))
    for row in tables["supports"]:
        if (row["layer"], row["head"]) == (1, 0):
            row["top_1_read"] = 0.25
    (finding,) = judged(tmp_path / "two", tables)["findings"]
    assert (finding["layer"], finding["head"], finding["beyond"], finding["places"]) == (1, 0, 1, 4)
    assert finding["value"] == pytest.approx(0.75)


@pytest.mark.parametrize(("read", "rules"), [(0.6, set()), (0.45, {"top_1_dropped"})])
def test_a_lone_head_that_drops_the_most_probable_position_in_half_of_the_steps_is_enough(
    tmp_path, monkeypatch, read, rules
):
    monkeypatch.setattr(health, "RULES", (replace(BY_NAME["top_1_dropped"], share=0.5),))
    tables = sound()
    for row in tables["supports"]:
        row["top_1_read"] = read if (row["layer"], row["head"]) == (1, 0) else 1.0
    assert tripped(judged(tmp_path / "run", tables)) == rules


def test_what_was_not_recorded_is_not_judged_and_says_what_records_it(tmp_path):
    tables = {"steps": sound()["steps"]}
    verdict = judged(tmp_path / "run", tables)
    assert {rule["rule"] for rule in verdict["judged"]} == {"never_fast", "trigger_never", "trigger_always"}
    assert "--audit" in not_judged(verdict)["top_1_dropped"]
    assert "trace.positions" in not_judged(verdict)["selection_same"]
    short = judged(tmp_path / "short", {"steps": tables["steps"][:20]})
    assert not_judged(short)["trigger_never"] == "it takes 200 tokens, got 20"


def test_how_far_back_a_selection_reached_is_not_judged_without_its_positions(tmp_path):
    tables = sound()
    unread(1000, 0.06)(tables)
    assert tripped(judged(tmp_path / "known", tables)) == set()
    each("selections", positions=None)(tables)
    verdict = judged(tmp_path / "unknown", tables)
    assert tripped(verdict) == set()
    assert "trace.positions" in not_judged(verdict)["look_back"]
    each("selections", selected=0, positions=[])(tables)  # as streaming-llm
    assert "look_back" in tripped(judged(tmp_path / "none", tables))


def test_a_watch_tells_a_problem_once_and_takes_a_small_share_of_the_time(tmp_path):
    tables = sound()
    each("selections", added=0, removed=0, lambda_star=0.02)(tables)
    folder = write_trace(tmp_path / "run", tables)
    clock = iter([0, 9.9, 10, 10.5, 34.9, 35, 36])  # it is read before and after a judgement, which takes 0.5 s
    watch = Watch(lambda: next(clock))
    assert watch(folder) == []
    (said,) = watch(folder)
    assert said.startswith("selection_frozen: 100 % of the refreshes")
    assert watch(folder) == watch(folder) == []  # it is not due, and there is nothing new
    assert next(clock, None) is None


def test_an_unreadable_trace_has_no_news(tmp_path):
    folder = write_trace(tmp_path / "run", sound())
    spoil(folder / "steps" / "part-00000.parquet")
    assert Watch().news(folder) == Watch().news(tmp_path / "none") == []


@pytest.mark.parametrize("reason", ["trigger", "t_max", "its-own"])
def test_triggers_of_another_package_s_policy_are_judged_where_its_steps_ask_them(tmp_path, reason):
    """The package need not be installed where the trace is read."""
    steps = [row | {"trigger": False, "reason": reason if row["slow"] else ""} for row in sound()["steps"]]
    verdict = judge(
        Request.of(Trace.open(write_trace(tmp_path / "run", {"steps": steps}, policy="theirs", config=CONFIG)))
    )
    if reason == "its-own":
        assert not_judged(verdict)["trigger_never"] == "theirs has no trigger"
    else:
        assert "trigger_never" in tripped(verdict)


def run(folder, **config) -> set[str]:
    """Run sfi on a piece of the example, and return the rules that its trace trips."""
    model, tokenizer = bundled()
    ids = tokenizer(load_example().prompt)["input_ids"][-700:]
    settings = {"recent": 32, "budget": 48, "t_max": 4, "slow_start": 1, "window_prefill": 1} | config
    with ParquetObserver(folder, tokenizer=tokenizer, positions=True) as observer:
        sfi_core.generate(
            model, tokenizer, [ids], SfiConfig().replace(**settings), max_new_tokens=24, stop_token_ids=(),
            observers=[observer], audit=AuditConfig(every=1, top=256),
        )  # fmt: skip
    return tripped(judge(Request.of(Trace.open(folder))))


def break_selector(monkeypatch: pytest.MonkeyPatch, change) -> None:
    """Let sfi's Selector get logits, and give scores, that are changed."""
    from sfi_core.policies.built_in import sfi  # noqa: PLC0415

    whole = sfi.selector

    def on(backend: str):
        return lambda logits, *rest, **options: change(whole.on(backend), logits, *rest, **options)

    monkeypatch.setattr(sfi, "selector", SimpleNamespace(on=on))


def zero_scores(select, *rest, **options) -> tuple[torch.Tensor, torch.Tensor]:
    score, weight = select(*rest, **options)
    return torch.zeros_like(score), weight


def zero_logits(select, logits, *rest, **options) -> tuple[torch.Tensor, torch.Tensor]:
    return select(torch.zeros_like(logits), *rest, **options | {"log_sum_BHGW": None})


def broken_logits(select, logits, *rest, **options) -> tuple[torch.Tensor, torch.Tensor]:
    score, weight = select(logits, *rest, **options)
    options["diagnostics"]["evidence_norm2"].fill_(math.nan)
    return score, weight * math.nan


def test_a_sound_run_trips_no_rule_of_the_selection(tmp_path):
    rules = run(tmp_path / "run")
    assert not [name for name in rules if name.startswith(("selection", "evidence", "sink"))]


@pytest.mark.parametrize(
    ("change", "names"),
    first(
        [
            (zero_scores, {"selection_same", "selection_frozen"}),
            (zero_logits, {"evidence_flat"}),
            (broken_logits, {"evidence_broken"}),
        ],
        2,
    ),
)
def test_a_broken_selector_is_told(change, names, monkeypatch, tmp_path):
    break_selector(monkeypatch, change)
    rules = run(tmp_path / "run")
    assert names <= rules
