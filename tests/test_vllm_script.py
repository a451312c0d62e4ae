"""benchmarks/vllm.sh without vLLM: its plan, its mistakes, and what it makes of two engines' numbers."""

import argparse
import json
import re
from pathlib import Path

import pytest

from benchmarks.vllm_parts import differences, table
from tests.test_gpu_script import script


def test_the_parts_take_ten_minutes() -> None:
    seconds = re.findall(r"^\S+ +(\d+) s$", script("--plan", name="vllm.sh").stdout, re.MULTILINE)
    assert 540 < sum(map(int, seconds)) <= 570


@pytest.mark.parametrize(("words", "told"), [((), "MODEL must be given"), (("--fast",), "option must be")])
def test_wrong_calls_end_with_one_line(words: tuple[str, ...], told: str) -> None:
    done = script(*words, name="vllm.sh")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert told in done.stderr


def step(**logprobs: float) -> dict[str, float]:
    return {name.removeprefix("t"): value for name, value in logprobs.items()}


def test_differences_are_those_of_the_first_token() -> None:
    """Equal texts have none; a close second is told by its distance; a stranger is far."""
    plain = {"tokens": [[1, 2], [1, 2], [1, 2]], "logprobs": [[step(t1=-0.1), step(t2=-0.5, t3=-0.6)]] * 3}
    assert differences(plain, {"tokens": [[1, 2], [1, 3], [1, 9]]}) == [None, 0.1, 1e9]


@pytest.mark.parametrize(("token", "code"), [(2, 0), (9, 1)])
def test_table_joins_engines(token: int, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only points that both have; the exit code says whether tokens are equal."""
    rows = [{"context": c, "batch": 1, "tokens_per_second": 10.0, "read_ratio": 1.0} for c in (8, 9)]
    fast = rows[0] | {"tokens_per_second": 25.0, "read_ratio": 0.1}
    equal = {"tokens": [[1, 2]], "logprobs": [[step(t1=-0.1), step(t2=-0.5)]]}
    parts = {
        "equality-vllm": equal, "equality-sfi": equal | {"tokens": [[1, token]]},
        "speed-vllm": {"rows": rows}, "speed-sfi": {"rows": [fast]},
    }  # fmt: skip
    (tmp_path / "work").mkdir()
    for name, found in parts.items():
        (tmp_path / "work" / f"{name}.json").write_text(json.dumps(found))
    asked = argparse.Namespace(
        folder=tmp_path / "work", output=tmp_path, model="a/b", load_format="auto", sfi="{}", dry_run=True
    )
    assert table(asked) == code
    assert re.search(r"8 +1 +10\.0 +25\.0 +2\.50 +0\.100", capsys.readouterr().out)
    (file,) = tmp_path.glob("*dry-run-vllm.json")
    assert [one["ratio"] for one in json.loads(file.read_text())["ratios"]] == [2.5]
