"""`sfi generate` from the outside: what it prints, and how it says no."""

import io
import json
import re
import sys
from itertools import count
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from sfi_cli.app import main
from sfi_cli.commands.generate.views import CLOSER, report_lines
from sfi_core import SfiConfig, generate
from sfi_core.engine.report_text import fused_lines
from sfi_core.errors import ConfigError
from sfi_core.models.load import BUNDLED, load, load_tokenizer
from tests.cli.test_generate_prompts import batch_file
from tests.cli.trace_commands import sfi as inside
from tests.small_example import PROMPT, small_example

KEYS = {
    "model", "policy", "preset", "config", "trigger_token_ids", "requests", "prefill_seconds",
    "decode_seconds", "decode_tokens_per_second", "peak_memory_bytes", "paths", "versions", "device",
}  # fmt: skip
REQUEST_KEYS = {
    "prompt_tokens", "token_ids", "text", "finish_reason", "slow_steps", "fast_steps", "slow_at", "reasons",
    "mean_attended_tokens", "read_ratio",
}  # fmt: skip


@pytest.fixture(scope="module")
def answered() -> tuple[dict, str]:
    """What `sfi generate` says of the bundled example: the document, and the closing report."""
    code, stdout, stderr = inside("generate", "--json")
    assert code == 0
    return json.loads(stdout), stderr


@pytest.fixture(scope="module")
def example(answered) -> dict:
    return answered[0]


def test_the_first_command_answers_the_bundled_question_word_for_word(answered):
    """8,068 tokens of prompt: the 49 decoding steps had 8,069 to 8,117 cached ones, 8,093 in the mean."""
    _, stderr = answered
    for words in (
        "correct, word for word",
        "full-kv",
        "same tokens  sfi yes, codescan, lossless yes",
        "settings     preset example: recent 128, budget 256, slow_start 1, window_prefill 1",
        "cache read   1,022 of 8,093 tokens a step (12.6%)",
    ):
        assert words in stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "how", [("--policy=codescan",), ("--policy=quest",), ("--set=dense_layers=0",), ("--lossless",)]
)
def test_a_run_reads_as_much_wherever_it_is_told(tmp_path, how):
    """The report, its row of the comparison, JSON, `trace show` and what `sfi eval` sums: attended and to choose."""
    asked = ("generate", PROMPT * 12, *how, "-n9", "--set=budget=40", "--set=recent=20", f"--trace={tmp_path / 'run'}")
    code, stdout, stderr = inside(*asked, "--json")
    assert code == 0
    document = json.loads(stdout)
    (request,) = document["requests"]
    attended, chosen, read = (request[f"{name}_ratio"] for name in ("read", "selection", "cache_read"))
    assert (chosen > 0) == ("dense_layers" not in how[0])
    assert read == attended + chosen == pytest.approx(document["byte_limit"]["read_ratio"], rel=1e-3)
    tokens = request["mean_attended_tokens"] + request["mean_selection_tokens"]
    each = "token given" if "--lossless" in how else "step"
    parts = f"{attended:.1%} attended, {chosen:.1%} to choose"
    share = f"{read:.1%}: {parts}" if chosen else f"{read:.1%}"
    assert f"cache read   {tokens:,.0f} of {tokens / read:,.0f} tokens a {each} ({share})" in stderr
    assert f"tokens/s, cache read {read:.1%}" in stderr
    assert f"slow steps   {request['slow_steps']} of {len(request['token_ids'])} (" in stderr
    _, shown, _ = inside("trace", "show", tmp_path / "run", "--json")
    steps = json.loads(shown)["steps"]
    for name in ("read", "selection", "cache_read"):
        assert steps[f"{name}_ratio"] == pytest.approx(request[f"{name}_ratio"], rel=1e-5)
    assert steps["slow_share"] == request["slow_steps"] / len(request["token_ids"])
    _, shown, _ = inside("trace", "show", tmp_path / "run")
    (line,) = (line for line in shown.splitlines() if line.startswith("cache read"))
    words = f"{tokens:,.0f} tokens a {each}" + f" ({parts})" * (chosen > 0)
    assert line.split(maxsplit=2)[2].startswith(f"{read:.1%}, {words}; fast steps ")


def test_where_the_tokens_part_is_said_with_both_texts(example):
    full = example["comparison"]
    (ours,) = example["requests"]
    other = {**ours, "token_ids": [*ours["token_ids"][:3], 7, 8], "text": f"{ours['text'][:20]}XYZ"}
    lines = report_lines({**example, "comparison": {**full, "requests": [other]}})
    place = f"they part    at step 3 of 50, after {ours['text'][:20]!r}"
    at = lines.index(f"{place}: sfi {ours['text'][20:80]!r}, full-kv 'XYZ'")
    assert lines[at - 1] == "same tokens  sfi no, codescan, lossless no"


def test_a_text_of_one_s_own_is_told_that_the_bundled_model_is_a_toy():
    _, _, stderr = inside("generate", "Once upon a time", "-n", "2")
    assert "toy model: it only recalls sentences; for your own text try --model smollm2" in stderr


def test_a_model_of_a_measured_type_is_told_the_closer_policy_before_it_runs(tmp_path, monkeypatch):
    monkeypatch.setitem(CLOSER, "qwen3", 7)
    (tmp_path / "own").symlink_to(BUNDLED)
    given = ("generate", TEXT, "-n", "2", "--model", str(tmp_path / "own"), "--recent", "4", "--budget")
    assert inside(*given, "4")[2].startswith("advice       on models of type qwen3 codescan was 7 ")
    for options in (("4096",), ("4", "--quiet"), ("4", "--policy", "sfi")):
        assert "on models of type" not in inside(*given, *options)[2]


@pytest.mark.exhaustive
def test_int8_weights_answer_too():
    pytest.importorskip("numba")
    with small_example():
        code, stdout, _ = inside("generate", "--device=cpu", "--set=model.weights=int8", "--no-compare", "--json")
    assert code == 0
    assert json.loads(stdout)["exact_match"]


def test_sfi_finds_the_answer_reading_at_most_a_tenth_of_the_context(example):
    """At least 2K tokens of document, a budget of at most 10 % of them; with the keys scripts rely on."""
    request = example["requests"][0]
    assert set(example) >= KEYS
    assert set(request) >= REQUEST_KEYS
    assert example["byte_limit"]["speedup"] > 1
    limit = example["byte_limit"]
    other, read = (f"{100 * limit[name]:.1f} %" for name in ("codescan_read_ratio", "read_ratio"))
    closer = "--policy codescan should be closer to full attention for fewer reads"
    assert example["advice"] == f"{closer}: {other} of the context, sfi read {read}"
    assert request["prompt_tokens"] >= 2048
    assert example["config"]["budget"] <= request["prompt_tokens"] / 10
    assert example["exact_match"]
    assert request["text"] == example["expected"]
    assert example["comparison"]["requests"][0]["text"] == example["expected"]


@pytest.mark.exhaustive
def test_streaming_llm_fails_the_same_question_with_as_many_tokens(example):
    code, stdout, _ = inside("generate", "--policy", "streaming-llm", "--no-compare", "--json")
    document = json.loads(stdout)
    assert code == 0
    assert not document["exact_match"]
    read = document["requests"][0]["mean_attended_tokens"]
    assert read >= example["config"]["budget"]


def test_the_same_seed_samples_the_same_text():
    arguments = ("generate", PROMPT, "-n", "12", "--temperature", "1.5", "--seed", "3", "--quiet")
    assert inside(*arguments) == inside(*arguments)


def test_an_answer_that_the_limit_cuts_is_judged_as_far_as_it_goes(example):
    (request,) = example["requests"]
    cut = {**request, "text": request["text"][:30], "token_ids": request["token_ids"][:20], "finish_reason": "length"}
    document = {**example, "requests": [cut], "exact_match": False}
    assert report_lines(document)[1] == "answer       correct so far, 4 of 44 words; -n allows 20 tokens"
    wrong = {**document, "requests": [{**cut, "text": "no"}]}
    assert report_lines(wrong)[1] == "answer       not the expected one"


def test_a_prompt_with_nothing_to_leave_out_and_a_single_token_are_said_as_they_are():
    _, _, stderr = inside("generate", PROMPT, "-n", "1")
    assert "note         up to 2,308 tokens (sink, recent and budget) every step reads all: nothing to gain" in stderr
    assert "tokens/s" not in stderr


def test_output_goes_to_a_file_which_is_not_overwritten(tmp_path):
    file = tmp_path / "out.json"
    arguments = ("generate", PROMPT, "-n", "3", "--json", "--quiet", "-o", str(file))
    file.write_text("mine")
    assert inside(*arguments) == (2, "", f"error: output {file} exists; add --force to overwrite it\n")
    assert file.read_text() == "mine"
    assert inside(*arguments, "--force") == (0, "", "")
    assert json.loads(file.read_text())["policy"] == "sfi"
    assert list(tmp_path.iterdir()) == [file]


def test_options_win_over_the_config_file_and_that_over_the_preset(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text("budget = 32\nrecent = 16\n[selector]\nalpha_soft = 0.0\n")
    arguments = ("--preset", "paper", "--config", str(file), "--budget", "48", "-n", "2", "--json")
    config = json.loads(inside("generate", PROMPT, *arguments)[1])["config"]
    assert (config["budget"], config["recent"], config["selector"]["alpha_soft"]) == (48, 16, 0.0)
    assert (config["recent_mode"], config["trigger_delay"]) == ("sliding", 0)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--budget", "0"), 2, "budget must be positive, got 0"),
        (("--policy", "sfl"), 2, "unknown policy 'sfl'; did you mean 'sfi'? expected one of ('"),
        (("--preset", "papers"), 2, "unknown preset 'papers'; did you mean 'paper'? expected one of ('default', "),
        (("--dtype", "int8"), 2, "unknown dtype 'int8'; expected one of "),
        (("--trigger", "qqqq"), 2, "qqqq"),
        (("-n", "0"), 2, "max_new_tokens must be positive, got 0"),
        (("--kv-device-budget", "0%"), 2, "kv_device_budget must be a share such as 20% or a size"),
        (("--kv-device-budget", "20%", "--policy", "full-kv"), 2,
         "policy full-kv cannot run under kv_device_budget; those that can: codescan, freekv, "),
        (("--max-batch", "0"), 2, "max_batch must be positive, got 0"),
        (("--temperature", "-1"), 2, "sampling.temperature must be at least 0, got -1.0"),
        (("--model", "./no/such/folder"), 3, "model folder ./no/such/folder does not exist"),
        (("--prompt-file", "no-such-file"), 3, "prompt"),
        (("--config", "no-such.toml"), 3, "config no-such.toml cannot be read: No such file or directory"),
        (("--set", "engine.backend=triton"), 4, "Triton kernels need a CUDA device, got cpu; use the "),
        (("--chat",), 3, "the model's tokenizer must have a chat template"),
        (("",), 3, "prompt must not be empty, got an empty text"),
        (("-o", "no/such/folder/x"), 1, "cannot be written: No such file or directory"),
        (("--device", "cuda:99"), 4, "device cuda:99 is not on this machine"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_an_exit_code(arguments, code, words, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    prompt = () if {"--prompt-file", ""} & {*arguments} else (PROMPT,)
    exit_code, stdout, stderr = inside("generate", *prompt, *arguments)
    assert (exit_code, stdout) == (code, "")
    assert words in stderr
    assert stderr.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_is_one_line(monkeypatch, capsys):
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(full, write_through=True))
        with pytest.raises(SystemExit) as ended:
            command(monkeypatch, "generate", PROMPT, "-n", "3", "--quiet")
    line = "error: output stdout cannot be written: No space left on device\n"
    assert (ended.value.code, capsys.readouterr().err) == (1, line)


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["sfi", *arguments])
    main()


def test_debug_lets_the_error_through(monkeypatch):
    with pytest.raises(ConfigError, match="budget must be positive, got 0"):
        command(monkeypatch, "generate", PROMPT, "--budget", "0", "--debug")
    with pytest.raises(SystemExit):
        command(monkeypatch, "generate", PROMPT, "--budget", "0")


def least_context_that_pays(document: dict) -> int:
    """Add up the bytes of a run's steps, of keys, values, scores and copies, at every context from 1 on."""
    shape = json.loads((BUNDLED / "config.json").read_text())
    config, (request,) = document["config"], document["requests"]
    layers, heads = shape["num_hidden_layers"], shape["num_key_value_heads"]
    width = shape["hidden_size"] // shape["num_attention_heads"]
    row = layers * heads * 2 * shape.get("head_dim", width) * 4
    decoded = len(request["token_ids"]) - 1
    slow = (request["slow_steps"] - 1) / decoded  # step 0 belongs to the prompt
    packed = config["sink"] + config["budget"]
    fast = packed + config["recent"] + 1 / slow / 2
    for context in count(1):
        refreshing = row * context + 16 * layers * heads * context + 2 * row * packed
        if slow * refreshing + (1 - slow) * row * fast < row * context:
            return context
    raise AssertionError


@pytest.mark.parametrize("budget", [64, 300])
def test_a_run_that_reads_more_than_full_attention_is_advised_against(budget):
    prompt = "Later, Belora hid a red lantern under the old bridge. " * 4
    arguments = (prompt, "-n", "12", "--budget", str(budget), "--recent", "16", "--json")
    _, stdout, stderr = inside("generate", *arguments, "--set", "t_max=2")
    document = json.loads(stdout)
    tokens = least_context_that_pays(document)
    words = "full-kv should be faster here: at this budget and slow rate sfi reads less from"
    expected = f"{words} {tokens:,} tokens on"
    assert document["advice"] == expected
    assert f"advice       {expected}" in stderr.splitlines()


def test_a_run_whose_steps_were_not_replayed_ends_with_a_warning():
    document = {
        "model": "m", "preset": "default", "config": SfiConfig().to_dict(),
        "requests": [], "kv_tiers": None, "policy": "quest", "prefill_seconds": 1.0, "decode_seconds": 2.0,
        "decode_tokens_per_second": 3.0, "peak_memory_bytes": 4, "advice": None, "not_replayed": "",
        "not_compiled": "", "not_blocks": {},
        "is_lossless": False, "recording_seconds": 0.1, "compiling_seconds": 0.0, "steady_tokens_per_second": 3.0,
        "fused": {}, "left_alone": {}, "paths": {"triton.pack": 2},
    }  # fmt: skip
    lines = report_lines(document)
    replayed = report_lines({**document, "paths": {"graph.replay": 1200, "graph.eager": 3}})
    line = "steps        1,200 replayed as CUDA graphs, 3 one kernel after the other"
    assert replayed == [*lines, line]
    warned = report_lines({**document, "not_replayed": "the model waits"})
    assert warned == [*lines, "warning      steps ran one kernel after the other: the model waits"]
    unpacked = report_lines({**document, "not_compiled": "a reason", "not_blocks": {"a": "b", "c": "d"}})
    assert unpacked[-2:] == ["steps        module by module: a reason", "weights      a unpacked: b, and 1 more"]
    full = {**document, "policy": "full-kv", "steady_tokens_per_second": 1.0, "recording_seconds": 0.0}
    compared = report_lines({**document, "recording_seconds": 1.5, "comparison": full})
    assert "quest        prefill 1.00 s, decode 2.00 s (1.50 s of it to record CUDA graphs, once), steady 3.0" in str(
        compared
    )
    assert "speed        3.00 times full-kv's, each measured once" in compared
    lossless = {**document, "policy": "codescan, lossless", "steady_tokens_per_second": 0.5, "compiling_seconds": 9.0}
    both = report_lines({**document, "comparison": full, "lossless": lossless})
    assert "compiled     9.0 s for this processor, once; in no time above" in both
    assert "speed        quest 3.00, codescan, lossless 0.50 times full-kv's, each measured once" in both


def test_a_report_prints_in_python_what_closes_the_command():
    arguments = ("--budget", "16", "--recent", "8", "-n", "6", "--set", "t_max=2")
    _, _, stderr = inside("generate", PROMPT, *arguments, "--device", "cpu")
    model, tokenizer = load()
    config = SfiConfig(budget=16, recent=8, t_max=2)
    lines = str(generate(model, tokenizer, [PROMPT], config, max_new_tokens=6).report).splitlines()
    assert lines[0] == "settings     preset default: recent 8, budget 16, t_max 2"
    assert [line.split("  ")[0] for line in lines[1:4]] == ["tokens", "slow steps", "cache read"]
    assert set(lines[:4]) <= set(stderr.splitlines())
    assert re.fullmatch(r"run {10}prefill .* s, decode .* s, .* tokens/s, cache read .*%", lines[4])


def test_the_closing_report_names_the_classes_that_ran_fused_and_the_others():
    lines = fused_lines({"Qwen3RMSNorm": 113, "Qwen3MLP": 28}, {"Gemma3RMSNorm": 4})
    assert lines == ["fused        Qwen3RMSNorm x 113, Qwen3MLP x 28", "left alone   Gemma3RMSNorm x 4"]
    assert fused_lines({}, {}) == []


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
