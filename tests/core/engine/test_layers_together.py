"""Layers that select together select and pack what each would alone."""

from typing import Any

import pytest
import torch

import sfi_core
from sfi_core import EngineOptions
from sfi_core.engine import maintenance, select
from sfi_core.engine.maintenance import Maintenance
from sfi_core.state.side_stream import SideStream
from tests.core.conftest import tiny_qwen3
from tests.core.engine.test_maintenance import CONFIG as OTHER
from tests.core.engine.test_maintenance import LAYERS, PROMPTS
from tests.fakes import Listener, RecordingObserver, use_references

CONFIG = OTHER.replace(span=2)


def chosen(seen: RecordingObserver) -> dict[tuple[int, int, int], tuple[Any, Any]]:
    """Return the positions and diagnostics of each selection, by step, layer and request."""
    found = {(e.step, e.layer, e.request): (e.index_HK.tolist(), e.diagnostics) for e in seen.selections}
    assert len(found) == len(seen.selections)
    return found


def steps(seen: RecordingObserver) -> list[tuple[Any, ...]]:
    return [(e.step, e.request, e.token_id, e.attended_tokens) for e in seen.steps]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_qwen3(layers=LAYERS)


@pytest.fixture
def complete(model, monkeypatch):
    """Decode; return what an observer was told, the paths, and the layers of each joined selection."""

    def run(enough: int = maintenance.ENOUGH, observer: RecordingObserver | None = None, **options: Any):
        together: list[int] = []
        every = select.refresh_handed
        monkeypatch.setattr(maintenance, "ENOUGH", enough)
        monkeypatch.setattr(select, "refresh_handed", lambda *about: (together.append(len(about[-1])), every(*about)))
        seen = observer or Listener()
        options = {"config": CONFIG, "max_new_tokens": 12, "stop_token_ids": (), **options}
        result = sfi_core.generate(model, None, PROMPTS, observers=[seen], **options)
        monkeypatch.setattr(select, "refresh_handed", every)
        return seen, result.report.paths, together

    return run


@pytest.mark.parametrize(("policy", "change"), [("sfi", {}), ("prior-only", {}), ("sfi", {"page_size": 5})])
def test_layers_together_choose_what_each_chooses_alone(complete, policy, change):
    options = {"policy": policy, "config": CONFIG.replace(**change)}
    alone, paths, ones = complete(enough=1, **options)
    own, own_paths, together = complete(**options)
    assert set(ones) == {1}
    assert set(together) == {LAYERS - len(CONFIG.dense_layers)}
    assert sum(together) == len(ones)
    assert own_paths == paths
    assert steps(own) == steps(alone)
    ours, theirs = chosen(own), chosen(alone)
    assert ours.keys() == theirs.keys()
    for at, (index, diagnostics) in ours.items():
        assert index == theirs[at][0]
        torch.testing.assert_close(diagnostics, theirs[at][1])


def test_what_waits_is_worked_off_when_it_is_enough(complete):
    length = len(PROMPTS[0]) + 12
    numbers = 4 * length * 2  # two layers' logits of four query heads, or those of more in shorter prompts
    alone, *_, together = complete(enough=numbers)
    assert {2, 1} <= set(together)
    assert steps(alone) == steps(complete(enough=1)[0])


@pytest.mark.parametrize(
    ("policy", "observer"),
    [
        ("sfi", RecordingObserver),  # each layer's phases are timed
        ("random-k", Listener),
    ],
)
def test_others_select_layer_by_layer(complete, policy, observer):
    assert set(complete(policy=policy, observer=observer())[2]) == {1}


def test_a_step_that_breaks_off_selects_no_more():
    held, done = Maintenance(SideStream(), together=True), []
    held.submit("first", done.append, alike="row", numbers=1)
    held.drop()
    held.submit("second", done.append, alike="row", numbers=1)
    assert done == []
    held.join()
    assert done == [["second"]]


def test_both_schedules_of_the_triton_backend_choose_alike(model, monkeypatch):
    """Each layer by itself, as beside the next layers, or all together at the step's end."""
    use_references(monkeypatch)

    def told(*, overlap: bool, enough: int) -> tuple[Any, Any]:
        monkeypatch.setattr(maintenance, "TOGETHER", enough)
        seen, engine = Listener(), EngineOptions(backend="triton", overlap=overlap)
        sfi_core.generate(
            model, None, PROMPTS, CONFIG, max_new_tokens=12, stop_token_ids=(), observers=[seen], engine=engine,
            page_size=16,
        )  # fmt: skip
        return steps(seen), {at: index for at, (index, _) in chosen(seen).items()}

    alone = told(overlap=True, enough=1 << 25)
    for enough in (1, 2000, 1 << 25):
        assert told(overlap=False, enough=enough) == alone
