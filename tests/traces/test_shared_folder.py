"""Several real processes on one results folder: nothing twice, nothing lost, nothing torn."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from pyarrow import parquet

from sfi_core.errors import ConfigError
from sfi_traces.results.evaluation.store import ResultsFolder
from tests.traces import shared_folder
from tests.traces.shared_folder import MANIFEST, SEEDS, Seeds, row_of

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no record locks")


def start(folder, *arguments):
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "kernels", "traces"))
    return subprocess.Popen(
        [sys.executable, shared_folder.__file__, str(folder), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": paths},
    )


def wait_for(path):
    end = time.monotonic() + 600
    while not path.exists():
        assert time.monotonic() < end, f"{path} must come"
        time.sleep(0.01)


@pytest.fixture
def folder(tmp_path):
    ResultsFolder.create(tmp_path / "results", MANIFEST, force=False).leave()
    return tmp_path / "results"


def seeds_of(folder):
    lines = (folder / "samples.jsonl").read_text().splitlines()
    return Counter(json.loads(line)["seed"] for line in lines)


def stopped_of(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    return bool(manifest["finished"]), manifest["stopped"]


def test_processes_share_the_rows_and_the_last_one_completes_the_folder(folder):
    workers = [start(folder) for _ in range(3)]
    (folder / "go").touch()
    assert [worker.wait(600) for worker in workers] == [0, 0, 0]
    assert seeds_of(folder) == dict.fromkeys(range(SEEDS), 1)
    table = parquet.read_table(folder / "results.parquet")
    assert table.column("seed").to_pylist() == list(range(SEEDS))
    assert stopped_of(folder) == (True, None)


def test_a_killed_process_blocks_no_row_and_tears_no_line(folder):
    (folder / "go").touch()
    killed = start(folder, 5)
    wait_for(folder / "stopped")
    try:
        assert start(folder).wait(600) == 0
        # the other process has its claim as long as it lives
        assert seeds_of(folder) == {seed: 1 for seed in range(SEEDS) if seed != 5}
        assert stopped_of(folder) == (False, "1 rows left to other processes")
    finally:
        killed.kill()
        killed.wait(600)
    assert start(folder).wait(600) == 0
    assert seeds_of(folder) == dict.fromkeys(range(SEEDS), 1)
    assert stopped_of(folder) == (True, None)
    assert parquet.read_table(folder / "results.parquet").num_rows == SEEDS


def test_failures_are_forgotten_without_losing_what_others_write(folder):
    """A process that begins rewrites the file while another one appends to it."""
    results = ResultsFolder.resume(folder)
    for seed in range(SEEDS):
        results.append("samples", row_of(seed, "before") | ({"error": "no"} if seed % 2 else {}))
    results.leave()
    (folder / "go").touch()
    workers = [start(folder) for _ in range(2)]
    assert [worker.wait(600) for worker in workers] == [0, 0]
    assert seeds_of(folder) == dict.fromkeys(range(SEEDS), 1)
    rows = ResultsFolder.resume(folder).rows["samples"]
    assert [row["error"] for row in rows] == [None] * SEEDS


def test_a_folder_at_work_is_not_replaced(folder):
    (folder / "go").touch()
    worker = start(folder, 0)
    wait_for(folder / "stopped")
    try:
        with pytest.raises(ConfigError, match="must be free to be replaced, got another process"):
            ResultsFolder.create(folder, MANIFEST, force=True)
    finally:
        worker.kill()
        worker.wait(600)
    ResultsFolder.create(folder, MANIFEST, force=True).leave()
    assert not (folder / "samples.jsonl").exists()


def test_the_rows_of_a_closed_folder_are_in_the_order_of_one_process(folder):
    results = ResultsFolder.resume(folder)
    results.begin()
    for seed in reversed(range(SEEDS)):
        results.append("samples", row_of(seed, "one"))
    results.append("samples", row_of(3, "two"))
    assert results.close(None, [Seeds()]) == 0
    assert [row["seed"] for row in results.rows["samples"]] == list(range(SEEDS))
    assert results.rows["samples"][3]["finish_reason"] == "one"
