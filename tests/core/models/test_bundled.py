"""The bundled checkpoint, its corpus and the example."""

import json
import random
import re
import subprocess
import sys

import pytest

from benchmarks.train_bundled import MAX_LENGTH, build_tokenizer, exact_match, vocabulary
from sfi_core.bundled import example
from sfi_core.bundled.example import draw
from sfi_core.models.load import BUNDLED, load
from tests.covering import case

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
