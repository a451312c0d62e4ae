"""A recorded run step by step."""

import numpy as np
import pytest

from sfi_core.errors import ConfigError, TraceError
from sfi_traces.read.reader import Trace
from sfi_traces.replay.playback import PROMPT_TAIL, REDACTED, Playback
from tests.traces.made import PROMPT, WORDS, make_trace, overlap
from tests.traces.test_replay_schedule import redact

WIDTH = 50


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Trace:
    folder = tmp_path_factory.mktemp("sfi") / "trace"
    return Trace.open(make_trace(folder, policy="sfi", requests=2, seed=4))


@pytest.fixture(scope="module")
def playback(trace) -> Playback:
    return Playback.load(trace, request=1)


def rows(trace: Trace, table: str, step: int, **wanted: int) -> list[dict]:
    wanted = {"request": 1, "step": step} | wanted
    return [
        row for row in trace.table(table).to_pylist()
        if all(row[name] == value for name, value in wanted.items())
    ]  # fmt: skip


def test_a_frame_is_its_row(trace, playback):
    assert playback.steps == 60
    assert playback.slow_at == [0, 10, 20, 30, 40, 50]
    for step in (0, 7, 10, 59):
        frame, (row,) = playback.frame(step), rows(trace, "steps", step)
        names = ("slow", "reason", "steps_since_slow", "attended_tokens", "context_tokens")
        assert [getattr(frame, name) for name in names] == [row[name] for name in names]
        assert (frame.step, frame.sentence_index, frame.token) == (
            step, row["sentence"], row["token_text"],
        )  # fmt: skip


def test_text_is_split_at_the_current_sentence(trace, playback):
    """Step 19 generates the full stop of the sentence that began at step 10."""
    texts = [row["token_text"] for row in trace.table("steps").to_pylist() if row["request"] == 1]
    frame = playback.frame(19)
    assert (frame.sentence, frame.token) == ("".join(texts[10:19]), ".")
    assert frame.before.endswith(" home" + "".join(texts[:10]))
    assert frame.before.startswith(f" {WORDS[0]} {WORDS[1]}")
    assert len(frame.before.split()) == PROMPT + 9  # the full stop of x_9 is no word of its own
    assert PROMPT < PROMPT_TAIL
    assert playback.frame(20).sentence == ""
    assert playback.frame(20).before == frame.before + frame.sentence + frame.token


def test_measures_are_means_over_layers_and_heads(trace, playback):
    found = rows(trace, "supports", 13)
    frame = playback.frame(13)
    for name in ("retained_mass", "overlap_previous_step", "overlap_last_refresh"):
        assert frame.measures[name] == pytest.approx(np.mean([row[name] for row in found]))
    assert frame.lambda_star is None
    refresh = rows(trace, "selections", 20)
    assert playback.frame(20).lambda_star == pytest.approx(
        np.mean([r["lambda_star"] for r in refresh])
    )
    assert playback.frame(0).measures["overlap_previous_step"] is None


def masses(trace: Trace, step: int, length: int) -> np.ndarray:
    bins = np.zeros(WIDTH)
    for row in rows(trace, "supports", step):
        for position, mass in zip(row["positions"], row["mass"], strict=True):
            bins[position * WIDTH // length] += mass / 4
    return bins


def test_a_strip_bins_the_mass_and_marks_the_memory(trace, playback):
    for step in (0, 11, 20):
        length = PROMPT + step
        strip = playback.strip(step, WIDTH)
        now = masses(trace, step, length)
        before = masses(trace, step - 1, length) if step else now
        even = 1 / WIDTH
        assert strip.mass == pytest.approx(now, abs=1e-6)
        assert strip.added.tolist() == ((now > even) & (before <= even)).tolist()
        assert strip.removed.tolist() == ((now <= even) & (before > even)).tolist()
        refresh = step - step % 10
        start = PROMPT + refresh - 16
        selected = {p for row in rows(trace, "selections", refresh) for p in row["positions"]}
        for marks, positions in (
            (strip.sink, range(4)), (strip.recent, range(start, length)), (strip.selected, selected),
        ):  # fmt: skip
            assert np.flatnonzero(marks).tolist() == sorted(
                {p * WIDTH // length for p in positions}
            )
    assert strip.added.any() or strip.removed.any()


def test_a_strip_may_be_wider_than_the_context(playback):
    strip = playback.strip(5, 1000)
    assert strip.mass.sum() == pytest.approx(0.9)
    assert strip.sink.sum() == 4


def test_one_layer_and_head(trace):
    playback = Playback.load(trace, 1, layers=[1], heads=[0])
    (row,) = rows(trace, "supports", 13, layer=1, head=0)
    frame = playback.frame(13)
    assert frame.measures["retained_mass"] == pytest.approx(row["retained_mass"])
    (old,) = rows(trace, "supports", 12, layer=1, head=0)
    assert frame.measures["overlap_previous_step"] == pytest.approx(
        overlap(old["positions"], row["positions"])
    )
    assert playback.strip(13, WIDTH).mass.sum() == pytest.approx(sum(row["mass"]))


def test_steps_without_an_audit_have_an_empty_strip(tmp_path):
    playback = Playback.load(Trace.open(make_trace(tmp_path / "t", policy="sfi", audit=4)))
    assert [playback.frame(step).audited for step in (4, 5, 6, 7, 8)] == [True, *[False] * 3, True]
    strip = playback.strip(5, WIDTH)
    assert not strip.mass.any()
    assert not strip.removed.any()
    assert playback.frame(5).measures["retained_mass"] is None
    assert playback.strip(8, WIDTH).added.any()


def test_a_redacted_trace_plays_without_text(tmp_path):
    folder = make_trace(tmp_path / "t")
    redact(folder)
    frame = Playback.load(Trace.open(folder)).frame(15)
    assert (frame.before, frame.sentence, frame.token) == (REDACTED, "", "")


def test_what_is_not_there_cannot_be_played(tmp_path, trace):
    with pytest.raises(ConfigError, match="request must be one of 0 to 1, got 2"):
        Playback.load(trace, request=2)
    with pytest.raises(TraceError, match="has no audit; record it with --audit 1"):
        Playback.load(Trace.open(make_trace(tmp_path / "t", audit=None)))
