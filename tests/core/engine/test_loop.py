"""Algorithm 1 on a model whose tokens are written down, and what observers are told of a run."""

import pytest
import torch

import sfi_core
from sfi_core import EngineOptions, NullObserver, Sampling, SfiConfig, slow_fast
from sfi_core.engine.loop import Loop
from sfi_core.generation.sampling import Sampler
from sfi_core.hosts.transformers.cache import CACHE_NAME
from sfi_core.models.describe import describe_model
from sfi_core.state.request import RequestState
from tests.architectures import padded, tiny
from tests.core.conftest import tiny_qwen3
from tests.fakes import RecordingObserver

VOCABULARY = 100


class ScriptedHost:
    """A host that is its own run; token t of request b is `script[b][t]`."""

    def __init__(self, script, stop: int | None = None):
        self.script, self.stop, self.calls = script, stop, []
        self.ids_BT = torch.zeros(len(script), 1, dtype=torch.long)
        self.requests = [RequestState(request=b) for b in range(len(script))]
        self.run, self.observer, self.t = self, NullObserver(), 0

    @property
    def done(self) -> bool:
        return all(state.finished for state in self.requests)

    def prefill(self) -> torch.Tensor:
        self.calls.append("prefill")
        return self._logits()

    def step(self, token_B: list[int]) -> torch.Tensor:
        self.calls.append(list(token_B))
        self.t += 1
        return self._logits()

    def record(self, token_B: list[int]) -> None:
        self.calls.append(("record", list(token_B)))
        for state, token in zip(self.requests, token_B, strict=True):
            state.tokens.append(token)
            state.finished |= token == self.stop

    def count_selected(self) -> None:
        pass

    def _logits(self) -> torch.Tensor:
        ids = torch.tensor([row[self.t] for row in self.script])
        return torch.nn.functional.one_hot(ids, VOCABULARY).float()


def loop(host: ScriptedHost, limit: int) -> Loop:
    rows = [[1]] * len(host.script)
    return Loop(host, rows, [limit] * len(rows), Sampler(Sampling(), host.ids_BT))


def test_each_step_decodes_the_token_before_it():
    """Step 0 is the prompt's; step t reads x_{t-1}, then notes x_t."""
    host = ScriptedHost([[5, 6, 7]])
    list(loop(host, 3).decode())
    assert host.calls == ["prefill", ("record", [5]), [5], ("record", [6]), [6], ("record", [7])]


@pytest.mark.parametrize("bound", [1, 2])
def test_no_more_tokens_than_asked_for(bound: int):
    host = ScriptedHost([[5, 6, 7]])
    assert len(list(loop(host, bound).decode())) == bound
    assert host.t == bound - 1


def test_decoding_ends_with_the_token_that_ends_the_last_request():
    host = ScriptedHost([[5, 7, 3, 3], [8, 9, 7, 3]], stop=7)
    assert list(loop(host, 4).decode()) == [{0: [5], 1: [8]}, {0: [7], 1: [9]}, {1: [7]}]
    assert host.calls[-1] == ("record", [0, 7])


def test_a_token_is_given_out_before_the_next_is_computed():
    """Streaming: the caller has x_t while step t + 1 has not begun, and x_t is recorded."""
    host = ScriptedHost([[5, 6, 7]])
    tokens = loop(host, 3).decode()
    assert next(tokens) == {0: [5]}
    assert host.calls == ["prefill", ("record", [5])]


ROWS = [[*range(5, 25)], [*range(40, 47)]]
CONFIG = SfiConfig(
    slow_start=1, min_gap=0, span=0, sink=2, recent=4, budget=3, t_max=2, trigger_delay=0,
    trigger_token_ids=(7, 90), window_prefill=2,
)  # fmt: skip


def record(model, rows: list[list[int]] = ROWS, **options) -> RecordingObserver:
    observer = RecordingObserver()
    options = {"max_new_tokens": 6, "stop_token_ids": (), **options}
    sfi_core.generate(model, None, rows, CONFIG, observers=[observer], **options)
    return observer


def test_a_run_says_what_runs(tiny_model):
    (event,) = record(tiny_model, policy="streaming-llm").runs
    assert (event.batch, event.policy, event.backend, event.device) == (2, "streaming-llm", "torch", "cpu")
    assert event.trigger_token_ids == (7, 90)
    assert event.config["recent"] == 4 + 3  # what the policy made of the settings
    assert event.audit is None
    assert event.model["architecture"] == "Qwen3ForCausalLM"


def test_a_lone_observer_of_a_loop_of_ones_own_is_told(tiny_model):
    observer = RecordingObserver()
    with slow_fast(tiny_model, None, CONFIG, observers=[observer]) as session, torch.no_grad():
        cache = session.cache()
        tiny_model(torch.tensor([ROWS[0]]), **{CACHE_NAME: cache})
    assert len(observer.runs) == 1


def test_every_run_of_a_session_is_told_of(tiny_model):
    observer = RecordingObserver()
    with slow_fast(tiny_model, None, CONFIG, observers=[observer]):
        for _ in range(2):
            tiny_model.generate(**padded(ROWS), max_new_tokens=3, eos_token_id=None, pad_token_id=0)
    assert len(observer.runs) == 2
    assert [event.step for event in observer.begun] == [0, 1, 2] * 2


@pytest.mark.parametrize("chunk", [0, 6])
def test_the_prompts_pieces_make_up_the_prompts(tiny_model, chunk):
    pieces = record(tiny_model, engine=EngineOptions(prefill_chunk=chunk)).prompts
    for row, ids in enumerate(ROWS):
        read = [
            token
            for event in pieces
            for token in event.ids_BT[row, event.ids_BT.shape[1] - event.count[row] :].tolist()
        ]
        assert read == ids


def test_a_step_says_beforehand_who_is_slow(tiny_model):
    observer = record(tiny_model, engine=EngineOptions(prefill_chunk=8))
    assert [event.step for event in observer.begun] == [-1, -1, 0, 1, 2, 3, 4, 5]
    for begun in observer.begun[3:]:
        slow = tuple(e.request for e in observer.steps if e.step == begun.step and e.slow)
        fast = tuple(e.request for e in observer.steps if e.step == begun.step and not e.slow)
        assert (begun.slow, begun.fast) == (slow, fast)
        assert begun.kind == ("mixed" if slow and fast else "slow" if slow else "fast")
    assert {event.kind for event in observer.begun[:3]} == {"prefill"}


def test_a_pass_and_its_phases_are_bracketed(tiny_model):
    observer = record(tiny_model)
    names = [name for name, layer in observer.spans]
    assert names.count("prefill") == 1
    assert (names.count("forward"), names.count("sample")) == (5, 6)
    slow = [event for event in observer.steps if event.slow]
    for name in ("selector", "top_k", "pack"):
        assert observer.spans.count((name, 1)) == len(slow)
    assert observer.open == 0


def test_a_pass_that_breaks_off_ends_its_span(tiny_model):
    observer = RecordingObserver()

    def break_off(*_) -> None:
        if len(observer.begun) == 3:
            raise KeyboardInterrupt

    hook = tiny_model.model.norm.register_forward_hook(break_off)
    try:
        result = sfi_core.generate(tiny_model, None, ROWS, CONFIG, observers=[observer])
    finally:
        hook.remove()
    assert result.interrupted
    assert observer.open == 0


def description(model) -> dict:
    with slow_fast(model, None, CONFIG) as session:
        return describe_model(model, session.shapes())


def weight_bytes(model) -> int:
    return sum(p.numel() * p.itemsize for p in model.parameters())


def test_a_tied_embedding_is_read_by_the_head():
    model = tiny_qwen3()
    tied = model.config.tie_word_embeddings
    embedding = model.get_input_embeddings().weight
    skipped = 0 if tied else embedding.numel() * embedding.itemsize
    assert description(model)["weight_bytes"] == weight_bytes(model) - skipped


@pytest.mark.parametrize("label", ["qwen3", "gpt-2"])
def test_of_an_embedding_of_its_own_only_a_row_is_read(label):
    model = tiny(label)
    facts = description(model)
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    assert facts["weight_bytes"] == weight_bytes(model) - facts["embedding_bytes"]


def test_of_a_mixture_only_the_active_experts_are_read():
    model = tiny("qwen3-moe")
    config = model.config
    experts = sum(p.numel() * p.itemsize for name, p in model.named_parameters() if ".experts." in name)
    assert experts > 0
    idle = experts * (1 - config.num_experts_per_tok / config.num_experts)
    facts = description(model)
    assert facts["weight_bytes"] == weight_bytes(model) - facts["embedding_bytes"] - round(idle)
