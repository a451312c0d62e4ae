"""Traces of the bundled checkpoint's own run, and of runs in which requests begin where others have ended."""

import json
import math
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch

import sfi_core
from sfi_core import AuditConfig, EngineOptions, SfiConfig, load
from sfi_core.bundled.example import load_example
from sfi_core.hosts.transformers.cache import CACHE_NAME
from sfi_kernels.constants import EPS
from sfi_traces import ParquetObserver, Trace
from sfi_traces.export.perfetto import perfetto_text
from sfi_traces.model.check import check
from sfi_traces.model.request import Request
from tests.architectures import SMALL, tiny
from tests.core.conftest import tiny_qwen3
from tests.traces.small import section

NEW = 40
# room for everything: the run sees what the plain model sees; no clip: lambda* is Eq. 17's own value
CONFIG = SfiConfig(
    slow_start=1, span=0, budget=5000, recent=32, t_max=9, window_prefill=1, min_gap=3, triggers=(".", "!", "a", "the")
).replace(selector={"lambda_clip": 1.0})


@cache
def bundled() -> tuple:
    return load()


@cache
def prompts() -> list[list[int]]:
    ids = bundled()[1](load_example().prompt)["input_ids"]
    return [ids[-300:], ids[-450:]]


def test_a_hybrid_s_layers_of_states_have_no_heads(tmp_path):
    """One that sfi wrote is one that it reads."""
    with ParquetObserver(tmp_path / "run", tokenizer=None) as observer:
        options = {"max_new_tokens": 6, "stop_token_ids": (), "observers": [observer]}
        sfi_core.generate(tiny("granite-4"), None, [[5] * 9], SMALL, **options)
    layers = Trace.open(tmp_path / "run").manifest["model"]["layers"]
    assert [layer["heads"] for layer in layers] == [0, 2, 0, 2]


def complete(config: SfiConfig, **options):
    model, tokenizer = bundled()
    options = {"stop_token_ids": ()} | options
    return sfi_core.generate(model, tokenizer, prompts(), config, max_new_tokens=NEW, **options)


@cache
def recorded(budget: int):
    folder = Path(mkdtemp()) / "trace"
    with ParquetObserver(folder, tokenizer=bundled()[1], positions=True) as observer:
        audit = AuditConfig(every=2, top=64)
        result = complete(CONFIG.replace(budget=budget), observers=[observer], audit=audit)
    return result, Trace.open(folder)


def rows(budget: int, table: str) -> list[dict]:
    return recorded(budget)[1].table(table).to_pylist()


@pytest.mark.exhaustive
@pytest.mark.parametrize("budget", [48, 5000])
def test_tokens_are_the_same_with_and_without_a_trace(budget):
    plain = complete(CONFIG.replace(budget=budget))
    watched, _ = recorded(budget)
    assert [r.token_ids for r in watched.report.requests] == [r.token_ids for r in plain.report.requests]
    for request, report in enumerate(watched.report.requests):
        steps = [row for row in rows(budget, "steps") if row["request"] == request]
        assert [row["token_id"] for row in steps] == report.token_ids
        text = "".join(row["token_text"] for row in steps)
        assert text == bundled()[1].decode(report.token_ids)


@pytest.mark.parametrize("budget", [48, 5000])
def test_slow_steps_are_those_that_eq_5_and_t_max_give_from_the_token_ids(budget):
    """Written out here, not by the product's own Trigger: delay 1, min_gap 3, T_max 9."""
    _, trace = recorded(budget)
    triggers = set(trace.manifest["trigger_token_ids"])
    for request in range(2):
        steps = [row for row in rows(budget, "steps") if row["request"] == request]
        ids = [row["token_id"] for row in steps]
        last = 0
        for step, row in enumerate(steps[1:], 1):
            boundary = step >= 2 and ids[step - 2] in triggers and step - last >= 3
            overdue = step - last > 9
            assert row["slow"] == (boundary or overdue), step
            assert row["reason"] == ("trigger" if boundary else "t_max" if overdue else "")
            last = step if row["slow"] else last
    assert {row["reason"] for row in rows(budget, "steps")} == {"first", "trigger", "t_max", ""}


def lambda_star(mass_GT: torch.Tensor, norm_T: torch.Tensor, start: int, stop: int) -> float:
    """Eqs. 6 to 17 in float64, from attention probabilities and key norms, for J = [start, stop)."""
    c = CONFIG.selector
    p = mass_GT.double()[:, start:stop]
    p = p / p.sum(1, keepdim=True)  # the softmax over J
    f = p.pow(c.alpha).mean(0).pow(1 / c.alpha)
    f = f / f.sum()
    u = torch.arange(stop - start, dtype=torch.float64) / (stop - start - 1 + EPS)
    place = (-c.beta * u**c.power).exp() * (1 - u + EPS) ** c.eta
    r = (norm_T.double()[start:stop] + EPS) ** -c.gamma * place
    r = r / r.sum()
    return float(((f * f).sum() - (f * r).sum()) / ((f - r) ** 2).sum())


def test_lambda_star_is_that_of_the_models_own_attention_weights():
    """From transformers' eager attention and cache; the Selector's last column of Eq. 10 is float32."""
    result, _ = recorded(5000)
    model, _ = load()
    model.set_attn_implementation("eager")
    seen, selections = 0, rows(5000, "selections")
    for request, prompt in enumerate(prompts()):
        report = result.report.requests[request]
        for step in report.slow_at:
            ids = torch.tensor([prompt + report.token_ids[:step]])
            with torch.no_grad():
                output = model(ids, output_attentions=True, use_cache=True)
            length = ids.shape[1]
            for row in selections:
                if (row["request"], row["step"]) != (request, step):
                    continue
                layer, head = row["layer"], row["head"]
                mass = output.attentions[layer][0, :, -1].unflatten(0, (2, 2))[head]
                norm = getattr(output, CACHE_NAME).layers[layer].keys[0, head].norm(dim=-1)
                expected = lambda_star(mass, norm, 4, length - 32)
                assert math.isclose(row["lambda_star"], min(max(expected, 0), 1), abs_tol=1e-4)
                seen += 1
    assert seen == sum(len(r.slow_at) for r in result.report.requests) * 4 * 2


def test_every_table_has_what_the_run_had():
    result, trace = recorded(48)
    prompt = [row["token_id"] for row in rows(48, "prompts") if row["request"] == 1]
    assert prompt == prompts()[1]
    fast = sum(r.fast_steps for r in result.report.requests)
    audited = [row for row in rows(48, "steps") if row["audited"] and not row["slow"]]
    assert 0 < len(rows(48, "logits")) == len(audited) < fast
    names = {row["name"] for row in rows(48, "timings")}
    assert names == {
        "prefill", "forward", "append", "attention.dense", "attention.fast", "selector", "top_k", "pack",
        "sample", "audit", "shadow",
    }  # fmt: skip
    dense = [r for r in rows(48, "timings") if r["name"] == "attention.dense"]
    first = next(r for r in dense if r["request"] == 0 and r["layer"] == 0)
    assert first["bytes"] == len(prompts()[0]) * 2 * (32 + 32) * 4
    assert trace.manifest["finished"] is not None


def test_the_positions_that_a_step_is_said_to_read_are_those_that_it_attended():
    """What the views derive from selections and settings is what the audit saw in the engine."""
    trace = recorded(48)[1]
    for request in (0, 1):
        view = Request(trace, request)
        for step in {row["step"] for row in rows(48, "supports") if row["request"] == request}:
            reads = view.reads(step)
            for row in rows(48, "supports"):
                if (row["request"], row["step"]) == (request, step):
                    place = row["layer"], row["head"]
                    said = reads.of_place(place, np.array(row["positions"]))
                    assert said.tolist() == row["read"]


CONTINUOUS = SfiConfig(
    slow_start=1, min_gap=0, span=0, sink=2, recent=6, budget=5, t_max=4,
    trigger_token_ids=tuple(range(0, 96, 3)), window_prefill=4,
)  # fmt: skip
ROWS = [torch.randint(0, 96, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (9, 30, 4, 17, 40, 6)]
LIMITS = [8, 3, 9, 1, 6, 5]
# what differs from the request alone
ITS_OWN = ("request", "elapsed_us", "batch_step", "slow_requests", "fast_requests", "cached_tokens", "moved_bytes")


@cache
def model():
    return tiny_qwen3()


def record(numbers: list[int], **options) -> Trace:
    folder = Path(mkdtemp()) / "trace"
    with ParquetObserver(folder, positions=True) as observer:
        complete_rows(numbers, observer, **options)
    return Trace.open(folder)


def complete_rows(numbers: list[int], observer: ParquetObserver, **options):
    return sfi_core.generate(
        model(), None, [ROWS[n] for n in numbers], options.pop("config", CONTINUOUS), stop_token_ids=(),
        max_new_tokens=[LIMITS[n] for n in numbers], observers=[observer],
        audit=AuditConfig(every=2, top=6), **options,
    )  # fmt: skip


@cache
def continuous() -> Trace:
    return record([*range(6)], max_batch=2, engine=EngineOptions(prefill_chunk=16))


def rows_of(trace: Trace, table: str, request: int) -> list[dict]:
    of_request = [row for row in trace.table(table).to_pylist() if row["request"] == request]
    return [{key: row[key] for key in row if key not in ITS_OWN} for row in of_request]


@pytest.mark.parametrize("request_number", [0, 2, 5])
def test_a_requests_rows_are_those_of_the_request_alone(request_number):
    alone = record([request_number], engine=EngineOptions(prefill_chunk=16))
    for table in ("prompts", "steps", "selections", "supports", "logits"):
        batched, expected = rows_of(continuous(), table, request_number), rows_of(alone, table, 0)
        for ours, theirs in zip(batched, expected, strict=True):
            for name, value in theirs.items():
                number = isinstance(value, float) or name == "mass"  # a batch may round otherwise
                wanted = pytest.approx(value, rel=1e-3, abs=1e-5) if number else value
                assert ours[name] == wanted, (table, name)


def test_it_is_sound():
    document = check(continuous())
    assert (document["sound"], document["problems"], document["notes"]) == (True, [], [])
    assert document["steps_checked"]
    assert [row["steps"] for row in document["recorded"]] == LIMITS


def test_every_request_has_a_step_of_the_batch_for_each_of_its_own():
    steps = continuous().table("steps").to_pylist()
    for number in range(6):
        batch_steps = [row["batch_step"] for row in steps if row["request"] == number]
        assert batch_steps == sorted(set(batch_steps))
    passes = {row["batch_step"]: row["elapsed_us"] for row in steps}
    assert sorted(passes) == list(range(len(passes)))
    for row in steps:
        assert row["elapsed_us"] == passes[row["batch_step"]]


def test_latency_counts_each_prompt_and_each_step_of_the_batch_once():
    latency = section(continuous(), "latency")
    steps = continuous().table("steps").to_pylist()
    decoding = {row["batch_step"]: row["elapsed_us"] for row in steps if row["step"]}
    expected = sum(row["step"] > 0 for row in steps) / (sum(decoding.values()) / 1e6)
    assert latency["tokens_per_second"] == pytest.approx(expected)
    prefill = [kind for kind in latency["kinds"] if kind["kind"] == "prefill"]
    assert [kind["n"] for kind in prefill] == [5]  # 0 and 1 together, then four alone


def test_time_of_later_prompts_is_the_prefills():
    parts = section(continuous(), "phases")
    timings = continuous().table("timings").to_pylist()
    reading = {row["step"] for row in timings if row["name"] == "prefill"}
    assert len(reading) == 1 + 1 + 4  # of the first two an earlier piece, -1, and the last
    for part, wanted in (("prefill", True), ("decode", False)):
        for phase in parts[part]:
            spent = [
                row["elapsed_us"]
                for row in timings
                if row["name"] == phase["name"] and (row["step"] in reading) is wanted
            ]
            if phase["name"] != "other":
                assert phase["total_us"] == pytest.approx(sum(spent))


@pytest.mark.parametrize("number", [0, 2, 4])
def test_of_one_request_only_the_steps_it_took_part_in_are_summed_up(number):
    timings = continuous().table("timings").to_pylist()
    steps = continuous().table("steps").to_pylist()
    batch_steps = {row["batch_step"] for row in steps if row["request"] == number}
    decoding = section(continuous(), "phases", number)["decode"]
    (sampling,) = [phase for phase in decoding if phase["name"] == "sample"]
    first = min(batch_steps)  # its prompt's
    spent = [row["elapsed_us"] for row in timings if row["name"] == "sample" and row["step"] in batch_steps - {first}]
    assert (sampling["spans"], len(spent)) == (LIMITS[number] - 1,) * 2
    assert sampling["total_us"] == pytest.approx(sum(spent))


def test_the_timeline_shows_each_step_where_its_spans_are():
    text = "".join(perfetto_text(continuous(), lambda done, total: None))
    events = json.loads(text)["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X"]
    for number in range(6):
        track = [e for e in slices if tracks[e["tid"]] == f"steps of request {number}"]
        assert [event["args"]["step"] for event in track] == list(range(LIMITS[number]))
        for first, second in pairwise(track):
            assert first["ts"] + first["dur"] <= second["ts"] + 0.001
    began = {
        number: min(e["ts"] for e in slices if tracks[e["tid"]] == f"steps of request {number}") for number in range(6)
    }
    assert began[0] == began[1] < began[2] < began[3] < began[4] < began[5]
