"""The bundled checkpoint, its corpus and example; digests of checkpoints, and texts under scaled RoPE."""

import json
import random
import re
import shutil
import subprocess
import sys

import pytest
import torch
import transformers

from benchmarks.train_bundled import MAX_LENGTH, build_tokenizer, exact_match, vocabulary
from sfi_core import generate, slow_fast
from sfi_core.bundled import example
from sfi_core.bundled.example import draw
from sfi_core.errors import InputError
from sfi_core.models.load import BUNDLED, load
from sfi_core.models.rotation import most_positions
from sfi_core.models.source import Source, checkpoint_digest, find_source, model_digest, source_digest
from tests.architectures import SMALL
from tests.core.conftest import tiny_qwen3
from tests.covering import case
from tests.fakes import tokens
from tests.tiny_models import ALTERNATE, build

LARGEST = 12_000_000  # bytes, promised in the issue


@pytest.fixture(scope="module")
def loaded():
    return load(device="cpu")


def test_the_checkpoint_is_small():
    assert sum(file.stat().st_size for file in BUNDLED.rglob("*") if file.is_file()) <= LARGEST


def test_the_shipped_tokenizer_is_the_one_the_script_builds(loaded):
    assert loaded[1].get_vocab() == build_tokenizer(MAX_LENGTH).get_vocab()


def test_every_word_of_the_corpus_is_one_token(loaded):
    assert [w for w in vocabulary() if len(loaded[1].tokenize(w)) != 1] == []


@pytest.mark.parametrize("text", ["Ünïcode, 数字 3.14\n\n\ttabs", "plain words", '"quoted?" (yes)'])
def test_the_tokenizer_gives_any_text_back(loaded, text):
    ids = loaded[1](text, add_special_tokens=False)["input_ids"]
    assert loaded[1].decode(ids) == text


def test_the_answer_stands_in_the_document():
    drawn = example.recall(random.Random(3), 40, 6)
    sentences = re.findall(r" \S+ [^.!;?]+[.!;?]\n?", drawn.answer)
    assert len(sentences) == len(drawn.names) == 6
    assert [sentence.split()[0] for sentence in sentences] == list(drawn.names)
    assert all(sentence in drawn.prompt for sentence in sentences)


def test_a_document_is_drawn_from_its_seed_alone():
    assert draw(random.Random(5), 600) == draw(random.Random(5), 600)
    assert draw(random.Random(5), 600) != draw(random.Random(6), 600)


def test_the_example_is_what_its_script_writes(tmp_path, monkeypatch):
    written = tmp_path / "example.json"
    monkeypatch.setattr(example, "FILE", written)
    example.main()
    assert json.loads(written.read_text()) == json.loads((BUNDLED.parent / "example.json").read_text())


@pytest.mark.parametrize(("length", "samples"), [(1024, 12), case(4096, 4)])
def test_the_checkpoint_recalls_word_for_word(loaded, length, samples):
    """The model card's numbers come from many more documents."""
    assert exact_match(*loaded, length, samples=samples) > 0.5


@pytest.mark.exhaustive  # sizes/test_memory.py compares with what is allocated
def test_peak_memory_is_within_a_tenth_of_the_forecast_and_does_not_grow():
    """8K tokens of context, three times in one fresh process."""
    script = """
import random, sfi_core
from sfi_core.bundled.example import draw
model, tokenizer = sfi_core.load(device="cpu")
prompt = draw(random.Random(1), 8192, 5).prompt
for _ in range(3):
    result = sfi_core.generate(model, tokenizer, [prompt], max_new_tokens=24)
    print(result.forecast.total_bytes, result.peak_memory_bytes)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    (expected, first), (_, second), (_, third) = (map(int, line.split()) for line in done.stdout.splitlines())
    assert abs(first / expected - 1) < 0.1
    assert third < 1.02 * second  # the first run also loads compiled code, after its peak


def test_a_model_that_sfi_or_transformers_loaded_has_its_folder_s_digest():
    theirs = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED)
    assert model_digest(load(device="cpu")[0]) == model_digest(theirs) == checkpoint_digest(BUNDLED)


def test_random_weights_and_an_unknown_hub_id_have_none():
    assert model_digest(tiny_qwen3()) == ""
    assert source_digest(Source("no/such-model", "no/such-model")) == ""
    assert source_digest(Source("no/such:a.gguf", "no/such", "a.gguf")) == ""


def test_a_gguf_file_s_digest_is_of_its_bytes_and_not_of_its_name(tmp_path):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    file = tmp_path / "a.gguf"
    file.write_bytes(bytes(range(256)) * 64)
    shutil.copy(file, tmp_path / "b.gguf")
    first, second = (source_digest(find_source(str(tmp_path / n))) for n in ("a.gguf", "b.gguf"))
    assert first == second != ""
    file.write_bytes(bytes(range(255, -1, -1)) * 64)
    assert source_digest(find_source(str(file))) != first


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 32}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
KINDS = {
    "yarn": ("qwen3", 32, YARN, 128),
    "yarn whose config has the extended length": ("qwen3", 128, YARN, 128),
    "yarn without an original length": ("qwen3", 64, {"rope_type": "yarn", "factor": 2.0}, 128),
    "linear": ("llama", 32, LINEAR, 128),
    "dynamic": ("llama", 32, DYNAMIC, 128),
    "llama3": ("llama", 128, {"rope_type": "llama3", "factor": 4.0, **LLAMA3}, 128),
    "longrope": ("phi3", 128, {"rope_type": "longrope", **LONG}, 128),
    "by kind of layer": ("olmo3", 32, {"sliding_attention": PLAIN, "full_attention": {**PLAIN, **YARN}}, 128),
    "Gemma 3": ("gemma3_text", 128, {"sliding_attention": PLAIN, "full_attention": {**PLAIN, **LINEAR}}, 128),
    "none": ("qwen3", 128, PLAIN, 128),
}  # fmt: skip


KEPT = ("yarn whose config has the extended length", "dynamic", "llama3", "longrope", "by kind of layer")


@pytest.mark.seam
@pytest.mark.parametrize(
    ("model_type", "stated", "rope", "limit"), [case(*how, kept=kind in KEPT) for kind, how in KINDS.items()], ids=KINDS
)
def test_text_of_as_many_positions_as_scaled_rope_has_runs_as_in_transformers(model_type, stated, rope, limit):
    kinds = {"layer_types": ALTERNATE} if "full_attention" in rope else {}
    rope = {kind: dict(parameters) for kind, parameters in rope.items()} if kinds else {"rope_theta": 1e4, **rope}
    model = build(model_type, max_position_embeddings=stated, rope_parameters=rope, **kinds)
    assert most_positions(model.config) == limit
    prompt = torch.arange(3, 3 + limit - 6)[None]
    alone = model.generate(prompt, max_new_tokens=6)[:, limit - 6 :].tolist()
    with slow_fast(model, None, SMALL, policy="full-kv"):
        assert model.generate(prompt, max_new_tokens=6)[:, limit - 6 :].tolist() == alone
    assert tokens(generate(model, None, prompt.tolist(), SMALL, policy="full-kv", max_new_tokens=6)) == alone
    with pytest.raises(InputError, match=f"7 new tokens must fit the model's {limit} positions"):
        generate(model, None, prompt.tolist(), SMALL, max_new_tokens=7)
