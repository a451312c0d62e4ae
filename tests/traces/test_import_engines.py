"""Imports of what transformers' own code selects and attends to, on tiny random models."""

import runpy
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import sfi_core
from sfi_core import AuditConfig, SfiConfig
from sfi_core.errors import InputError
from sfi_traces import ParquetObserver, Trace
from sfi_traces.importing import attention, import_trace
from sfi_traces.model.check import check
from sfi_traces.replay import Supports, reuse
from sfi_traces.summary import summarize
from tests.architectures import prompts, tiny
from tests.traces.made import overlap
from tests.traces.small import rows, section

EXAMPLE = Path(__file__).parents[2] / "examples" / "import_dsa.py"
PROMPT, NEW, TOP, LAYERS = 40, 24, 12, 4


@cache
def example() -> dict:
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
    supports = {(row["step"], row["layer"]): row for row in rows(trace, "supports")}
    assert {place: set(row["positions"]) for place, row in supports.items()} == sets
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
        assert reuse(loaded, [reasons])["recall"] == pytest.approx(np.mean(recall))


def test_minimax_s_blocks_are_imported_head_by_head(tmp_path):
    model = tiny("minimax-m3")
    block_size = next(iter(example()["indexers"](model).values())).block_size
    trace, arrays = recorded("minimax-m3", tmp_path / "a.npz")
    assert arrays["layers"].tolist() == [1, 3]
    assert check(trace)["problems"] == []
    for row in rows(trace, "supports"):
        blocks = arrays["blocks"][row["step"], [1, 3].index(row["layer"]), row["head"]]
        length = PROMPT + row["step"]
        assert row["positions"] == [p for p in range(length) if p // block_size in blocks]
    assert {row["head"] for row in rows(trace, "supports")} == {0, 1}


@cache
def attended():
    model = tiny("llama")
    model.set_attn_implementation("eager")
    (prompt,) = prompts(PROMPT)
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, output_attentions=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    model.set_attn_implementation("sdpa")
    return out.sequences[0], out.attentions, prompt


@cache
def audited(folder: Path) -> Trace:
    config = SfiConfig(trigger_token_ids=(5, 50))
    with ParquetObserver(folder) as observer:
        sfi_core.generate(
            tiny("llama"), None, prompts(PROMPT), config, policy="full-kv", max_new_tokens=NEW,
            observers=[observer], audit=AuditConfig(top=TOP), stop_token_ids=(),
        )  # fmt: skip
    return Trace.open(folder)


def save(path: Path, **changes) -> Path:
    sequence, attentions, _ = attended()
    document = {
        "sfi_import_version": 1, "attentions": attentions, "token_ids": sequence[PROMPT:],
        "prompt_token_ids": sequence[:PROMPT], "trigger_token_ids": torch.tensor([5, 50]), "kv_heads": 2,
    } | changes  # fmt: skip
    torch.save(document, path)
    return path


def test_attention_of_transformers_is_what_our_audit_records(tmp_path):
    path = save(tmp_path / "a.pt")
    import_trace(path, tmp_path / "a", top=TOP)
    trace, ours = Trace.open(tmp_path / "a"), audited(tmp_path / "ours")
    for name in ("prompts", "steps", "supports"):
        imported, expected = rows(trace, name), rows(ours, name)
        assert len(imported) == len(expected) > 0
        for row, other in zip(imported, expected, strict=True):
            for column in ("step", "layer", "head", "token_id", "context_tokens", "sentence", "positions",
                           "position", "attended_tokens", "trigger", "slow", "audited"):  # fmt: skip
                assert row.get(column) == other.get(column), column
            for column in ("mass", "retained_mass", "overlap_previous_step", "overlap_last_refresh"):
                assert row.get(column) == pytest.approx(other.get(column), abs=1e-5), column
    assert trace.manifest["prompts"] == ours.manifest["prompts"]
    assert check(trace)["problems"] == []
    summaries = [summarize(recording) for recording in (trace, ours)]
    assert summaries[0]["drift"] == summaries[1]["drift"]
    assert not rows(trace, "selections")


def test_one_forward_pass_over_all_tokens_gives_the_same_supports(tmp_path):
    """Its last query has generated nothing, and those before the prompt's last one are left out."""
    sequence, _, _ = attended()
    model = tiny("llama")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(sequence[None], output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    import_trace(save(tmp_path / "a.pt", attentions=attentions), tmp_path / "a", top=TOP)
    import_trace(save(tmp_path / "b.pt"), tmp_path / "b", top=TOP)
    whole, other = (rows(Trace.open(tmp_path / name), "supports") for name in ("a", "b"))
    assert [row["positions"] for row in whole] == [row["positions"] for row in other]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_ids": torch.arange(NEW + 1)}, f"must reach the {NEW + 1} steps of token_ids, got {NEW}"),
        ({"token_ids": torch.arange(NEW - 1)}, f"must end with the {NEW - 1} steps of token_ids"),
        ({"attentions": [0, 1, 2, 4]}, "must have step 3, the query at position 42, got pass 3 at 43"),
        ({"kv_heads": 3}, "kv_heads .* must divide the 4 query heads, got 3"),
        ({"positions": torch.zeros(1)}, "unknown array 'positions'"),
        ({"attentions": []}, 'attn_implementation="eager"'),
    ],
)
def test_attention_that_disagrees_with_its_tokens_is_refused(tmp_path, changes, words):
    if "attentions" in changes:  # passes are missing
        changes = {"attentions": [attended()[1][number] for number in changes["attentions"]]}
    with pytest.raises(InputError, match=words):
        import_trace(save(tmp_path / "a.pt", **changes), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_of_the_prompt_s_attention_one_query_is_converted(tmp_path, monkeypatch):
    read, whole = [], attention.plain

    def counted(value):
        if isinstance(value, torch.Tensor) and value.ndim == 4:
            read.append(value.shape[2])
        return whole(value)

    monkeypatch.setattr(attention, "plain", counted)
    import_trace(save(tmp_path / "a.pt"), tmp_path / "a")
    assert attended()[1][0][0].shape[2] > 1
    assert set(read) == {1}


def test_attention_of_another_shape_or_no_probabilities_is_refused(tmp_path):
    _, attentions, _ = attended()
    cut = tuple((first, second[..., 1:]) for first, second in attentions)
    with pytest.raises(InputError, match=r"attention.0.1 .* leave out layers with a sliding window"):
        import_trace(save(tmp_path / "a.pt", attentions=cut), tmp_path / "a")
    fewer = (*attentions[:3], attentions[3][:1], *attentions[4:])
    with pytest.raises(InputError, match="must have 2 layers in every pass, got 1 in pass 3"):
        import_trace(save(tmp_path / "c.pt", attentions=fewer), tmp_path / "a")
    doubled = tuple((first, 2 * second) for first, second in attentions)
    with pytest.raises(InputError, match=r"attention.0.1 .* KV head 0 .* got a sum of 2"):
        import_trace(save(tmp_path / "b.pt", attentions=doubled), tmp_path / "a")
