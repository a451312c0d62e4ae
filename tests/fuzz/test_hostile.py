"""Hostile files, configs and requests end in an answer or in one line: 200 of them here, 20,000 in `make fuzz`."""

import json

import pytest

pytest.importorskip("hypothesis", reason="hypothesis is not installed")

from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import cases
from tests.fuzz.hostile import CORPUS, KINDS


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_case_ends_in_an_answer_or_in_one_line(kind):
    """The smallest case that does not is in the error; put it into the corpus with its mending."""

    @given(st.data())
    def tried(data):
        recipe = data.draw(KINDS[kind])
        try:
            cases.run(recipe)
        except Exception as error:
            error.add_note(f"corpus: {json.dumps(recipe)}")
            raise

    tried()


@pytest.mark.parametrize("file", sorted(CORPUS.glob("*.json")), ids=lambda file: file.stem)
def test_a_case_of_the_corpus_stays_mended(file):
    for line in file.read_text().splitlines():
        cases.run(json.loads(line))
