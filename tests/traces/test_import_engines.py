"""Imports of what transformers' own code selects and attends to, on tiny random models."""

import runpy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sfi_core
from sfi_core import SfiConfig
from sfi_core.settings.engine import AuditConfig
from sfi_traces.importing.importer import import_trace
from sfi_traces.model.trace import Trace
from sfi_traces.read.check import check
from sfi_traces.record.parquet import ParquetObserver
from sfi_traces.replay import Supports, reuse
from sfi_traces.summary import summarize
from tests.architectures import prompts, tiny
from tests.traces.made import overlap
from tests.traces.small import rows, section

EXAMPLE = Path(__file__).parents[2] / "examples" / "import_dsa.py"
PROMPT, NEW, TOP, LAYERS = 40, 24, 12, 4


@cache
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


def recorded(label: str, path: Path) -> tuple[Trace, dict[str, np.ndarray]]:
    arrays = example()["record"](tiny(label), torch.tensor(prompts(PROMPT)), NEW)
    np.savez(path, **arrays)
    import_trace(path, path.with_suffix(".trace"))
    return Trace.open(path.with_suffix(".trace")), arrays


def test_deepseek_s_own_indexer_is_imported_and_replayed(tmp_path):
    trace, arrays = recorded("deepseek-v3.2", tmp_path / "a.npz")
    assert arrays["positions"].shape == (NEW, LAYERS, 8)
    assert check(trace)["problems"] == []
    sets = {
        (step, layer): set(arrays["positions"][step, layer].tolist()) for step in range(NEW) for layer in range(LAYERS)
    }
    found = {(row["step"], row["layer"]): row for row in rows(trace, "supports")}
    assert {place: set(row["positions"]) for place, row in found.items()} == sets
    shared = [
        overlap(list(sets[step - 1, layer]), list(sets[step, layer]))
        for step in range(1, NEW)
        for layer in range(LAYERS)
    ]
    assert section(trace, "stability")["within"]["mean"] == pytest.approx(np.mean(shared))
    loaded = Supports.load(trace)
    for every in (2, 4, 8, 16):
        recall = [
            len(sets[step, layer] & sets[step - step % every, layer]) / 8
            for step in range(NEW)
            for layer in range(LAYERS)
            if step % every
        ]
        reasons = ["" if step % every else "stride" for step in range(NEW)]
        assert reuse(loaded, [reasons]).recall == pytest.approx(np.mean(recall))


def test_minimax_s_blocks_are_imported_head_by_head(tmp_path):
    model = tiny("minimax-m3")
    block_size = next(iter(example()["indexers"](model).values())).block_size
    trace, arrays = recorded("minimax-m3", tmp_path / "a.npz")
    assert arrays["layers"].tolist() == [1, 3]
    assert check(trace)["problems"] == []
    for row in rows(trace, "supports"):
        own = arrays["blocks"][row["step"], [1, 3].index(row["layer"]), row["head"]]
        length = PROMPT + row["step"]
        assert row["positions"] == [p for p in range(length) if p // block_size in own]
    assert {row["head"] for row in rows(trace, "supports")} == {0, 1}


@cache
def audited(folder: Path) -> Trace:
    """The same run as sfi records it, with full attention and an audit."""
    config = SfiConfig(trigger_token_ids=(5, 50))
    with ParquetObserver(folder) as observer:
        sfi_core.generate(
            tiny("llama"), None, prompts(PROMPT), config, policy="full-kv", max_new_tokens=NEW,
            observers=[observer], audit=AuditConfig(top=TOP), stop_token_ids=(),
        )  # fmt: skip
    return Trace.open(folder)


def save(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a file by the lines of docs/import.md, with fewer positions and this model's KV heads."""
    page = (Path(__file__).parents[2] / "docs" / "import.md").read_text()
    lines = page.split("## Attention of transformers")[1].split("```python\n")[1].split("```")[0]
    lines = lines.replace("1024", str(TOP)).replace("=64", f"={NEW}, do_sample=False").replace("(8, -1)", "(2, -1)")
    model = tiny("llama")
    model.set_attn_implementation("eager")
    monkeypatch.chdir(path.parent)
    exec(lines, {"model": model, "ids": torch.tensor(prompts(PROMPT))})  # noqa: S102 - the page's own example
    model.set_attn_implementation("sdpa")
    Path("attention.npz").rename(path)


def test_attention_of_transformers_is_what_our_audit_records(tmp_path, monkeypatch):
    save(tmp_path / "a.npz", monkeypatch)
    import_trace(tmp_path / "a.npz", tmp_path / "a")
    trace, ours = Trace.open(tmp_path / "a"), audited(tmp_path / "ours")
    for name in ("prompts", "steps", "supports"):
        found, expected = rows(trace, name), rows(ours, name)
        assert len(found) == len(expected) > 0
        for one, other in zip(found, expected, strict=True):
            for column in ("step", "layer", "head", "token_id", "context_tokens", "positions", "position", "slow",
                           "audited"):  # fmt: skip
                assert one.get(column) == other.get(column), column
            for column in ("mass", "overlap_previous_step", "overlap_last_refresh"):
                assert one.get(column) == pytest.approx(other.get(column), abs=1e-5), column
    assert trace.manifest["prompts"] == ours.manifest["prompts"]
    assert check(trace)["problems"] == []
    assert summarize(trace)["drift"] == summarize(ours)["drift"]
