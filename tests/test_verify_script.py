"""benchmarks/verify.py: every pass on a tiny model, its arithmetic, and what it refuses."""

import json
from pathlib import Path

import pytest

from benchmarks.verify import DENSE, FAST, SLOW, UNSELECTED, main, rates, verification

TINY = {
    "model_type": "qwen3", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip


def test_each_pass_is_measured_and_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    architecture, output = tmp_path / "tiny.json", tmp_path / "found.json"
    architecture.write_text(json.dumps(TINY))
    words = ["--architecture", str(architecture), "--dtype", "float32", "--context", "200"]
    words += ["--queries", "2", "5", "--acceptance", "1", "0.9", "--budget", "16", "--recent", "16"]
    words += ["--turns", "2", "--repeats", "1", "--json-lines", "--output", str(output)]
    main(words)
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    document = json.loads(output.read_text())
    assert document["rows"] == shown
    assert document["settings"]["context"] == [200]
    names = [row["pass"] for row in shown if "pass" in row]
    several = [verification(count) for count in (2, 5)]
    assert sorted(names) == sorted(
        [
            DENSE,
            FAST,
            SLOW,
            UNSELECTED,
            *several,
            *(f"{name}, nothing selected" for name in several),
        ]
    )
    assert all(len(row["samples"]) == 2 and min(row["samples"]) > 0 for row in shown[: len(names)])
    stated = {(row["queries"], row["stated_acceptance"]) for row in shown[len(names) :]}
    assert stated == {(2, 1.0), (2, 0.9), (5, 1.0), (5, 0.9)}
    with pytest.raises(SystemExit):  # the file is there
        main(words)


def test_rates_are_arithmetic_on_the_parts():
    parts = {DENSE: 4.0, FAST: 1.0, SLOW: 5.0, verification(3): 6.0}
    whole = rates(parts, 3, 1.0)
    assert whole == {"full_kv": 1 / 4, "sfi": 3 / (1 + 1 + 5), "lossless": 3 / (1 + 1 + 6)}
    # half of the first tokens are kept, half of the second ones after those; three of four drafts end early
    kept, rejected = 0.5 + 0.25, 0.75
    expected = (kept + 1 + rejected) / (1 + 1 + 6 + rejected * 5)
    assert rates(parts, 3, 0.5)["lossless"] == pytest.approx(expected)
