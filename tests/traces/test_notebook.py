"""The notebook still runs, and still finds what is stored in it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
NOTEBOOK = ROOT / "examples" / "trace_to_tuned.ipynb"
BETWEEN = "-- the next cell --\n"
NUMBER = re.compile(r"\d[\d,.]*\d|\d")

pytest.importorskip("matplotlib")
pytest.importorskip("optuna")


def code_cells() -> list[dict]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def stored(cell: dict) -> str:
    return "".join("".join(output["text"]) for output in cell["outputs"] if "text" in output)


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]


@pytest.mark.exhaustive  # loads the model and searches: half a minute
def test_the_notebook_finds_again_what_is_stored_in_it(tmp_path):
    """Up to the search all numbers; after it the answer, since a search follows the last digit."""
    cells = code_cells()
    script = f"\nprint({BETWEEN!r}, end='')\n".join("".join(cell["source"]) for cell in cells)
    paths = os.pathsep.join(str(ROOT / folder) for folder in (".", "kernels", "traces"))
    result = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths, "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    *exact, search, figure, use = zip(cells, result.stdout.split(BETWEEN), strict=True)
    assert len(exact) == 4
    for cell, printed in exact:
        assert NUMBER.sub("#", printed) == NUMBER.sub("#", stored(cell))
        assert numbers(printed) == pytest.approx(numbers(stored(cell)), rel=0.02)
    assert numbers(search[1])[0] >= 10, search[1]  # settings on the front
    assert not figure[1]
    first = "answer right, word for word"
    assert use[1].splitlines()[0] == stored(use[0]).splitlines()[0] == first
    assert numbers(use[1])[-1] < numbers(exact[-1][1])[-1]  # less is read than with the own setting
    assert (tmp_path / "tuned.toml").is_file()


def test_the_notebook_is_small_and_has_a_figure():
    assert NOTEBOOK.stat().st_size < 200_000
    outputs = [output for cell in code_cells() for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
    assert [cell["execution_count"] for cell in code_cells()] == [1, 2, 3, 4, 5, 6, 7]
