"""A prompt that begins like one before gives what reading it whole gives, and reads the rest only."""

import errno
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import sfi_core
from sfi_core import EngineOptions, PromptCache, slow_fast
from sfi_core.engine import prompt_cache
from sfi_core.engine.prompt_cache import FILE
from sfi_core.errors import ConfigError, InputError, UnsupportedModelError
from sfi_core.generation import generate as generation
from sfi_core.hosts.transformers import known_prompt
from sfi_core.hosts.transformers.cache import CACHE_NAME
from sfi_core.policies import POLICIES
from sfi_core.settings.config import SyncKVConfig
from tests.architectures import SMALL, WORKS, padded, prompts, tiny
from tests.covering import first
from tests.fakes import RecordingObserver

pytestmark = [pytest.mark.seam, pytest.mark.usefixtures("poisoned_memory")]

CONFIG = SMALL.replace(synckv=SyncKVConfig(heads="even"))
DOCUMENT, QUESTION, OTHER, LONG = prompts(60, 20, 21, 300)
NEW = 8
MODELS = [architecture.label for architecture in WORKS]


@pytest.fixture(autouse=True)
def short_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_prompt, "TAIL", 30)


@pytest.fixture
def model() -> Any:
    return tiny("qwen3")


def complete(model: Any, *rows: list[int], cache: PromptCache | None = None, **options: Any) -> Any:
    given = {"policy": "sfi", "config": CONFIG, "max_new_tokens": NEW, "stop_token_ids": (), **options}
    return sfi_core.generate(model, None, list(rows), cache=cache, **given).report.requests


def tokens(requests: Any) -> list[list[int]]:
    return [request.token_ids for request in requests]


def turns(
    model: Any, cache: PromptCache, document: list[int] = DOCUMENT, folder: Path | None = None, **options: Any
) -> list[int]:
    """Ask twice in one chat, then another question on the same document; return what the cache had each time.

    With a folder the cache is saved and loaded between questions.
    """
    had = []
    (first,) = complete(model, [*document, *QUESTION], cache=cache, **options)
    for prompt in ([*document, *QUESTION, *first.token_ids, *OTHER], [*document, *OTHER]):
        if folder is not None:
            cache.save(folder)
            cache = PromptCache.load(folder)
        (request,) = complete(model, prompt, cache=cache, **options)
        (anew,) = complete(model, prompt, **options)
        assert request.token_ids == anew.token_ids
        assert (request.slow_at, request.prompt_tokens) == (anew.slow_at, len(prompt))
        assert request.cache_read_ratio == pytest.approx(anew.cache_read_ratio)
        had.append(request.cached_prompt_tokens)
    return had


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_goes_on(model: Any, policy: str):
    """The prompt's last queries select first, in `codescan` the last 256: they are read anew."""
    document, expected = (LONG, [349 - 256, 321 - 256]) if policy == "codescan" else (DOCUMENT, [80, 60])
    assert turns(model, PromptCache(), document, policy=policy) == expected


@pytest.mark.parametrize("label", first(MODELS, 4))
def test_every_architecture_goes_on(label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Windows and states go back to where they are known: 30 tokens before a prompt's end, here of 80."""
    with slow_fast(tiny(label), None, CONFIG) as session:
        expected = [80, 50] if any(shape.hosted for shape in session.shapes()) else [80, 60]
        try:
            session.state_checks.passes("a prompt in pieces")
        except UnsupportedModelError:
            expected = [0, 0]
    monkeypatch.setattr(tiny(label), "sfi_key", label, raising=False)
    assert turns(tiny(label), PromptCache()) == turns(tiny(label), PromptCache(), folder=tmp_path) == expected


@pytest.mark.parametrize(
    "engine",
    [
        EngineOptions(lossless=True), EngineOptions(prefill_chunk=16), EngineOptions(kv_dtype="float16"),
        EngineOptions(kv_device_budget="60%", kv_page=4), EngineOptions(graphs=False),
    ],
    ids=["lossless", "chunks", "float16", "two tiers", "eager"],
)  # fmt: skip
def test_every_way_to_run_goes_on(model: Any, engine: EngineOptions):
    assert turns(model, PromptCache(), engine=engine) == [80, 60]


@pytest.mark.parametrize("label", first(["gpt-oss", "qwen3-next"]))
def test_a_lossless_run_of_windows_and_states_goes_on(label: str):
    assert turns(tiny(label), PromptCache(), engine=EngineOptions(lossless=True)) == [80, 50]


@pytest.mark.parametrize("most", [None, 2, 1])
def test_prompts_of_a_batch_share_a_beginning(model: Any, most: int | None):
    cache = PromptCache()
    complete(model, DOCUMENT, cache=cache)
    rows = [[*DOCUMENT, *QUESTION], [*DOCUMENT[:40], *OTHER], [*DOCUMENT, *QUESTION, *OTHER], QUESTION]
    requests = complete(model, *rows, cache=cache, max_batch=most)
    assert tokens(requests) == [tokens(complete(model, row))[0] for row in rows]
    assert cache.tokens == DOCUMENT
    assert [request.cached_prompt_tokens for request in requests][2 if most == 1 else 4 :] in ([60, 0], [])


@pytest.mark.parametrize("label", ["qwen3", "gpt-oss", "qwen3-next"])
@pytest.mark.parametrize("most", [None, 1])
def test_what_prompts_begin_with_is_read_once(label: str, most: int | None, monkeypatch: pytest.MonkeyPatch):
    rows = [[*DOCUMENT, *QUESTION], [*DOCUMENT, *OTHER[:20]]]
    expected = [tokens(complete(tiny(label), row))[0] for row in rows]
    monkeypatch.setattr(generation, "BEGINNING", 40)
    requests = complete(tiny(label), *rows, max_batch=most)
    assert tokens(requests) == expected
    assert [request.cached_prompt_tokens for request in requests] == [60, 60]


def test_the_observers_see_the_whole_prompt(model: Any):
    cache, seen = PromptCache(), RecordingObserver()
    complete(model, DOCUMENT, cache=cache)
    complete(model, [*DOCUMENT, *QUESTION], cache=cache, observers=[seen])
    assert [row for event in seen.prompts for row in event.ids_BT[0].tolist()] == [*DOCUMENT, *QUESTION]


def test_a_prompt_that_is_there_already_is_read_at_its_end_alone(model: Any):
    cache = PromptCache()
    complete(model, DOCUMENT, cache=cache)
    for prompt in (DOCUMENT, DOCUMENT[:-5]):
        (request,) = complete(model, prompt, cache=cache)
        assert request.token_ids == tokens(complete(model, prompt))[0]
        assert request.cached_prompt_tokens == len(prompt) - CONFIG.window_prefill


class TestFolder:
    @pytest.fixture(autouse=True)
    def named(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        for label in ("qwen3", "qwen3-next", "gpt-oss"):
            monkeypatch.setattr(tiny(label), "sfi_key", label, raising=False)

    @pytest.mark.parametrize("label", first(["qwen3", "qwen3-next", "gpt-oss"]))
    def test_a_saved_prompt_serves_every_policy(self, label: str, tmp_path: Any):
        cache, model = PromptCache(), tiny(label)
        complete(model, DOCUMENT, cache=cache)
        cache.save(tmp_path / "kept")
        prompt = [*DOCUMENT, *QUESTION]
        for policy in ("full-kv", "synckv", "snapkv"):
            loaded = PromptCache.load(tmp_path / "kept")
            (request,) = complete(model, prompt, cache=loaded, policy=policy)
            assert request.token_ids == tokens(complete(model, prompt, policy=policy))[0]
            assert request.cached_prompt_tokens == len(DOCUMENT)
            assert loaded.tokens == prompt

    def test_another_model_or_dtype_is_refused(self, model: Any, tmp_path: Any):
        cache = PromptCache()
        complete(model, DOCUMENT, cache=cache)
        for other, options in ((tiny("llama"), {}), (model, {"engine": EngineOptions(kv_dtype="bfloat16")})):
            with pytest.raises(ConfigError, match="must be of this model, its dtype and its kv_dtype, got another's"):
                complete(other, DOCUMENT, cache=cache, **options)
        cache.layers.pop(0)
        with pytest.raises(InputError, match="must have the model's layers, heads, widths and dtype, got others"):
            complete(model, DOCUMENT, cache=cache)

    @pytest.mark.parametrize("cut", [0, 7, 100, -100])
    def test_a_damaged_file_is_one_line(self, model: Any, tmp_path: Any, cut: int):
        cache = PromptCache()
        complete(model, DOCUMENT, cache=cache)
        cache.save(tmp_path)
        (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:cut])
        with pytest.raises(InputError, match=f"prompt cache {tmp_path} is damaged: .+"):
            PromptCache.load(tmp_path)

    @pytest.mark.parametrize(
        ("name", "change", "message"),
        [
            ("tokens", lambda x: x.float(), "a row of 16,777,216 int64 at most, got 60 torch.float32"),
            ("tokens", lambda x: x[None], "its tokens must be a row of .* got 1 x 60 torch.int64"),
            ("tokens", lambda x: x[:0], "its tokens must be a row of .* got 0 torch.int64"),
            ("tokens", lambda x: x[:-1], "its windows must be after 1 to 59 tokens, got 60"),
            ("after -3.0.keys", lambda _: torch.ones(1), "its windows must be after 1 to 60 tokens, got -3"),
            (f"after {10**30}.0.keys", lambda _: torch.ones(1), "its windows must be after 1 to 60 tokens, got 1000"),
            ("after x.0.keys", lambda _: torch.ones(1), "is damaged: invalid literal"),
            ("1.key", lambda x: x[:, :, :-1], "layers, heads, widths and dtype, got others"),
            ("1.key", lambda x: x.double(), "layers, heads, widths and dtype, got others"),
            ("1.value", lambda x: x.int(), "layers, heads, widths and dtype, got others"),
            ("1.value", lambda x: torch.full_like(x, torch.nan), "finite numbers, got NaN or infinity"),
            ("after 60.0.keys", lambda x: x.repeat(2, 1, 1, 1), "windows and states, got others"),
            ("after 60.0.keys", lambda x: torch.full_like(x, torch.inf), "finite numbers, got NaN or infinity"),
            ("after 60.0.values", lambda x: x[..., :-1], "windows and states, got others"),
            ("after 60.0.values", lambda x: x[:, :, 1:], "windows and states, got others"),
            ("after 60.0.values", lambda x: x.half(), "windows and states, got others"),
            ("after 60.0.cumulative_length", lambda x: x + 1, "windows and states, got others"),
            ("after 60.0.cumulative_length", lambda _: torch.ones(2), "windows and states, got others"),
            ("after 60.0.sliding_window", lambda _: torch.tensor(2**40), "windows and states, got others"),
            ("after 60.-1.keys", lambda _: torch.ones(1), "windows and states, got others"),
        ],
    )  # fmt: skip
    def test_a_crafted_file_is_one_line(self, tmp_path: Path, name: str, change: Any, message: str):
        model, cache = tiny("gpt-oss"), PromptCache()
        complete(model, DOCUMENT, cache=cache)
        cache.save(tmp_path)
        tensors = load_file(tmp_path / FILE)
        tensors[name] = change(tensors.get(name)).contiguous()
        save_file(tensors, tmp_path / FILE, {"format": prompt_cache.FORMAT, "model": cache.model})
        with pytest.raises(InputError, match=message):
            complete(model, [*DOCUMENT, *QUESTION], cache=PromptCache.load(tmp_path))

    def test_two_writers_leave_the_whole_file_of_one(self, model: Any, tmp_path: Path):
        caches = [PromptCache(), PromptCache()]
        for cache, prompt in zip(caches, (DOCUMENT, LONG), strict=True):
            complete(model, prompt, cache=cache)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda number: caches[number % 2].save(tmp_path), range(20)))
        loaded = PromptCache.load(tmp_path)
        (cache,) = (cache for cache in caches if cache.tokens == loaded.tokens)
        assert [entry.name for entry in tmp_path.iterdir()] == [FILE]
        for pair, saved in ((cache.layers[layer], loaded.layers[layer]) for layer in cache.layers):
            assert all(map(torch.equal, pair, saved))

    def test_a_full_disk_leaves_the_old_prompt(self, model: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
        cache = PromptCache()
        complete(model, DOCUMENT, cache=cache)
        cache.save(tmp_path)
        complete(model, QUESTION, cache=cache)

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(prompt_cache, "save_file", full)
        with pytest.raises(OSError, match="No space left"):
            cache.save(tmp_path)
        assert PromptCache.load(tmp_path).tokens == DOCUMENT
        assert [entry.name for entry in tmp_path.iterdir()] == [FILE]

    def test_other_folders_are_left_alone(self, model: Any, tmp_path: Any):
        with pytest.raises(ConfigError, match="must have a prompt to be saved, got none"):
            PromptCache().save(tmp_path)
        cache = PromptCache()
        complete(model, DOCUMENT, cache=cache)
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(ConfigError, match=r"must be a folder of its own, got one with 'notes.txt'"):
            cache.save(tmp_path)
        with pytest.raises(ConfigError, match="must be a folder, got a file or a link"):
            cache.save(tmp_path / "notes.txt")
        with pytest.raises(InputError, match=f"must have a {FILE}, got none"):
            PromptCache.load(tmp_path)


class TestGenerate:
    """`model.generate(..., past_key_values=cache)`, as transformers' users write it."""

    def ask(self, model: Any, *rows: list[int], **options: Any) -> list[list[int]]:
        batch = padded(rows)
        output = model.generate(**batch, **{"max_new_tokens": NEW, "do_sample": False, **options})
        return output[:, batch["input_ids"].shape[1] :].tolist()

    @pytest.mark.parametrize("lossless", [False, True])
    @pytest.mark.parametrize("label", first(["qwen3", "gpt-oss", "qwen3-next"]))
    def test_a_used_cache_goes_on(self, label: str, lossless: bool):
        model, engine = tiny(label), EngineOptions(lossless=lossless)
        with slow_fast(model, None, CONFIG, policy="sfi", engine=engine) as session:
            cache = session.cache()
            (first,) = self.ask(model, [*DOCUMENT, *QUESTION], **{CACHE_NAME: cache})
            second = [*DOCUMENT, *QUESTION, *first, *OTHER]
            expected = self.ask(model, second)
            assert self.ask(model, second, **{CACHE_NAME: cache}) == expected
            assert session.report.requests[0].cached_prompt_tokens == 80
        third = [*DOCUMENT, *OTHER]
        with slow_fast(model, None, CONFIG, policy="sfi", engine=engine) as session:
            expected = self.ask(model, third)
            assert self.ask(model, third, **{CACHE_NAME: cache}) == expected
            assert (session.report.requests[0].cached_prompt_tokens > 0) == (label == "qwen3" or lossless)

    def test_the_cache_of_an_output_goes_on(self, model: Any):
        with slow_fast(model, None, CONFIG) as session:
            output = model.generate(
                **padded([DOCUMENT]), max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True
            )
            prompt = [*output.sequences[0].tolist(), *QUESTION]
            expected = self.ask(model, prompt)
            assert self.ask(model, prompt, **{CACHE_NAME: output[CACHE_NAME]}) == expected
            assert session.report.requests[0].cached_prompt_tokens == len(DOCUMENT)

    def test_several_prompts_are_read_anew(self, model: Any):
        rows = [[*DOCUMENT, *QUESTION], DOCUMENT]
        with slow_fast(model, None, CONFIG) as session:
            expected, cache = self.ask(model, *rows), session.cache()
            self.ask(model, DOCUMENT, **{CACHE_NAME: cache})
            assert self.ask(model, *rows, **{CACHE_NAME: cache}) == expected

    def test_a_loop_of_ones_own_leaves_a_cache_to_generate(self, model: Any):
        with slow_fast(model, None, CONFIG) as session, torch.no_grad():
            expected, cache = self.ask(model, DOCUMENT), session.cache()
            model(input_ids=torch.tensor([QUESTION]), **{CACHE_NAME: cache})
            assert self.ask(model, DOCUMENT, **{CACHE_NAME: cache}) == expected

    @pytest.mark.parametrize("lossless", [False, True])
    def test_custom_generate_needs_no_session(self, model: Any, lossless: bool):
        engine = EngineOptions(lossless=lossless)
        options = {"custom_generate": sfi_core.custom_generate, "config": CONFIG, "engine": engine, "budget": 7}
        rows = [DOCUMENT, QUESTION]
        with slow_fast(model, None, CONFIG.replace(budget=7), engine=engine):
            expected = self.ask(model, *rows)
        assert self.ask(model, *rows, **options) == expected
        with pytest.raises(ConfigError, match="unknown policy 'none'"):
            self.ask(model, *rows, **options, policy="none")
