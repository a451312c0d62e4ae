"""Requests whose prompts begin alike have that beginning in one place, and get what they get with copies."""

from typing import Any

import pytest
import torch

import sfi_core
from sfi_core import EngineOptions, PromptCache
from sfi_core.errors import MemoryForecastError
from sfi_core.generation import batch_plan
from sfi_core.generation import generate as generation
from sfi_core.generation.batch_plan import BatchPlan
from sfi_core.hosts.transformers import session
from sfi_core.hosts.transformers.known_prompt import KnownPrompt
from sfi_core.state.kv_cache import KVCache
from tests.architectures import SMALL, prompts, tiny
from tests.covering import first
from tests.fake_graph import FakeRecorder, use_tensors
from tests.fakes import Listener, positions

pytestmark = [pytest.mark.seam, pytest.mark.usefixtures("poisoned_memory")]

DOCUMENT, LONG, *QUESTIONS = prompts(60, 330, 20, 9, 14, 7, 5)
EQUAL = prompts(*[12] * 5)
NEW, PAGE = 7, 16
DRAFTS = EngineOptions(lossless=True)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[KVCache]:
    """The stores of the runs; the first read what the prompts begin with."""
    stores: list[KVCache] = []
    monkeypatch.setattr(generation, "BEGINNING", 40)
    monkeypatch.setattr(
        session, "KVCache", lambda *args, **options: stores.append(KVCache(*args, **options)) or stores[-1]
    )
    return stores


def ask(document: list[int] = DOCUMENT, model: Any = None, questions: Any = QUESTIONS, **options: Any) -> tuple:
    """Ask five questions, two at a time if not said otherwise; return the result, and what an observer saw."""
    seen, rows = Listener(), [[*document, *question] for question in questions]
    given = {"policy": "sfi", "page_size": PAGE, "max_batch": 2, "max_new_tokens": NEW, "stop_token_ids": (), **options}
    result = sfi_core.generate(model or tiny("qwen3"), None, rows, SMALL, observers=[seen], **given)
    steps = [(e.request, e.step, e.token_id, e.reason, e.attended_tokens, e.context_tokens) for e in seen.steps]
    chosen = {(e.request, e.layer, e.step): positions(e.index_HK) for e in seen.selections}
    return result, (steps, chosen, [(e.requests, e.count) for e in seen.prompts])


@pytest.mark.parametrize(
    ("document", "shared", "options"),
    first(
        [
            (DOCUMENT, 32, {}),
            (LONG, 64, {"policy": "codescan"}),
            (DOCUMENT, 32, {"engine": DRAFTS}),
            (LONG, 256, {"page_size": None, "max_batch": None}),
            (DOCUMENT, 48, {"model": "gpt-oss", "questions": EQUAL}),
            (DOCUMENT, 32, {"policy": "quest"}),
            (DOCUMENT, 32, {"policy": "full-kv"}),
            (DOCUMENT, 32, {"policy": "freekv"}),
            (LONG, 64, {"policy": "codescan", "engine": DRAFTS}),
            (DOCUMENT, 32, {"engine": EngineOptions(prefill_chunk=8)}),
        ],
        5,
    ),
)
def test_they_get_what_they_get_with_copies(
    document: list[int], shared: int, options: dict[str, Any], stores: list[KVCache], monkeypatch: pytest.MonkeyPatch
):
    """Five requests take turns in two rows; what is stored once is stored once in the forecast, too."""
    options = {**options, "model": tiny(options.get("model", "qwen3"))}
    result, heard = ask(document, **options)
    store = stores[-1]
    assert store.shared == shared
    pages = store.layers[max(store.layers)].key_PHND
    assert pages.shape[0] * pages.shape[2] == store.batch * (store.capacity - shared) + shared
    kv_bytes = sum(tensor.nbytes for layer in store.layers.values() for tensor in layer.tensors[:2])
    assert result.forecast.kv_bytes == kv_bytes
    monkeypatch.setattr(generation, "common_tokens", lambda *_: 0)
    apart, expected = ask(document, **options)
    assert stores[-1].shared == 0
    assert result.report.requests == apart.report.requests
    assert heard == expected


@pytest.mark.parametrize("policy", first(["sfi", "codescan"]))
@pytest.mark.skipif(torch.cuda.is_available(), reason="on CPU tensors")
def test_they_do_under_graphs(policy: str, stores: list[KVCache], monkeypatch: pytest.MonkeyPatch):
    """Replayed steps have the block table at one address; a request that joins changes nothing in it."""
    FakeRecorder().install(monkeypatch)
    use_tensors(monkeypatch)
    options = {"document": LONG, "policy": policy, "engine": EngineOptions(backend="triton", graphs=True)}
    result, heard = ask(**options)
    assert stores[-1].shared == {"sfi": 304, "codescan": 64}[policy]
    assert result.report.paths["graph.replay"] > NEW
    monkeypatch.setattr(generation, "common_tokens", lambda *_: 0)
    apart, expected = ask(**options)
    assert result.report.requests == apart.report.requests
    assert heard == expected


@pytest.mark.exhaustive
def test_the_kernels_read_shared_pages(stores: list[KVCache]):
    """In the interpreter, where there is no GPU; with the tokens of the references."""
    pytest.importorskip("triton")
    few = {"questions": QUESTIONS[:3], "max_new_tokens": 3}
    engines = [EngineOptions(backend=name, graphs=False) for name in ("triton", "torch")]
    kernels, references = (ask(engine=engine, **few)[0] for engine in engines)
    assert stores[1].shared == 48
    assert [r.token_ids for r in kernels.report.requests] == [r.token_ids for r in references.report.requests]


def test_what_moved_into_the_pages_is_nowhere_else(monkeypatch: pytest.MonkeyPatch, stores: list[KVCache]):
    """The prompt cache of the run's own keeps what the last shared page lacks; one that was passed on keeps all."""
    given: list[PromptCache] = []
    begin = KnownPrompt.begin
    monkeypatch.setattr(KnownPrompt, "begin", lambda self, ids: given.append(self._known) or begin(self, ids))
    ask()
    assert {key.shape[2] for key, _ in given[-1].layers.values()} == {60 - 32}
    cache = PromptCache()
    sfi_core.generate(tiny("qwen3"), None, DOCUMENT, SMALL, max_new_tokens=1, cache=cache)
    _, heard = ask(cache=cache)
    assert stores[-1].shared == 32
    assert {key.shape[2] for key, _ in cache.layers.values()} == {60}
    assert heard[0] == ask()[1][0]


def test_a_batch_is_admitted_that_fits_because_of_them(monkeypatch: pytest.MonkeyPatch, stores: list[KVCache]):
    plans: list[BatchPlan] = []
    options = {"document": LONG, "max_batch": 5, "on_plan": plans.append}
    ask(**options)
    (plan,) = plans
    monkeypatch.setattr(batch_plan, "free_bytes", lambda _: plan.forecast.needed_bytes)
    ask(**options)
    monkeypatch.setattr(generation, "common_tokens", lambda *_: 0)
    monkeypatch.setattr("sfi_core.sizes.memory.free_bytes", lambda _: plan.forecast.needed_bytes)
    with pytest.raises(MemoryForecastError, match="the run must fit "):
        ask(**options)
