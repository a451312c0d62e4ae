"""Methods whose heads go their own ways, over the architectures of `tests/architectures.py`."""

from typing import Any

import pytest

from sfi_core import AuditConfig, EngineOptions, generate
from tests.architectures import SMALL, prompts, tiny
from tests.core.hosts.test_architectures import HANDFUL, LENGTHS, STEPS, WHOLE, reference
from tests.covering import each_value
from tests.fakes import RecordingObserver

pytestmark = pytest.mark.seam

EVEN = {"heads": "even", "stride": 3}
PAGES = {"page": 4, "tau": 0.3, "first_layer_dense": False}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "freekv": ("freekv", {"freekv": PAGES}),
    "codescan": ("codescan", {}),
    "synckv": ("synckv", {"synckv": EVEN}),
    "synckv sparse": ("synckv", {"synckv": {**EVEN, "suspension": "sparse"}}),
}
CASES = each_value(HANDFUL, WAYS)


def run(label: str, way: str, rows: list[list[int]], config: Any = SMALL, **options: Any) -> Any:
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
    """Tokens, slow steps, reasons and what was read, with a budget that reads less."""
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
    """So that the tests above compare runs whose heads differ."""
    assert run("llama", way, prompts(37))[0].read_ratio < 0.9


@pytest.mark.parametrize("way", WAYS)
def test_an_audit_changes_nothing_and_sees_heads_that_read_everything(way: str):
    """A head that has read everything keeps all of its attention; others lose some."""
    rows, observer = prompts(37, 9), RecordingObserver()
    audited = run("qwen3", way, rows, observers=[observer], audit=AuditConfig(every=1, top=5))
    assert audited == run("qwen3", way, rows)
    kept = [event.retained_H.tolist() for event in observer.audits if event.step > 0]
    assert any(share < 0.99 for heads in kept for share in heads)
    if way != "freekv":  # whose heads differ in what they select, not in how much they read
        assert any((heads[0] == 1.0) != (heads[1] == 1.0) for heads in kept)
