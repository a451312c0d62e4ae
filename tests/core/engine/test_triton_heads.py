"""FreeKV and SyncKV on the Triton kernels, beside the torch backend."""

import pytest

import sfi_core
from sfi_core.settings.engine import EngineOptions
from tests.core.engine.test_triton_backend import CONFIG, DEVICE, PROMPTS
from tests.covering import case
from tests.fakes import RecordingObserver, positions
from tests.watched import four_heads

NEW = {"freekv": 3}  # which selects at every step, twice: the interpreter is slow
pytestmark = pytest.mark.usefixtures("poisoned_memory")
EVEN = {"heads": "even", "stride": 3}
PAGES = {"page": 8, "tau": 0.2, "first_layer_dense": False}
WAYS = {
    "freekv": ("freekv", {"freekv": PAGES}),
    "synckv": ("synckv", {"synckv": EVEN}),
    "synckv sparse": ("synckv", {"synckv": {**EVEN, "suspension": "sparse"}}),
}
KEPT = ("freekv",)


def run(backend: str, way: str, **options):
    policy, change = WAYS[way]
    observer = RecordingObserver()
    model = four_heads().to(DEVICE)
    try:
        result = sfi_core.generate(
            model, None, options.pop("prompts", PROMPTS[::2]), CONFIG.replace(**change),
            policy=policy, max_new_tokens=NEW.get(way, 7), stop_token_ids=(),
            engine=EngineOptions(backend=backend),
            observers=[observer], **options,
        )  # fmt: skip
    finally:
        model.to("cpu")
    return result.report, observer


def chosen(observer: RecordingObserver) -> dict:
    """Return the positions of the heads that have selected, by request, step, layer and reason."""
    selected = {}
    for event in observer.selections:
        heads = range(len(event.index_HK)) if event.heads_H is None else event.heads_H.nonzero()
        sets = positions(event.index_HK)
        key = (event.request, event.step, event.layer, event.reason)
        selected[key] = {int(head): sets[int(head)] for head in heads if sets[int(head)]}
    return {key: heads for key, heads in selected.items() if heads}


@pytest.mark.parametrize("way", [case(way, kept=way in KEPT) for way in WAYS])
def test_the_kernels_choose_read_and_say_what_the_references_do(way: str):
    """A ragged batch; one prompt is shorter than sink and recent window together."""
    (theirs, heard), (ours, said) = (run(backend, way) for backend in ("torch", "triton"))
    assert (theirs.backend, ours.backend) == ("torch", "triton")
    assert [r.token_ids for r in ours.requests] == [r.token_ids for r in theirs.requests]
    for mine, other in zip(ours.requests, theirs.requests, strict=True):
        assert mine.read_ratio == pytest.approx(other.read_ratio)
        assert mine.slow_at == other.slow_at
    assert chosen(said) == chosen(heard)


@pytest.mark.parametrize("way", [case("synckv"), case("freekv"), case("synckv sparse")])
def test_requests_that_follow_each_other_get_what_they_get_alone(way: str):
    prompts = [PROMPTS[2], PROMPTS[1], PROMPTS[2][:3]]
    together = run("triton", way, prompts=prompts, max_batch=2)[0].requests
    alone = [run("torch", way, prompts=[prompt])[0].requests[0] for prompt in prompts]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert [r.read_ratio for r in together] == pytest.approx([r.read_ratio for r in alone])
