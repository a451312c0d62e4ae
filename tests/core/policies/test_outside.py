"""Policies that other packages bring, by entry points."""

import re
import tomllib
from pathlib import Path

import pytest
import torch

from sfi_core import EngineOptions, SfiConfig, generate, load
from sfi_core.bundled.example import load_example
from sfi_core.errors import ConfigError
from sfi_core.measure.doctor import _policies
from sfi_core.policies import policy_class
from sfi_core.settings.policy_names import installed
from tests.architectures import prompts, tiny
from tests.fakes import RecordingObserver, layer_context

FULL = "from sfi_core.policies.built_in.full_kv import FullKV"
PAGE = Path(__file__).parents[3] / "docs" / "your_policy.md"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a package of one module; its entry points are `name = value`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    installed.cache_clear()
    yield lambda package, code, points: _install(tmp_path, package, code, points)
    installed.cache_clear()


def _install(folder: Path, package: str, code: str, points: dict[str, str]) -> None:
    (folder / f"{package}.py").write_text(code)
    info = folder / f"{package}-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n")
    lines = [f"{name} = {value}\n" for name, value in points.items()]
    (info / "entry_points.txt").write_text("[sfi.policies]\n" + "".join(lines))


def test_the_page_on_policies_shows_one_that_runs(install):
    """It answers the bundled example; its selection is what its text says: where any head looks most, and beside it."""
    page = PAGE.read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (project,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    install("loudest", code, tomllib.loads(project)["project"]["entry-points"]["sfi.policies"])
    assert len(code.splitlines()) <= 30

    model, tokenizer = load()
    example = load_example()
    result = generate(model, tokenizer, [example.prompt], example.config, policy="loudest", max_new_tokens=60)
    assert result.texts == [example.answer]
    assert result.report.requests[0].read_ratio < 0.15

    logits = torch.randn(1, 2, 3, 1, 400, generator=torch.Generator().manual_seed(0))
    allowed = torch.zeros(1, 400, dtype=torch.bool)
    allowed[:, 5:300] = True
    selected = policy_class("loudest")(SfiConfig(budget=21), None).select_after(
        layer_context(logits, allowed_BT=allowed)
    )
    for head, probability in enumerate(logits[0].softmax(-1)):
        loudest = int(probability.amax((0, 1))[15:290].argmax()) + 15
        assert selected.index_BHK[0, head].tolist() == [*range(loudest - 10, loudest + 11)]


FEW = """
import torch
from sfi_core.policies import Companion, EvidencePolicy, Policy, Selection, Triggered, best

def few(context, budget):
    index_BHK = best(context, context.logits().amax((2, 3)), budget).index_BHK
    counts = 2 + torch.arange(index_BHK.shape[1])[:, None]
    return Selection(index_BHK.masked_fill(torch.arange(budget) >= counts, -1))

class Slowly(EvidencePolicy, Triggered):
    def select_after(self, context):
        return few(context, self.config.budget)

class Always(Companion, Policy):
    fixed = {"recent_mode": "sliding"}
    drafts = True

    def choose(self, batch):
        return batch.read(few(batch.evidence(), self.config.budget)) if batch.fast else None
"""


@pytest.mark.parametrize("policy", ["slowly", "always"])
def test_a_selection_of_fewer_positions_than_the_budget_is_counted_as_it_is(install, policy):
    """Two positions in head 0, three in head 1, of a budget of 20: the events and the report say 2.5."""
    install("few", FEW, {"slowly": "few:Slowly", "always": "few:Always"})
    config = SfiConfig(sink=2, recent=8, budget=20, trigger_token_ids=(3,), dense_layers=(0,))
    for lossless in (False, True):
        heard, engine = RecordingObserver(), EngineOptions(lossless=lossless)
        options = {"policy": policy, "engine": engine, "max_new_tokens": 20, "stop_token_ids": ()}
        report = generate(tiny("llama"), None, prompts(90, 61), config, observers=[heard], **options).report
        fast = [event for event in heard.steps if event.reason == "" and (event.drafted or not lossless)]
        assert fast
        model = heard.runs[0].model["layers"]
        layers = len(model)
        row_bytes = sum(
            layer["heads"] * (layer["key_width"] + layer["value_width"]) * layer["itemsize"] for layer in model
        )
        for event in fast:
            recent = 8 if policy == "always" else event.position + 1 - start(heard, event)
            sparse = 2 + 2.5 + recent
            assert event.attended_tokens == (event.context_tokens + (layers - 1) * sparse) / layers
            mates = [other for other in fast if other.batch_step == event.batch_step]
            if not lossless and len(mates) == event.fast_requests == 2:
                assert event.moved_bytes == round(row_bytes * sum(mate.attended_tokens for mate in mates))
        for request in report.requests if not lossless else ():
            read = [event for event in heard.steps if event.request == report.requests.index(request) and event.step]
            assert request.mean_attended_tokens == pytest.approx(
                sum(event.attended_tokens for event in read) / len(read)
            )


def start(heard: RecordingObserver, step) -> int:
    """The first position of the anchored recent segment: eight tokens before the end of the last slow step."""
    slow = [event for event in heard.steps if event.request == step.request and event.slow and event.step < step.step]
    return slow[-1].position + 1 - 8


def test_one_that_does_not_import_is_named_and_the_others_work(install):
    install("broken", "import no_such_module\n", {"wrong": "broken:Wrong", "odd": "fine:odd"})
    install("fine", f"{FULL} as Mine\nodd = 3\n", {"mine": "fine:Mine"})
    with pytest.raises(ConfigError, match=r"^policy 'wrong' of package broken cannot be imported: Module"):
        policy_class("wrong")
    with pytest.raises(ConfigError, match=r"^policy 'odd' of package broken must be a subclass of .* got 3$"):
        policy_class("odd")
    assert policy_class("mine") is policy_class("full-kv")
    with pytest.raises(ConfigError, match=r"unknown policy 'other'; .*expected one of .*'mine', 'odd', 'wrong'\)"):
        policy_class("other")
    assert {check.name: check.ok for check in _policies()} == {
        "policy mine": True, "policy odd": False, "policy wrong": False,
    }  # fmt: skip


def test_a_name_taken_twice_is_refused_with_both_owners(install):
    install("one", FULL, {"mine": "one:FullKV", "sfi": "one:FullKV"})
    install("two", FULL, {"mine": "two:FullKV"})
    with pytest.raises(ConfigError, match=r"^policy 'mine' is defined twice, by package (one|two) and by"):
        policy_class("mine")
    with pytest.raises(ConfigError, match=r"^policy 'sfi' is defined twice, by sfi and by package one; re"):
        policy_class("sfi")
    assert policy_class("full-kv").__name__ == "FullKV"
