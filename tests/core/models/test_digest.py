"""What tells a loaded model's checkpoint from others."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from sfi_core.models.load import BUNDLED, load
from sfi_core.models.source import Source, checkpoint_digest, find_source, model_digest, source_digest
from tests.core.conftest import tiny_qwen3


def test_a_model_that_sfi_or_transformers_loaded_has_its_folder_s_digest():
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED)
    assert model_digest(load(device="cpu")[0]) == model_digest(theirs) == checkpoint_digest(BUNDLED)


def test_random_weights_and_an_unknown_hub_id_have_none():
    assert model_digest(tiny_qwen3()) == ""
    assert source_digest(Source("no/such-model", "no/such-model")) == ""
    assert source_digest(Source("no/such:a.gguf", "no/such", "a.gguf")) == ""


def test_a_gguf_file_s_digest_is_of_its_bytes_and_not_of_its_name(tmp_path: Path):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    file = tmp_path / "a.gguf"
    file.write_bytes(bytes(range(256)) * 64)
    shutil.copy(file, tmp_path / "b.gguf")
    first, second = (source_digest(find_source(str(tmp_path / n))) for n in ("a.gguf", "b.gguf"))
    assert first == second != ""
    file.write_bytes(bytes(range(255, -1, -1)) * 64)
    assert source_digest(find_source(str(file))) != first
