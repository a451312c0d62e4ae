"""The contract with transformers, over the architectures of `tests/architectures.py`."""

from functools import cache

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

from sfi_core import AuditConfig, EngineOptions, generate, slow_fast
from sfi_core.errors import UnsupportedModelError
from sfi_core.hosts.transformers.checks import check_supported
from tests.architectures import BY_LABEL, PAGE, REFUSED, SMALL, WORKS, padded, page, prompts, tiny
from tests.covering import each_value
from tests.fakes import RecordingObserver

pytestmark = pytest.mark.seam

WORKING = [architecture.label for architecture in WORKS]
HANDFUL = ["qwen3", "gemma-2", "gpt-oss", "deepseek-v3", "llama"]
LENGTHS = {1: (37,), 2: (9, 37), 3: (24, 37, 9), 4: (37, 9, 16, 24)}
STEPS = 8
WHOLE = SMALL.replace(sink=4, budget=1000)
ONE = WHOLE.replace(budget=1)
EVERY_STEP = {
    "policy always": ("sfi", ONE.replace(trigger_policy="always")),
    "t_max 0": ("sfi", ONE.replace(t_max=0, trigger_token_ids=())),
    "whole vocabulary": ("sfi", ONE.replace(trigger_delay=0, trigger_token_ids=tuple(range(300)))),
    "full-kv": ("full-kv", SMALL),
}


def complete(model, rows, **options):
    """Run transformers' own `generate`; return the new tokens of each row."""
    greedy = {"do_sample": False, "max_new_tokens": STEPS}
    batch = padded(rows)
    output = model.generate(**batch, **{**greedy, **options})
    return output[:, batch["input_ids"].shape[1] :].tolist()


@cache
def reference(label, batch):
    """Full attention's greedy tokens, which vary; none is nearly tied, so that rounding changes no token."""
    rows = padded(prompts(*LENGTHS[batch]))
    output = tiny(label).generate(
        **rows, max_new_tokens=STEPS, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    best = torch.stack(output.logits).topk(2).values
    tokens = output.sequences[:, rows["input_ids"].shape[1] :].tolist()
    assert (best[..., 0] - best[..., 1]).min() > 1e-4
    assert len({token for row in tokens for token in row}) > STEPS // 2
    return tokens


def under_sfi(label, rows, config, *, policy="sfi", page_size=None, **options):
    model = tiny(label)
    with slow_fast(model, None, config, policy=policy, page_size=page_size) as session:
        tokens = complete(model, rows, **options)
    return tokens, session.report


def own_loop(label, rows, config, **options):
    """Run `sfi_core.generate`; return the tokens of each request."""
    result = generate(tiny(label), None, rows, config, stop_token_ids=(), **{"max_new_tokens": STEPS, **options})
    return [request.token_ids for request in result.report.requests], result.report


@pytest.mark.parametrize(("label", "batch"), each_value(WORKING, LENGTHS))
def test_anchored_budget_over_all_positions_gives_full_attentions_tokens(label, batch):
    rows = prompts(*LENGTHS[batch])
    tokens, report = under_sfi(label, rows, WHOLE)
    assert tokens == reference(label, batch) == [r.token_ids for r in report.requests]
    assert [r.prompt_tokens for r in report.requests] == [len(row) for row in rows]
    assert all(r.slow_steps > 1 and r.fast_steps > 0 for r in report.requests)
    assert any(path.endswith(".sparse_attention") for path in report.paths)


@pytest.mark.parametrize(("label", "rule"), each_value(WORKING, EVERY_STEP))
def test_slow_step_every_time_gives_full_attentions_tokens(label, rule):
    policy, config = EVERY_STEP[rule]
    tokens, report = under_sfi(label, prompts(*LENGTHS[3]), config, policy=policy)
    assert tokens == reference(label, 3)
    assert not any(path.endswith(".sparse_attention") for path in report.paths)
    assert [(r.fast_steps, r.read_ratio) for r in report.requests] == [(0, 1)] * 3


@pytest.mark.parametrize("label", HANDFUL)
def test_small_budget_reads_less_and_moves_the_logits(label):
    batch = padded(prompts(37))
    options = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 2}
    dense = tiny(label).generate(**batch, **options).logits[1]
    with slow_fast(tiny(label), None, SMALL) as session:
        sparse = tiny(label).generate(**batch, **options).logits[1]
    assert session.report.requests[0].read_ratio < 0.5
    assert (dense - sparse).abs().max() > 1e-3


@pytest.mark.parametrize("label", HANDFUL)
def test_own_loop_gives_the_tokens_and_slow_steps_of_transformers_generate(label):
    rows = prompts(*LENGTHS[4])
    (ids, ours), (expected, theirs) = own_loop(label, rows, SMALL), under_sfi(label, rows, SMALL)
    assert ids == expected
    assert ours.requests == theirs.requests
    assert ours.paths == theirs.paths


@pytest.mark.parametrize(("label", "chunk"), each_value(HANDFUL, [5, 12, 16, 64]))
def test_pieces_of_a_prompt_and_pages_change_nothing(label, chunk):
    """With 37 tokens and a window of 8 queries the last piece is 2, 1, 5 or 37 tokens long."""
    rows, engine = prompts(*LENGTHS[4]), EngineOptions(prefill_chunk=chunk)
    whole, pieces = own_loop(label, rows, SMALL)[1], own_loop(label, rows, SMALL, page_size=16, engine=engine)[1]
    assert pieces.requests == whole.requests


@pytest.mark.parametrize(("label", "chunk"), each_value(HANDFUL, [5, 12, 16]))
def test_transformers_prefill_chunks_give_the_tokens_of_one_piece(label, chunk):
    rows = prompts(*LENGTHS[3])
    _, whole = under_sfi(label, rows, SMALL)
    _, pieces = under_sfi(label, rows, SMALL, prefill_chunk_size=chunk)
    assert pieces.requests == whole.requests


def traces_of_sfi(model):
    hooks = [*model._forward_pre_hooks, *model._forward_hooks]  # noqa: SLF001
    methods = [name for name in ("generate", "forward") if name in model.__dict__]
    return model.config._attn_implementation, [*hooks, *methods]  # noqa: SLF001


@pytest.mark.parametrize("label", ["qwen3", "gpt-oss"])
def test_model_is_restored_on_exit_and_after_an_exception(label):
    model = tiny(label)

    def break_the_second_layer(module, args):
        raise ZeroDivisionError

    hook = model.model.layers[1].register_forward_pre_hook(break_the_second_layer)
    with hook, pytest.raises(ZeroDivisionError), slow_fast(model, None, SMALL):
        complete(model, prompts(9))
    with slow_fast(model, None, SMALL):
        name, left = traces_of_sfi(model)
        assert (name, len(left)) == ("sfi", 4)
        complete(model, prompts(*LENGTHS[2]))
    assert traces_of_sfi(model) == ("eager" if BY_LABEL[label].eager else "sdpa", [])
    assert complete(model, prompts(*LENGTHS[2])) == reference(label, 2)


@pytest.mark.parametrize("architecture", REFUSED, ids=lambda a: a.label)
def test_architecture_is_refused_with_its_name_and_the_reason(architecture):
    if architecture.model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {architecture.model_type}")
    model = architecture.build()
    before = traces_of_sfi(model)
    with pytest.raises(UnsupportedModelError) as refusal, slow_fast(model, None, SMALL):
        pass
    assert str(refusal.value) == architecture.refusal
    assert traces_of_sfi(model) == before


def test_a_sparse_model_is_refused_whatever_its_cache_looks_like():
    """A checkpoint's own code may keep plain keys, and a release of transformers may."""

    class OwnIndexer(torch.nn.Module):
        pass

    model = BY_LABEL["llama"].build()
    model.model.layers[1].self_attn.indexer = OwnIndexer()
    with pytest.raises(UnsupportedModelError, match="natively sparse: its OwnIndexer already"):
        check_supported(model)


def test_page_lists_the_architectures():
    """`python tests/architectures.py --write` writes it anew."""
    assert PAGE.read_text(encoding="utf-8") == page()


EVEN = {"heads": "even", "stride": 3}
PAGES = {"page": 4, "tau": 0.3, "first_layer_dense": False}
WAYS = {
    "freekv": ("freekv", {"freekv": PAGES}),
    "codescan": ("codescan", {}),
    "synckv": ("synckv", {"synckv": EVEN}),
    "synckv sparse": ("synckv", {"synckv": {**EVEN, "suspension": "sparse"}}),
}
CASES = each_value(HANDFUL, WAYS)


def run(label: str, way: str, rows: list[list[int]], config=SMALL, **options):
    """Run our own loop on the torch backend; return the report's requests."""
    policy, change = WAYS[way]
    return generate(
        tiny(label), None, rows, config.replace(**change), policy=policy, stop_token_ids=(),
        **{"max_new_tokens": STEPS, **options},
    ).report.requests  # fmt: skip


@pytest.mark.parametrize(("label", "way"), CASES)
def test_a_budget_of_all_positions_gives_full_attentions_tokens(label: str, way: str):
    """Requests with a sink and a recent window only, too: one more token leaves each step."""
    requests = run(label, way, prompts(*LENGTHS[3]), WHOLE)
    assert [request.token_ids for request in requests] == reference(label, 3)


@pytest.mark.parametrize(("way", "length"), each_value(WAYS, [10, 1, 9, 11, 3]))
def test_a_budget_of_all_positions_does_however_short_the_prompt(way: str, length: int):
    """Of 10 tokens all are sink or recent, and the first leaves the window in step 1."""
    row, config = prompts(length), WHOLE.replace(sink=4, recent=6)
    full = generate(
        tiny("llama"), None, row, config, policy="full-kv", max_new_tokens=STEPS, stop_token_ids=()
    ).report.requests
    assert run("llama", way, row, config)[0].token_ids == full[0].token_ids


@pytest.mark.parametrize(("label", "way"), CASES)
def test_a_row_of_a_ragged_batch_equals_the_row_alone(label: str, way: str):
    rows = prompts(*LENGTHS[4])
    together = run(label, way, rows)
    assert together == [run(label, way, [row])[0] for row in rows]
    assert min(request.read_ratio for request in together) < 1


@pytest.mark.parametrize("way", WAYS)
def test_chunks_pages_and_places_change_nothing(way: str):
    rows = prompts(9, 37, 3, 24)
    limits = [7, 3, 12, 5]
    expected = run("gemma-2", way, rows, max_new_tokens=limits)
    pieces = {"engine": EngineOptions(prefill_chunk=5)}
    for options in (pieces, {"max_batch": 2}, {"max_batch": 3, "page_size": 16}):
        assert run("gemma-2", way, rows, max_new_tokens=limits, **options) == expected, options


@pytest.mark.parametrize("way", WAYS)
def test_heads_change_what_is_read(way: str):
    assert run("llama", way, prompts(37))[0].read_ratio < 0.9


@pytest.mark.parametrize("way", WAYS)
def test_an_audit_changes_nothing_and_sees_heads_that_read_everything(way: str):
    """A head that has read everything keeps all of its attention; others lose some."""
    rows, observer = prompts(37, 9), RecordingObserver()
    audited = run("qwen3", way, rows, observers=[observer], audit=AuditConfig(every=1, top=5))
    assert audited == run("qwen3", way, rows)
    retained = [event.retained_H.tolist() for event in observer.audits if event.step > 0]
    assert any(share < 0.99 for heads in retained for share in heads)
    if way != "freekv":  # whose heads differ in what they select, not in how much they read
        assert any((heads[0] == 1.0) != (heads[1] == 1.0) for heads in retained)
