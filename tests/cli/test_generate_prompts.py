"""Where `sfi generate` takes its prompts: an argument, stdin, a file, a batch whose answers are resumed."""

import io
import json
import re
import sys
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from sfi_cli.commands.generate.prompts import read_prompts, token_ids
from sfi_core.bundled.example import load_example
from sfi_core.errors import InputError
from sfi_core.models.load import BUNDLED, load_tokenizer
from sfi_core.settings.config import read_toml
from tests.cli.trace_commands import sfi as inside
from tests.small_example import PROMPT


def test_a_prompt_may_come_from_stdin():
    code, stdout, _ = inside("generate", "-", "-n", "4", "--quiet", "--policy", "full-kv", text=PROMPT)
    assert (code, stdout.strip() != "") == (0, True)


MARK = b"\xef\xbb\xbf"  # a byte order mark


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path, monkeypatch):
    file = tmp_path / "file"
    for data, read, expected in (
        ("Once", lambda: read_prompts(None, file, None).entries, ["Once"]),
        ('{"prompt": "Once"}', lambda: read_prompts(None, None, file).entries, ["Once"]),
        ("budget = 16", lambda: read_toml(file), {"budget": 16}),
    ):
        file.write_bytes(MARK + data.encode())
        assert read() == expected
    for encoding in ("utf-8", "cp1252"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(MARK + "é\r\n".encode()), encoding))
        assert read_prompts("-", None, None).entries == ["é\n"]


def test_stdin_of_another_encoding_is_refused_in_one_line(monkeypatch):
    for source in (("-", None), (None, Path("-"))):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9 au lait"), "utf-8"))
        with pytest.raises(InputError, match=r"^stdin is not UTF-8: invalid continuation byte at byte 3$"):
            read_prompts(*source, None)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), "latin-1"))
    assert read_prompts("-", None, None).entries == ["café"]


def batch_file(folder: Path) -> Path:
    lines = [
        {"prompt": PROMPT},
        {"prompt": "Later, " + PROMPT, "max_new_tokens": 2},
        {"prompt": "Then " + PROMPT, "max_new_tokens": 3},
    ]
    file = folder / "batch.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def test_two_at_a_time_give_the_requests_of_all_together_in_the_files_order(tmp_path):
    arguments = ("generate", "--batch", str(batch_file(tmp_path)), "-n", "5", "--json")
    _, stdout, error = inside(*arguments)
    _, queued, error_queued = inside(*arguments, "--max-batch", "2")
    together, document = json.loads(stdout), json.loads(queued)
    assert (together["slots"], document["slots"]) == (3, 2)
    for ours, theirs in zip(document["requests"], together["requests"], strict=True):
        assert ours["token_ids"] == theirs["token_ids"]
        assert ours["text"] == theirs["text"]
        assert {"queued_seconds", "prefill_seconds", "decode_seconds"} <= ours.keys()
    assert len(document["requests"][1]["token_ids"]) <= 2
    assert len(document["requests"][2]["token_ids"]) <= 3
    assert [request["queued_seconds"] > 0 for request in document["requests"]] == [0, 0, 1]
    assert error.startswith("sfi: 3 requests, all together; forecast ")
    assert error_queued.startswith("sfi: 3 requests, 2 at a time; forecast ")
    assert "request 2  time         waited " in error_queued


def test_quiet_says_nothing_of_the_plan(tmp_path):
    file = str(batch_file(tmp_path))
    code, stdout, error = inside("generate", "--batch", file, "-n", "2", "--max-batch", "1", "-q")
    assert (code, error) == (0, "")
    assert re.findall(r"^\[\d\]", stdout, re.MULTILINE) == ["[0]", "[1]", "[2]"]


def answers(file: Path) -> dict[object, dict]:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1]]
    return {row["line"] if row["id"] is None else row["id"]: row for row in rows}


def test_a_batch_s_answers_are_written_by_line_and_resumed(tmp_path, monkeypatch):
    batch, file, other = (tmp_path / name for name in ("batch.jsonl", "out.jsonl", "other.jsonl"))
    hot = {"temperature": 1.5}
    lines = [
        {"prompt": PROMPT, "id": "a"},
        hot | {"prompt": PROMPT},
        hot | {"prompt": f"\u2028\u0085{PROMPT}", "seed": 7},
    ]
    batch.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8")
    command = ("generate", "--batch", str(batch), "-n", "6", "-q", "-o")
    assert inside(*command, str(file)) == (0, "", "")
    whole = answers(file)
    assert whole.keys() == {"a", 2, 3}
    assert all(len(answer["token_ids"]) <= 6 for answer in whole.values())
    alone = inside("generate", PROMPT, "-n", "6", "--temperature", "1.5", "--seed", "1", "-q").stdout
    assert whole[2]["text"] + "\n" == alone, "a line's seed is --seed and its place"
    row = json.dumps(whole["a"])
    other.write_text(f"{row}\n{row[:20]}", encoding="utf-8")  # an answer, and a torn one
    assert inside(*command, str(other))[0] == 2
    assert inside(*command, str(other), "--resume") == (0, "", "")
    assert {name: answer["text"] for name, answer in answers(other).items()} == {
        n: answer["text"] for n, answer in whole.items()
    }
    done = other.read_bytes()
    assert inside(*command[:-2], "-o", str(other), "--resume") == (0, "", f"{other} has an answer to each line\n")
    assert other.read_bytes() == done


def test_resume_is_refused_without_a_file_of_answers(tmp_path):
    batch, file = batch_file(tmp_path), tmp_path / "out.jsonl"
    refusal = (2, "", "error: --resume must come with --batch and -o FILE.jsonl, without --json\n")
    assert inside("generate", PROMPT, "-o", str(file), "--resume") == refusal
    assert inside("generate", "--batch", str(batch), "--resume") == refusal
    file.write_text('{"text": "mine"}\n')
    code, _, error = inside("generate", "--batch", str(batch), "-o", str(file), "--resume")
    assert (code, error) == (
        3,
        f"error: {file}, line 1: must be an answer of sfi generate; resume with another output\n",
    )


BUDGET = ("--kv-device-budget=90%", "--set=engine.kv_page=16", "--budget=16", "--recent=16")


def test_a_device_budget_changes_where_the_cache_lies_and_no_token(tmp_path):
    file = tmp_path / "long.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": PROMPT * times}) for times in (20, 12)))
    batch = ("generate", "--batch", str(file), "-n", "9", "--json", "--policy", "freekv")
    _, whole, _ = inside(*batch, *BUDGET[1:])
    code, stdout, error = inside(*batch, *BUDGET)
    assert code == 0
    document, whole = json.loads(stdout), json.loads(whole)
    assert whole["kv_tiers"] is whole["kv_device_budget"] is None
    tokens, expected = ([r["token_ids"] for r in run["requests"]] for run in (document, whole))
    assert tokens == expected
    tiers = document["kv_tiers"]
    assert document["kv_device_budget"] == "90%"
    assert tiers["allowed_bytes"] > tiers["host_bytes"] * 9 // 10  # the layer left dense is on the device
    assert 0 < tiers["device_bytes"] <= tiers["allowed_bytes"]
    assert re.match(
        r"freekv: 2 requests, all together; forecast [\d.]+ GB of [\d.]+ GB free, KV cache 0\.00 GB on the "
        r"device, 0\.00 GB in host memory\n", error,
    )  # fmt: skip
    shown = f"KV cache     {tiers['device_bytes'] / 1e6:.1f} MB of {tiers['allowed_bytes'] / 1e6:.1f} MB on"
    assert f"\n{shown} the device, {tiers['host_bytes'] / 1e6:.1f} MB in host memory\n" in error
    assert re.search(r"\nrecalled     0\.\d MB a step, waited \d\.\d\d s for them\n", error)


LIMITS = ["0", "-2", "1.5", '"5"', "true"]
MALFORMED = ["{", '"text"', '{"prompt": ""}', '{"messages": []}', '{"text": "x"}']


@pytest.mark.parametrize(
    ("line", "words"),
    [
        *((f'{{"prompt": "y", "max_new_tokens": {limit}}}', limit) for limit in LIMITS),
        *((line, "") for line in MALFORMED),
    ],
)
def test_a_malformed_batch_names_file_and_line(tmp_path, line, words):
    file = tmp_path / "batch.jsonl"
    file.write_text('{"prompt": "x"}\n\n' + line + "\n")
    code, _, error = inside("generate", "--batch", str(file))
    assert code == 3
    assert f"{file}, line 3: " in error
    if words:
        assert error.endswith(f": max_new_tokens must be a positive number, got {words}\n")


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"temprature": 1}, "unknown key 'temprature'; did you mean 'temperature'? expected one of ('prompt', "),
        ({"temperature": -1}, "temperature must be at least 0, got -1"),
        ({"seed": 0.5}, "seed must be a whole number, got 0.5"),
        ({"id": []}, "id must be a text or a number, got []"),
        ({"id": 1}, "id must be of one line, got that of line 1"),
        ({"messages": [{}]}, 'must hold a non-empty "prompt" or "messages", got '),
    ],
)
def test_what_a_line_cannot_say_is_refused_by_name(tmp_path, keys, told):
    file = tmp_path / "batch.jsonl"
    file.write_text('{"prompt": "x", "id": 1}\n' + json.dumps({"prompt": "y", **keys}))
    with pytest.raises(InputError, match=re.escape(f"{file}, line 2: {told}")):
        read_prompts(None, None, file)


def test_a_pipe_is_the_prompt_and_an_empty_one_is_not(monkeypatch):
    for data, entries in ((b"Once", ["Once"]), (b"", [load_example().prompt])):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))
        assert read_prompts(None, None, None).entries == entries
    monkeypatch.setattr(sys, "stdin", None)
    assert read_prompts(None, None, None).expected


def test_a_model_of_one_s_own_asks_for_a_prompt():
    line = "error: prompt must be given for a --model of your own, got none; add a text, -f FILE, or pipe one\n"
    assert inside("generate", "--model", str(BUNDLED)) == (2, "", line)


def test_a_chat_template_that_writes_the_first_token_writes_it_once():
    """Llama 3's template begins with it, and so does what its tokenizer makes of any text."""
    tokenizer = load_tokenizer()
    first = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{first[0]} $A", special_tokens=[first])
    tokenizer.chat_template = "{{ bos_token }}{% for one in messages %}{{ one['content'] }}{% endfor %}"
    plain, chat = (token_ids(" Belora", tokenizer, chat=chat) for chat in (False, True))
    assert plain == chat
    assert plain.count(first[1]) == 1
