"""A server's trace: what workers tell reaches the one writer, and `sfi trace check` finds it sound."""

import pytest
import torch
from typer.testing import CliRunner

from sfi_cli.app import app
from sfi_core.errors import ConfigError
from sfi_core.hosts.vllm.connector import WorkerEvents
from sfi_core.observers.events import AuditEvent, SelectionEvent
from sfi_traces.model.check import check
from sfi_traces.model.trace import Trace
from tests.vllm.engines import SELECTS, SMALL_BATCH, ask, engine, example_ids, told

CONNECTOR = "sfi_cli.commands.serve_connector"


def traced(extra: dict, **options):
    """Make an engine as `sfi serve` does."""
    transfer = {
        "kv_connector": "SfiConnector", "kv_role": "kv_both", "kv_connector_module_path": CONNECTOR,
        "kv_connector_extra_config": extra,
    }  # fmt: skip
    return engine(None, kv_transfer_config=transfer, **options)


def test_a_trace_of_everything_that_a_server_meets_is_sound(tmp_path):
    """Requests with settings of their own, without a slot, and preempted ones."""
    ids, folder = example_ids(), tmp_path / "run"
    prompts = [ids[n * 300 : n * 300 + 260 + 20 * n] for n in range(4)]
    extra = {**SELECTS, "slots": 2, "trace": str(folder), "trace_audit": 1}
    small = {**SMALL_BATCH, "max_model_len": 1024, "num_gpu_blocks_override": 44}
    with traced(extra, **small) as llm:
        outputs = ask(llm, prompts, max_tokens=120)
        with_t_max = ask(llm, prompts[:1], max_tokens=40, extra_args={"sfi.t_max": 3})
    reports = [told(output) for output in (*outputs, *with_t_max)]
    assert sum(report["preempted"] for report in reports) > 0
    assert sum(report["dense_steps"] for report in reports) > 0
    trace = Trace.open(folder)
    findings = check(trace)
    assert findings["problems"] == []
    assert findings["steps_checked"]
    assert findings["finished"]
    steps = trace.table("steps").to_pylist()
    for request, (output, report) in enumerate(zip((*outputs, *with_t_max), reports, strict=True)):
        mine = sorted((s for s in steps if s["request"] == request), key=lambda s: s["step"])
        assert [s["token_id"] for s in mine] == list(output.outputs[0].token_ids)
        assert [s["step"] for s in mine if s["slow"]] == report["slow_at"]
    assert {s["reason"] for s in steps} >= {"", "first", "dense", "resumed", "t_max"}
    audited = {(s["request"], s["step"]) for s in steps if s["audited"]}
    supports = trace.table("supports").to_pylist()
    assert audited == {(row["request"], row["step"]) for row in supports}
    selections = trace.table("selections").to_pylist()
    assert {row["head"] for row in selections} == {0, 1}
    assert trace.manifest["prompts"][-1]["settings"] == {"t_max": 3}
    slow = sum(report["slow_steps"] for report in reports)
    for words in (
        ["show", folder],
        ["show", folder, "--request", "4"],
        ["check", folder],
        ["sql", folder, "select count(*) as steps from steps where slow"],
        ["diff", folder, folder],
        ["replay", folder, "--budget", "32"],
        ["export", folder, "--format", "perfetto", "--output", tmp_path / "trace.json"],
    ):
        done = CliRunner().invoke(app, ["trace", *map(str, words)])
        # a budget of 96 tokens reads too little, which `check` says
        wanted = 1 if words[0] == "check" else 0
        assert done.exit_code == wanted, (words, done.output, done.exception)
        if words[0] == "sql":
            assert str(slow) in done.output
        if words[0] == "check":
            assert done.output.endswith("sound, but not healthy\n")


def test_the_plain_connector_refuses_a_trace(tmp_path):
    with (
        pytest.raises(ConfigError, match=f"kv_connector_module_path={CONNECTOR}"),
        engine({"trace": str(tmp_path / "run")}),
    ):
        pass


def test_heads_of_tensor_parallel_ranks_stand_side_by_side():
    def events(rank: int) -> list:
        index = torch.full((2, 3), rank, dtype=torch.int32)
        numbers = torch.full((2, 3), rank / 10)
        return [
            SelectionEvent(
                request=1, step=4, layer=layer, index_HK=index + 10 * layer,
                diagnostics={"lambda_star": torch.tensor([[rank, rank + 0.5]])},
            )
            for layer in range(2)
        ] + [
            AuditEvent(
                request=1, step=4, layer=0, slow=True, heads=(0, 1), index_HK=index,
                mass_HK=numbers, retained_H=numbers[:, 0], query_cosine_H=numbers[:, 0],
                output_error_H=numbers[:, 0], top_1_read_H=numbers[:, 0],
            )
        ]  # fmt: skip

    # the ranks may be told in any order
    joined = WorkerEvents({1: events(1)}).aggregate(WorkerEvents({0: events(0)})).joined()
    first, second, audit = joined
    assert (first.layer, second.layer, audit.layer) == (0, 1, 0)
    assert second.index_HK[:, 0].tolist() == [10, 10, 11, 11]
    assert first.diagnostics["lambda_star"].tolist() == [0, 0.5, 1, 1.5]
    assert audit.heads == (0, 1, 2, 3)
    assert audit.retained_H.tolist() == pytest.approx([0, 0, 0.1, 0.1])
    assert audit.top_1_read_H.tolist() == pytest.approx([0, 0, 0.1, 0.1])
    assert audit.read_HK is None  # no rank looked at it
