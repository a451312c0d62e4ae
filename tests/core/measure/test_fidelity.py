"""Teacher forcing, how far a policy's predictions are from full attention's, and the grid of text windows."""

import copy
import math

import pytest
import torch

from sfi_core import SfiConfig, read_prompt
from sfi_core.engine.report import RequestReport
from sfi_core.errors import ConfigError, InputError, NumericsError
from sfi_core.measure.evaluation import fidelity as measured
from sfi_core.measure.evaluation.grid import Method, at_sizes, key_of
from sfi_core.measure.evaluation.teacher_forcing import teacher_force
from sfi_core.settings.engine import EngineOptions

PROMPT, NEW = 40, 25
DOT = 5  # ends a sentence
SMALL = SfiConfig(slow_start=1, span=0, sink=2, recent=4, budget=4, window_prefill=4).replace(
    t_max=6, min_gap=2, trigger_token_ids=(DOT,)
)


@pytest.fixture(scope="module")
def window():
    ids = torch.randint(10, 96, (PROMPT + NEW,), generator=torch.Generator().manual_seed(3))
    for place in (7, 30, PROMPT + 4, PROMPT + 13):
        ids[place] = DOT
    return measured.Window(start=11, prompt_tokens=PROMPT, ids=tuple(ids.tolist()))


@pytest.fixture(scope="module")
def full(tiny_model, window):
    return measured.reference(tiny_model, None, [window])


def forced(model, window, config=SMALL, **options):
    """Decode a window; return its logits, [S, V], and the report."""
    rows = []

    def keep(step, logits_1V):
        rows.append((step, logits_1V[0]))

    report = teacher_force(model, None, [window.ids], PROMPT, keep, config, **options)
    assert [step for step, _ in rows] == list(range(NEW))
    return torch.stack([logits for _, logits in rows]), report


def test_forced_logits_under_full_attention_are_the_plain_models(tiny_model, window):
    logits, _ = forced(tiny_model, window, policy="full-kv")
    with torch.no_grad():
        plain = tiny_model(torch.tensor([window.ids])).logits[0, PROMPT - 1 : -1]
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, plain, atol=1e-4, rtol=1e-4)


def test_a_shared_prompt_is_not_read_again_and_changes_nothing(tiny_model, window):
    shared = read_prompt(tiny_model, None, [window.ids[:PROMPT]], capacity=PROMPT + NEW)
    alone, report = forced(tiny_model, window)
    passes = []
    with tiny_model.model.embed_tokens.register_forward_hook(lambda _, args, out: passes.append(args[0].shape[1])):
        logits, again = forced(tiny_model, window, shared=shared)
    torch.testing.assert_close(logits, alone, atol=0, rtol=0)
    assert again.requests == report.requests
    assert passes.count(1) == NEW - 1
    assert PROMPT not in passes


def test_the_model_is_itself_again_after_broken_logits(tiny_model, window):
    broken = copy.deepcopy(tiny_model)
    broken.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(NumericsError, match="logits must be finite, got NaN or infinity at step 0"):
        forced(broken, window)
    assert broken.config._attn_implementation == "sdpa"  # noqa: SLF001


@pytest.mark.parametrize("prompt_tokens", [0, 65, 70])
def test_a_prompt_that_leaves_nothing_to_decode_is_refused(tiny_model, window, prompt_tokens):
    with pytest.raises(ConfigError, match=f"prompt_tokens must be .* got {prompt_tokens}"):
        teacher_force(tiny_model, None, [window.ids], prompt_tokens, print, SMALL)


def test_a_text_longer_than_the_models_positions_is_refused(tiny_model):
    with pytest.raises(InputError, match="must fit the model's 1024 positions, got 1025"):
        teacher_force(tiny_model, None, [[7] * 1026], 4, print, SMALL)


@pytest.mark.parametrize("graphs", [None, False])
def test_full_attention_is_exactly_as_far_from_itself_as_nothing(tiny_model, window, graphs):
    model, engine = copy.deepcopy(tiny_model).bfloat16(), EngineOptions(graphs=graphs)  # compiled, or by modules
    full = measured.reference(model, None, [window], engine)
    (fidelity,) = measured.fidelity(model, None, full, SMALL, policy="full-kv", engine=engine)
    assert fidelity.kl == [0.0] * NEW
    assert fidelity.agrees == [True] * NEW
    assert fidelity.nll == fidelity.nll_full
    summary = fidelity.summary()
    assert summary["perplexity"] == summary["perplexity_full"]
    assert summary["read_ratio"] == summary["slow_rate"] == 1


def test_a_policy_whose_every_step_is_slow_is_full_attention(tiny_model, full):
    (fidelity,) = measured.fidelity(tiny_model, None, full, SMALL.replace(trigger_policy="always"))
    # where a step selects, its attention sums in another order
    assert fidelity.kl == pytest.approx([0.0] * NEW, abs=1e-6)
    assert fidelity.agrees == [True] * NEW
    assert all(fidelity.slow)


def test_divergence_and_likelihood_are_those_of_the_logits(tiny_model, window, full):
    logits, _ = forced(tiny_model, window, policy="streaming-llm")
    plain, _ = forced(tiny_model, window, policy="full-kv")
    q, p = logits.double().softmax(-1), plain.double().softmax(-1)
    (fidelity,) = measured.fidelity(tiny_model, None, full, SMALL, policy="streaming-llm")
    assert fidelity.kl == pytest.approx((p * (p / q).log()).sum(-1).tolist(), abs=1e-5)
    given = torch.tensor(window.ids[PROMPT:])[:, None]
    assert fidelity.nll == pytest.approx((-q.gather(1, given).log())[:, 0].tolist(), abs=1e-4)
    assert fidelity.nll_full == pytest.approx((-p.gather(1, given).log())[:, 0].tolist(), abs=1e-4)
    assert fidelity.agrees == (p.argmax(-1) == q.argmax(-1)).tolist()
    assert fidelity.window == [11] * NEW


def report_of(read_ratio):
    zeros = ("slow_steps", "fast_steps", "mean_attended_tokens", "selection_ratio")
    rest = {"prompt_tokens": 1, "token_ids": [], "finish_reason": "length", "slow_at": []}
    ratios = {"read_ratio": read_ratio, "stored_ratio": 1.0, "reasons": {}}
    return RequestReport(**dict.fromkeys(zeros, 0), **rest, **ratios)


def made(read_ratio=0.5, kl=(9.0, 1.0, 3.0, 5.0)):
    return measured.Fidelity(
        window=[0] * 4, step=[0, 1, 2, 3], slow=[True, True, False, False], kl=list(kl),
        agrees=[True, True, False, True], nll=[9.0, 1.0, 2.0, 3.0], nll_full=[9.0, 1.0, 1.0, 1.0],
        reports=[report_of(read_ratio)],
    )  # fmt: skip


def test_a_summary_leaves_out_step_0_which_no_policy_touches():
    joined = measured.Fidelity.join([made(0.2), made(0.4)])
    assert joined.summary() == {
        "windows": 2, "steps": 6, "slow_rate": pytest.approx(1 / 3), "kl": 3.0, "agreement": pytest.approx(2 / 3),
        "perplexity": pytest.approx(math.e**2), "perplexity_full": pytest.approx(math.e), "kl_p95": 5.0,
        "read_ratio": pytest.approx(0.3), "selection_ratio": 0.0, "stored_ratio": 1.0,
    }  # fmt: skip


def test_windows_are_spread_over_the_whole_text():
    windows = measured.windows(range(100), 10, 5, 4)
    assert [window.start for window in windows] == [0, 28, 57, 85]
    assert windows[-1].ids == tuple(range(85, 100))
    assert {window.prompt_tokens for window in windows} == {10}
    assert measured.windows(range(15), 10, 5, 1)[0].ids == tuple(range(15))


def test_a_text_that_is_too_short_is_refused_with_what_it_needs():
    with pytest.raises(InputError, match=r"at least 18 tokens for 4 windows .* got 17"):
        measured.windows(range(17), 10, 5, 4)
    assert len(measured.windows(range(18), 10, 5, 4)) == 4
    with pytest.raises(InputError, match="text must have"):
        measured.windows([], 10, 5, 1)


def test_the_start_token_is_told_from_the_text(tiny_tokenizer):
    ids, prefix = measured.ids_and_prefix(tiny_tokenizer, "Belora hid it. Tamvex")
    assert prefix == [tiny_tokenizer.bos_token_id]
    assert [*prefix, *ids] == tiny_tokenizer("Belora hid it. Tamvex")["input_ids"]


TEXT = "Belora hid a red lantern under the old bridge. Tamvex stole a blue kettle near the mill. " * 8


def grid_of(loaded, *methods, shares=(0.3, 0.5), lengths=(40, 60), text=TEXT, tokens=12, count=2):
    sized = at_sizes(list(map(Method.parse, methods)), shares=shares)
    cells = measured.window_cells(sized, lengths, count, tokens)
    return cells, measured.WindowRows(*loaded, text=text, tokens=tokens, count=count)


def test_a_window_is_compared_as_on_its_own(loaded):
    cells, rows_of = grid_of(loaded, "full-kv", "sfi", "streaming-llm")
    rows_of.check(cells)
    rows = list(rows_of.make(cells))
    assert list(map(key_of, rows)) == [cell.key for cell in cells]
    assert len(rows) == 2 * 2 * 2 * 2  # windows, lengths, methods but full attention, shares
    assert [cell.length for cell in cells[::4]] == [40, 60, 40, 60]
    for row, cell in zip(rows[:4], cells, strict=False):
        window = rows_of.windows(40)[0]
        full = measured.reference(*loaded, [window])
        (fidelity,) = measured.fidelity(*loaded, full, cell.method.config_for(40), policy=cell.method.policy)
        assert measured.from_rows([row]) == fidelity
    joined = measured.from_rows(rows[::4])
    assert joined == measured.Fidelity.join(measured.from_rows([row]) for row in rows[::4])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"methods": ("full-kv",)}, ConfigError, "fidelity must have a method besides full-kv"),
        ({"tokens": 1}, ConfigError, "tokens must be at least 2, got 1"),
        ({"count": 0}, ConfigError, "windows must be at least 1, got 0"),
        ({"methods": ("a=sfi", "a=quest")}, ConfigError, "each method must differ, got a, a"),
        ({"lengths": (400,)}, InputError, "text must have at least"),
        ({"lengths": (1020,), "text": TEXT * 20}, InputError,
         "fidelity of length 1020 must fit the model's 1024 positions, got 1020 prompt and 12 new tokens"),
        ({"shares": (0.1,)}, ConfigError, "share must leave a selected token"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused_at_once(loaded, changes, error, message):
    methods = changes.pop("methods", ("sfi",))

    def check():
        cells, rows = grid_of(loaded, *methods, **changes)
        rows.check(cells)

    with pytest.raises(error, match=message):
        check()
