"""`sfi trace show` and `sfi trace check` from the outside."""

import json
import subprocess
import sys

import pytest
from pyarrow import parquet

from sfi_traces.model.trace import Trace
from tests.cli.trace_commands import trace
from tests.traces.made import make_trace
from tests.traces.small import fixed_folder, redact, rows, spoil, write_part, write_trace

SECTIONS = {
    "trace", "request", "layer", "run", "steps", "triggers", "stability", "audit", "logits",
    "selections", "latency", "phases", "missing", "drift", "head_similarity",
    "query_cosine", "corrections", "recalls", "lossless", "health",
    "answers", "disagreements",
}  # fmt: skip


recorded = fixed_folder(steps=30, requests=2, policy="sfi")


@pytest.fixture(scope="module")
def document(recorded) -> dict:
    ended = trace("show", recorded, "--json")
    assert (ended.code, ended.stderr) == (0, "")
    return json.loads(ended.stdout)


@pytest.fixture(scope="module")
def shown(recorded) -> str:
    return trace("show", recorded).stdout


def test_the_document_has_every_section(document):
    assert set(document) == SECTIONS
    assert document["missing"] == []


def test_one_screen_says_what_ran_what_full_attention_would_have_said_and_what_is_wrong(recorded, document, shown):
    """Fifteen lines: those of one request, two more for a second request."""
    lines = shown.splitlines()
    assert len(lines) <= 17
    texts = dict(line.split("  ", 1) for line in lines)
    assert [disagreement["kl_next_token"] for disagreement in document["disagreements"]] == sorted(
        (row["kl_next_token"] for row in rows(Trace.open(recorded), "logits") if not row["argmax_agrees"]), reverse=True
    )
    worst = document["disagreements"][0]
    said = f"full attention ' river' ({worst['dense_probability']:.0%}), KL {worst['kl_next_token']:.3f}"
    assert f"request {worst['request']}, step {worst['step']}: {worst['token_text']!r}, {said}" in "\n".join(lines)
    for name, words in (
        ("request 0", "200 tokens of prompt, 30 steps: ' the cat sat"),
        ("slow steps", "10.0%, 6 of 60 (4 trigger, 2 first)"),
        ("full attention's token", f"{document['logits']['argmax_agreement']:.1%}, of 54 audited fast steps"),
        ("retained mass", f"least {document['audit']['heads'][0]['retained_mass']['mean']:.3f} in layer"),
        ("health", "0 problems, by"),
        ("tokens/s", "with the audit's work; record without it for the speed"),
        ("more", "--full has every table"),
    ):
        assert words in texts[name], (name, texts)


def test_the_tables_have_the_documents_numbers(recorded, document):
    text = trace("show", recorded, "--full").stdout
    head = document["audit"]["heads"][0]
    kinds = {kind["kind"]: kind for kind in document["latency"]["kinds"]}
    for words in (
        "made-up (Qwen3ForCausalLM), torch on cpu",
        f"{document['stability']['within']['mean']:.3f}",
        f"{document['stability']['across']['p95']:.3f}",
        f"{head['retained_mass']['mean']:.3f} in layer {head['layer']} head {head['head']}",
        f"KL {document['logits']['kl_next_token']['mean']:.4f} nats",
        f"lambda* is clipped in {document['selections']['clipped_share']:.1%}",
        f"{kinds['fast']['p99_us']:,.1f} us",
        f"{document['steps']['read_ratio']:.1%}, ",
    ):
        assert words in text
    assert "not recorded" not in text
    assert "'.'     90" in text


@pytest.mark.exhaustive
def test_what_was_observed_corrected_and_recalled_is_in_the_tables(tmp_path):
    folder = make_trace(tmp_path / "run", steps=30, policy="freekv")
    text, json_text = (trace("show", folder, *way).stdout for way in (["--full"], ["--json"]))
    document = json.loads(json_text)
    drift = document["drift"]["bins"][3]
    lines = [line.split() for line in text.splitlines()]
    assert ["5-8", f"{drift['mean']:.3f}", str(drift["n"])] in lines
    alike = document["head_similarity"]
    assert f"{alike['within']:.3f} within a layer, {alike['between']:.3f} between layers" in text
    cosine = document["query_cosine"]
    shares = [f"{share:.1%}" for share in cosine["below"]]
    assert ["all", f"{cosine['mean']:.3f}", f"{cosine['min']:.3f}", *shares, "116"] in lines
    corrections = document["corrections"]
    counts = [f"{corrections['share']:.1%}", str(corrections["corrected"]), str(corrections["n"])]
    assert ["all", *counts] in lines
    recalled = document["recalls"]
    assert f"recalled from the host: {recalled['step_bytes']:,.0f} bytes a step" in text
    assert f"waited {recalled['step_waited_us']:.1f} us a step" in text


def test_what_is_missing_is_said_with_its_option(tmp_path):
    folder = make_trace(tmp_path / "run", steps=12, audit=None)
    text = trace("show", folder, "--full").stdout
    assert (
        "retained mass, output error, query cosine; next-token KL and argmax agreement (record with --audit 1)" in text
    )
    assert text.count("not recorded") == 2
    assert "not recorded" not in trace("show", folder).stdout
    assert "Overlap" not in text


def test_one_request_and_layer_are_shown(recorded):
    data = json.loads(trace("show", recorded, "--request", 1, "--layer", 0, "--json").stdout)
    assert data["steps"]["steps"] == 30
    ended = trace("show", recorded, "--request", 7)
    assert (ended.code, ended.stdout) == (2, "")
    assert ended.stderr == "error: request must be one of 0 to 1, got 7\n"


def test_the_output_is_not_overwritten(recorded, shown, tmp_path):
    path = tmp_path / "show.json"
    path.write_text("mine")
    refused = (2, "", f"error: output {path} exists; add --force to overwrite it\n")
    assert (trace("show", recorded, "-o", path), path.read_text()) == (refused, "mine")
    assert trace("show", recorded, "-o", path, "--force") == (0, "", f"Wrote {path}\n")
    assert path.read_text() == shown
    assert [p.name for p in tmp_path.iterdir()] == ["show.json"]


@pytest.mark.parametrize("command", [["show"], ["check"], ["sql", "SELECT 1"], ["export", "--format", "perfetto"]])
def test_what_is_no_trace_is_refused_in_one_line(tmp_path, command):
    name, *rest = command
    if name == "export":
        rest += ["-o", str(tmp_path / "out")]
    ended = trace(name, tmp_path / "none", *rest)
    assert ended == (3, "", f"error: {tmp_path / 'none'} is not a trace: it has no manifest.json\n")
    assert list(tmp_path.iterdir()) == []


def test_show_runs_without_torch(recorded, environment):
    code = (
        "import sys\n"
        "from sfi_cli.app import app\n"
        f"try:\n    app(['trace', 'show', {str(recorded)!r}])\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)


@pytest.mark.exhaustive
def test_a_truncated_part_is_a_line_and_check_names_it(tmp_path, command, environment):
    """In a process of its own: nothing but the line on stderr."""
    folder = make_trace(tmp_path / "run", steps=12, policy="sfi")
    spoil(folder / "supports" / "part-00000.parquet")
    words = [*command, "trace", "show", folder]
    shown = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert (shown.returncode, shown.stdout) == (3, "")
    line = f"error: trace {folder} has a damaged part; `sfi trace check {folder}` names it\n"
    assert shown.stderr == line
    checked = trace("check", folder)
    assert (checked.code, checked.stderr) == (3, "")
    assert "problem: supports/part-00000.parquet is damaged or truncated" in checked.stdout
    assert checked.stdout.endswith("not sound\n")


def test_check_of_a_sound_trace(recorded):
    ended = trace("check", recorded)
    assert (ended.code, ended.stderr) == (0, "")
    assert "request 1: 30 steps, the last is 29" in ended.stdout
    assert "were compared with the token ids" in ended.stdout
    assert ended.stdout.endswith("\nsound\n")
    assert json.loads(trace("check", recorded, "--json").stdout)["sound"] is True


@pytest.mark.exhaustive
def test_check_ends_with_1_for_a_health_problem_and_show_says_so(tmp_path):
    folder = make_trace(tmp_path / "run", steps=60, policy="sfi")
    part = folder / "selections" / "part-00000.parquet"
    rows = parquet.read_table(part).to_pylist()
    write_part(folder, "selections", [row | {"evidence_norm2": 0.0} for row in rows])
    ended = trace("check", folder)
    assert (ended.code, ended.stderr) == (1, "")
    assert "health problem: evidence_broken: 100 % of the refreshes" in ended.stdout
    assert ended.stdout.endswith("\nsound, but not healthy\n")
    document = json.loads(trace("check", folder, "--json").stdout)
    assert (document["sound"], document["health"]["sound"]) == (True, False)
    assert "health problem: evidence_broken" in trace("show", folder).stdout


def test_a_trace_of_replayed_steps_says_what_it_lacks(tmp_path):
    steps = [
        {"request": 0, "step": step, "slow": step == 0, "batch_step": step, "graphs": step > 1} for step in range(4)
    ]
    reason = "the model waits"
    folder = write_trace(tmp_path / "run", {"steps": steps}, not_replayed=reason)
    text = trace("show", folder, "--full").stdout
    assert "CUDA graphs  2 of 3 decoding steps replayed: the model waits" in text
    assert "record with --set trace.spans=true" in text


def test_a_step_is_shown_with_the_words_that_it_read(recorded):
    asked = ("show", recorded, "--request=1", "--step=17", "--layer=1", "--head=0")
    ended = trace(*asked, "--json")
    assert (ended.code, ended.stderr) == (0, "")
    document = json.loads(ended.stdout)
    assert document["places"] == [{"layer": 1, "heads": [0]}]
    text = trace(*asked).stdout
    missed = document["missed"][0]
    for words in (
        "17: fast, gave ' dog'",
        "full attention  the same token, KL 0.0",
        "step 10",
        "Passages that it read; all hold",
        "Passages that dense attention looked at, and the step did not read",
        f"{missed['first']}-{missed['last']}",
        f"{missed['mass']:.4f}",
    ):
        assert words in text
    assert len(text.splitlines()) < 60


def test_what_a_step_read_is_refused_in_one_line(recorded, tmp_path):
    hidden = redact(make_trace(tmp_path / "run", steps=12, policy="sfi"))
    for folder, option, code, line in (
        (recorded, "--head=1", 2, "head must come with --step, got --head 1 alone"),
        (recorded, "--step=99", 2, "step must be in 0 to 29 of request 0, got 99"),
        (hidden, "--step=5", 3, f"trace {hidden} has no text: it was redacted"),
    ):
        assert trace("show", folder, option) == (code, "", f"error: {line}\n")


def test_the_example_s_trace_is_sound_and_answers_the_papers_question(tmp_path):
    example = tmp_path / "run"
    assert trace("record", "-o", example, "--audit", "1", "--set", "audit.top=512", "-q").code == 0
    ended = trace("show", example, "--json")
    document = json.loads(ended.stdout)
    assert document["missing"] == []
    assert document["steps"]["reasons"] == {"trigger": 4, "first": 1}
    within, across = (document["stability"][where]["mean"] for where in ("within", "across"))
    assert within > across
    text = trace("show", example, "--full").stdout
    assert "within a sentence" in text
    assert "across a boundary" in text
    assert f"{within:.3f}" in text
    assert trace("check", example).stdout.endswith("\nsound\n")
