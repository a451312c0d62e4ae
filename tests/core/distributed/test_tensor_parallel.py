"""Two ranks under gloo do what one process does; what cannot be shared is refused by all of them."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import typer

from sfi_cli.app import check_command, one_voice
from sfi_cli.terminal.output import Output, message
from sfi_core import AuditConfig, generate, load
from sfi_core.distributed import ranks as ranks_module
from sfi_core.distributed.ranks import ALONE, Ranks
from sfi_core.errors import ConfigError, InputError, MemoryForecastError, RankLostError
from sfi_core.models.source import checkpoint_digest
from sfi_core.sizes.memory import Forecast, check_fits
from sfi_traces import ParquetObserver, Trace
from sfi_traces.export import Query
from sfi_traces.export.perfetto import perfetto_text
from sfi_traces.model.check import check
from sfi_traces.summary import summarize
from tests import tensor_parallel
from tests.covering import first
from tests.tensor_parallel import CASES

ROOT = Path(__file__).parents[3]


def run_ranks(mode: str, folder: Path, **variables: str) -> list[tuple[int, str, str]]:
    """Run two ranks as torchrun would; return each one's exit code, stdout and stderr."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "traces")]
    shared = {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        "TRITON_INTERPRET": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # as the command line sets it before it imports torch
        **variables,
    }  # fmt: skip
    command = [sys.executable, tensor_parallel.__file__, mode, str(folder)]
    done = subprocess.run(command, env=shared, capture_output=True, check=True)
    said = ([(folder / f"{name}-{rank}").read_text() for name in ("stdout", "stderr")] for rank in (0, 1))
    return [(code, *words) for code, words in zip(json.loads(done.stdout), said, strict=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    models: Path = tmp_path_factory.mktemp("ranks")
    tensor_parallel.save_models(models)
    return models


@pytest.fixture(scope="module")
def one(folder) -> dict:
    return tensor_parallel.some_cases(folder, tensor_parallel.WORKS)


@pytest.fixture(scope="module")
def ended(folder) -> list[tuple[int, str, str]]:
    """How two ranks end that run all cases, and of which the first dies after them."""
    return run_ranks("works", folder)


@pytest.fixture(scope="module")
def ranks(folder, ended) -> list[dict]:
    return written(folder, "works", ended)


def written(folder: Path, mode: str, ended) -> list[dict]:
    paths = [folder / f"{mode}-{rank}.json" for rank in (0, 1)]
    assert all(path.exists() for path in paths), ended
    return [json.loads(path.read_text()) for path in paths]


@pytest.fixture(scope="module")
def others(folder) -> tuple[dict, list[dict]]:
    """What one process and two ranks do in all other cases."""
    alone = tensor_parallel.some_cases(folder, [*CASES][len(tensor_parallel.WORKS) :])
    return alone, written(folder, "others", run_ranks("others", folder))


@pytest.mark.parametrize("name", first(CASES, len(tensor_parallel.WORKS)))
def test_two_ranks_choose_and_select_what_one_process_does(request, name):
    if name in tensor_parallel.WORKS:
        cases, ranks = request.getfixturevalue("one"), request.getfixturevalue("ranks")
    else:
        cases, ranks = request.getfixturevalue("others")
    for rank in ranks:
        assert rank["cases"][name]["tokens"] == cases[name]["tokens"]
        assert rank["cases"][name]["slow_at"] == cases[name]["slow_at"]
    ours, theirs = (rank["cases"][name]["selected"] for rank in ranks)
    assert ours.keys() == theirs.keys() == cases[name]["selected"].keys()
    for where, index_HK in cases[name]["selected"].items():
        assert ours[where] + theirs[where] == index_HK, where


@pytest.mark.parametrize("policy", [*tensor_parallel.GRAPHED, "given up"])
def test_replayed_steps_of_ranks_are_the_eager_ones(ranks, policy):
    """Each calls the others; where the last rank cannot record a step, none replays any."""
    for rank in ranks:
        eager, graphed = rank["replays"][policy]
        for what in ("tokens", "steps", "selected"):
            assert graphed[what] == eager[what]
        assert (graphed["paths"].get("graph.replay", 0) > 2) == (policy != "given up")
        assert graphed["eager"][1] == ("rank 1: item waits for the device" if policy == "given up" else "")


def test_steps_of_ranks_are_not_compiled_and_the_report_says_why(ranks):
    for rank in ranks:
        assert rank["cases"]["llama default"]["eager"] == [
            "tensor parallelism, whose ranks add up sums within a layer", ""
        ]  # fmt: skip


@pytest.mark.parametrize("name", ["llama default", "llama paper"])
def test_cases_have_several_slow_steps_that_differ_between_requests(name, one):
    slow_at = one[name]["slow_at"]
    assert len({tuple(steps) for steps in slow_at}) > 1
    assert all(1 < len(steps) < tensor_parallel.STEPS for steps in slow_at)


def test_hosted_ranks_sample_with_the_first_ones_seed(one, ranks):
    """Each rank seeded differently; `one` is the first one's."""
    tokens = one["hosted sampled"]["tokens"]
    assert tokens == ranks[0]["cases"]["hosted sampled"]["tokens"] != one["llama default"]["tokens"]


def test_ranks_take_the_first_one_s_tokens(ranks):
    """Their logits may differ by rounding; what decides about a draft must not."""
    first, second = (tensor_parallel.picked(rank) for rank in (0, 1))
    assert first != second
    assert [rank["picked"] for rank in ranks] == [first, first]


REFUSED = {
    "checkpoints": "ConfigError: model must be the same on every rank, got another on rank 1 than on 0",
    "missing": "InputError: rank 1: model folder FOLDER/nowhere does not exist",
    "heads": "UnsupportedModelError: num_attention_heads must be a multiple of the 2 ranks, got 3",
    "no plan": "UnsupportedModelError: gpt2 must have a tensor-parallel plan in transformers to run on 2 "
    "ranks, got none",
    "all heads": "UnsupportedModelError: olmo2 must split its attention by heads to run on 2 ranks; its "
    "tensor-parallel plan shows every rank all of them",
    "device": "ConfigError: device must be auto, cpu or cuda under torchrun, got cuda:0",
    "prompts": "ConfigError: prompts must be the same on every rank, got another on rank 1 than on 0",
    "config": "ConfigError: config must be the same on every rank, got another on rank 1 than on 0",
    "seed": "ConfigError: seed must be the same on every rank, got another on rank 1 than on 0",
    "length": "ConfigError: max_new_tokens must be the same on every rank, got another on rank 1 than on 0",
    "graphs": "BackendError: CUDA graphs need a CUDA device, got cpu; use --set engine.graphs=false",
    "kinds": "ConfigError: kind of step must be the same on every rank, got another on rank 1 than on 0",
    "recording": "BackendError: rank 1: item waits for the device",
    "hosted": "ConfigError: prompts must be the same on every rank, got another on rank 1 than on 0",
    "hosted tokens": "SfiError: every rank must sample the same tokens, got [[5], [6]]; seed them alike",
    "numerics": "NumericsError: logits must be finite, got NaN or infinity at step 0 in request 0",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_gets_the_same_line_on_every_rank(name, folder, ranks):
    wanted = REFUSED[name].replace("FOLDER", str(folder))
    assert [rank["refusals"][name] for rank in ranks] == [wanted, wanted]


def test_a_rank_that_dies_ends_the_others_with_one_line(ended):
    _, (code, data, words) = ended
    assert (code, data) == (1, "")
    assert words.endswith(
        "error: rank 1 of 2 must hear from every other, got a closed connection; one of them has died\n"
    )


@pytest.mark.exhaustive  # a rank that dies takes the same way out
def test_a_rank_that_hangs_ends_the_others_within_the_timeout(tmp_path):
    (code, _, words), (other, _, _) = run_ranks("hangs", tmp_path, SFI_TIMEOUT="4")
    assert (code, other) == (1, -signal.SIGKILL), "the other was still there"
    assert words.startswith("error: rank 0 of 2 must hear from every other, got no answer in time")
    assert words.count("\n") == 1


def test_ranks_write_one_document_and_a_trace_of_all(ended, folder, tmp_path):
    """What `sfi generate` says it does under torchrun, through `sfi trace record`, which is that and more."""
    (_, said, _), (_, nothing, _) = ended
    assert nothing == ""
    document, _ = json.JSONDecoder().raw_decode(said)  # the text of the run that ends them follows
    model, tokenizer = load(device="cpu")
    with ParquetObserver(tmp_path / "one", tokenizer=tokenizer) as observer:
        alone = generate(
            model, tokenizer, [tensor_parallel.TEXT], tensor_parallel.COMMANDS, max_new_tokens=6,
            observers=[observer], audit=AuditConfig(every=5),
        )  # fmt: skip
    assert document["ranks"] == 2
    assert document["requests"][0]["slow_steps"] > 1
    assert document["requests"][0]["token_ids"] == alone.report.requests[0].token_ids
    about = json.loads((folder / "run" / "manifest.json").read_text())["model"]
    assert about["tensor_parallel"] == {"rank": 0, "ranks": 2}
    assert (about["query_heads"], {layer["heads"] for layer in about["layers"]}) == (4, {2})
    assert not (folder / "run" / "rank-00001").exists()
    check_joined(Trace.open(folder / "run"), Trace.open(tmp_path / "one"))


def check_joined(joined: Trace, expected: Trace) -> None:
    """The ranks' trace is that of one process: same steps, selections and supports of all heads."""
    assert check(joined)["problems"] == check(joined)["notes"] == []
    heads = [layer["heads"] for layer in joined.manifest["model"]["layers"]]
    assert heads == [layer["heads"] for layer in expected.manifest["model"]["layers"]]
    for name, columns in {
        "prompts": ["request", "position", "token_id"],
        "steps": ["request", "step", "token_id", "slow", "reason", "attended_tokens", "audited"],
        "selections": ["request", "step", "layer", "head", "selected", "added", "removed", "positions"],
        "supports": ["request", "step", "layer", "head", "positions"],
    }.items():
        assert joined.table(name, columns).equals(expected.table(name, columns)), name
    shown = summarize(joined)
    assert shown["audit"]["heads"][0].keys() == summarize(expected)["audit"]["heads"][0].keys()
    both = "SELECT rank, count(*), min(begin_us) >= 0 FROM timings GROUP BY rank ORDER BY rank"
    (((_, spans, _), *_),) = batches = [*Query(joined, both).batches()]
    assert batches == [[(0, spans, True), (1, spans, True)]]
    events = json.loads("".join(perfetto_text(joined, lambda done, total: None)))["traceEvents"]
    timed = Counter(event["pid"] for event in events if event["ph"] == "X")
    assert timed == {1: spans + 6, 2: spans}


def test_a_command_that_ranks_cannot_share_is_refused(monkeypatch):
    check_command(["doctor"])
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    check_command(["generate", "--json"])
    check_command(["trace", "record", "-n", "3"])
    wanted = "^under torchrun the command must be sfi generate and sfi trace record, got sfi trace show$"
    with pytest.raises(ConfigError, match=wanted):
        check_command(["trace", "show", "run"])


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_writes(monkeypatch, capsys, tmp_path, rank):
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    with one_voice():
        typer.echo("data")
        message("a remark")
        with Output(tmp_path / "out", force=False, quiet=True) as output:
            output.text("data")
    assert capsys.readouterr() == (("data\n", "a remark\n") if rank == 0 else ("", ""))
    assert (tmp_path / "out").exists() == (rank == 0)


def test_a_digest_samples_weights_of_any_format(tmp_path):
    weights = tmp_path / "pytorch_model.bin"
    weights.write_bytes(b"0" * 100_000)
    before = checkpoint_digest(tmp_path)
    weights.write_bytes(b"0" * 50_000 + b"1" + b"0" * 49_999)
    assert checkpoint_digest(tmp_path) != before


def test_one_process_asks_nobody():
    """A process group would be missed: none has been made."""
    tensor = torch.rand(2, 3)
    assert ALONE.gather(tensor).shape == (1, 2, 3)
    ALONE.check_same({"prompts": [1]})
    with pytest.raises(InputError, match="mine"), ALONE.agreed():
        raise InputError("mine")
    with pytest.raises(RuntimeError, match="gloo/transport"), ALONE.guarded():
        raise RuntimeError("gloo/transport")


def test_a_mistake_of_ours_is_not_taken_for_a_lost_rank():
    with pytest.raises(RuntimeError, match="shapes differ"), Ranks(0, 2).guarded():
        raise RuntimeError("shapes differ")
    with pytest.raises(RankLostError), Ranks(0, 2).guarded():
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf"])
def test_a_timeout_that_is_no_time_is_refused(monkeypatch, text):
    monkeypatch.setenv("SFI_TIMEOUT", text)
    with pytest.raises(ConfigError, match=r"^SFI_TIMEOUT must be a positive number of seconds, got"):
        ranks_module.timeout()


def test_memory_of_a_machine_is_shared_by_its_ranks(monkeypatch):
    expected = Forecast(
        resident_bytes=0, kv_bytes=600, norm_bytes=0, packed_bytes=0, summary_bytes=0,
        sliding_bytes=0, workspace_bytes=0
    )  # fmt: skip
    monkeypatch.setattr("sfi_core.sizes.memory.free_bytes", lambda _: 1000)
    check_fits(expected, torch.device("cpu"))
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(MemoryForecastError):
        check_fits(expected, torch.device("cpu"))
