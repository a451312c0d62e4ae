"""`sfi generate --lossless`: full attention's tokens, what is shown and what is refused."""

import json

import pytest
from transformers import CONFIG_MAPPING

from sfi_core.models.load import load_tokenizer
from tests.cli.test_generate_prompts import batch_file
from tests.cli.trace_commands import sfi as inside
from tests.small_example import PROMPT

TEXT = PROMPT * 20
SETTINGS = ("--budget", "16", "--recent", "16", "--dtype", "float32")


def tokens(document):
    return [request["token_ids"] for request in document["requests"]]


@pytest.mark.parametrize("sampling", [(), ("--temperature", "1.2", "--seed", "3")])
def test_the_tokens_are_full_attentions(tmp_path, sampling):
    batch = ("generate", "--batch", str(batch_file(tmp_path)), "-n", "9", "--json", *SETTINGS)
    code, stdout, error = inside(*batch, *sampling, "--lossless", "--draft-max", "4")
    assert code == 0
    document = json.loads(stdout)
    _, full, _ = inside(*batch, *sampling, "--policy", "full-kv")
    assert tokens(document) == tokens(json.loads(full))
    assert document["is_lossless"]
    drafted = [request["lossless"]["drafted"] for request in document["requests"]]
    assert max(drafted) > 0
    assert "drafted tokens kept, " in error
    assert error.count(" tokens a token given (") == len(drafted)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--draft-max", "0", "--lossless"), "draft.max_tokens must be at least 1, got 0"),
        (("--draft-max", "4"), "--draft-max must come with --lossless, got it alone"),
        (("--lossless", "--policy=freekv"), "policy freekv cannot draft for a lossless run; those "),
        (("--set=draft.adaptive=false",), "draft.adaptive must come with --lossless, got it alone"),
        (("--lossless", "--kv-device-budget", "20%"), "lossless must be off with kv_device_budget"),
        (("--lossless", "--audit", "4", "--trace", "run"), "lossless must be off with an audit"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_before_a_model_is_loaded(options, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sfi_core.models.load.load", None)
    code, stdout, error = inside("generate", TEXT, "-n", "2", *options)
    assert (code, stdout) == (2, "")
    assert words in error
    assert error.count("\n") == 1


def test_a_rotation_that_depends_on_the_pass_is_refused_before_weights_are_read(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    load_tokenizer().save_pretrained(tmp_path)
    CONFIG_MAPPING["llama"](rope_parameters=rope).save_pretrained(tmp_path)
    given = ("generate", TEXT, "-n", "2", "--model", str(tmp_path))
    code, _, error = inside(*given, "--lossless")
    assert (code, error.count("\n")) == (2, 1)
    assert "lossless must be off with RoPE of the kind dynamic" in error
    code, _, error = inside(*given)  # without it, the weights are what is missing
    assert code == 3
