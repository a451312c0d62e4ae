"""A prompt read once gives every policy what it would have read itself."""

import pytest
import torch

import sfi_core
from sfi_core import AuditConfig, EngineOptions, SfiConfig, read_prompt
from sfi_core.errors import ConfigError
from sfi_core.policies import POLICIES
from sfi_core.settings.config import SyncKVConfig
from tests.architectures import tiny
from tests.covering import first
from tests.fakes import RecordingObserver

pytestmark = pytest.mark.usefixtures("poisoned_memory")
PROMPTS = [list(range(40, 90)), [7, 8], list(range(20))]
NEW = 20
CONFIG = SfiConfig(
    slow_start=1, min_gap=0, span=0,
    sink=3, recent=6, budget=5, t_max=4, stride=5, window_prefill=4,
    trigger_token_ids=tuple(range(0, 96, 5)), synckv=SyncKVConfig(heads="even"),
)  # fmt: skip
CAPACITY = 50 + NEW


def complete(model, policy: str, shared=None, **options):
    return sfi_core.generate(
        model, None, options.pop("prompts", PROMPTS), options.pop("config", CONFIG), policy=policy,
        max_new_tokens=NEW, stop_token_ids=(), shared=shared, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def shared(tiny_model):
    return read_prompt(tiny_model, None, PROMPTS, capacity=CAPACITY, engine=EngineOptions(prefill_chunk=16))


@pytest.mark.parametrize("policy", first(POLICIES, 4))
def test_every_policy_runs_as_if_it_had_read_the_prompt(tiny_model, shared, policy: str):
    """Twice, so that a run that spoils the prompt for the next would show."""
    expected = complete(tiny_model, policy, engine=EngineOptions(prefill_chunk=16)).report.requests
    for _ in range(2):
        assert complete(tiny_model, policy, shared).report.requests == expected


def test_the_observers_and_the_audit_see_the_same_run(tiny_model, shared):
    seen = []
    for begin in (None, shared):
        observer = RecordingObserver()
        complete(tiny_model, "sfi", begin, observers=[observer], audit=AuditConfig(every=1, top=8))
        assert [event.step for event in observer.audits][:1] == [0]
        seen.append(observer)
    plain, other = seen
    assert [event.token_id for event in plain.steps] == [event.token_id for event in other.steps]
    assert len(plain.audits) == len(other.audits)
    pairs = zip([*plain.audits, *plain.selections], [*other.audits, *other.selections], strict=True)
    assert all(torch.equal(left.index_HK, right.index_HK) for left, right in pairs)


@pytest.mark.parametrize("label", first(["gemma-2", "deepseek-v3", "gpt-oss", "lfm2", "gemma-3n"], 2))
def test_sliding_layers_states_soft_caps_sinks_and_latents_come_along(label: str):
    model = tiny(label)
    rows = [list(range(5, 45)), list(range(9))]
    prompt = read_prompt(model, None, rows, capacity=40 + NEW)
    for policy in ("sfi", "snapkv"):
        expected = complete(model, policy, prompts=rows).report.requests
        assert complete(model, policy, prompt, prompts=rows).report.requests == expected


@pytest.mark.parametrize("options", [{"page_size": 16}, {"engine": EngineOptions(kv_dtype="float16")}])
def test_a_run_has_its_own_pages_and_dtype(tiny_model, shared, options):
    expected = complete(tiny_model, "sfi", **options).report.requests
    assert complete(tiny_model, "sfi", shared, **options).report.requests == expected


def test_the_time_of_the_dense_pass_counts(tiny_model, shared):
    report = complete(tiny_model, "sfi", shared).report
    assert report.prefill_seconds > shared.seconds > 0


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1, 2, 3]], {}, "shared must be of the same prompts, got others"),
        (PROMPTS, {"max_new_tokens": 21}, "shared must be read with a capacity of 71 tokens, got 70"),
    ],
)
def test_what_does_not_fit_is_refused(tiny_model, shared, prompts, options, message):
    arguments = {"max_new_tokens": NEW, "stop_token_ids": (), **options}
    with pytest.raises(ConfigError) as caught:
        sfi_core.generate(tiny_model, None, prompts, CONFIG, shared=shared, **arguments)
    assert str(caught.value).startswith(message)


def test_queries_that_were_not_kept_are_missed(tiny_model):
    short = read_prompt(tiny_model, None, PROMPTS, capacity=CAPACITY, window=3)
    with pytest.raises(ConfigError, match="window must keep 4 queries of the prompt, got 3"):
        complete(tiny_model, "sfi", short)
    expected = complete(tiny_model, "snapkv", config=CONFIG.replace(window_prefill=3)).report.requests
    config = CONFIG.replace(window_prefill=3)
    assert complete(tiny_model, "snapkv", short, config=config).report.requests == expected
