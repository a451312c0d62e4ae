"""Traces made up from a seed, with every table, for tests of what reads them."""

import json
from random import Random
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from sfi_traces.schema import MANIFEST, SCHEMA_VERSION, TABLES

PROMPT, TOP, LAYERS, HEADS = 200, 24, 2, 2
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "home"]
STOP = 90  # the trigger's token id
CONFIG = {
    "sink": 4, "recent": 16, "recent_mode": "anchored", "budget": 20, "t_max": 16, "min_gap": 0,
    "trigger_delay": 0, "slow_start": 1, "span": 0, "trigger_policy": "boundary", "stride": 16,
    "triggers": ["."], "trigger_token_ids": None, "window_prefill": 16,
    "dense_layers": [], "selector": {"lambda_clip": 0.02},
}  # fmt: skip
LAYER = {"heads": HEADS, "key_width": 32, "value_width": 32, "itemsize": 4, "window": None}
MODEL = {
    "name": "made-up", "architecture": "Qwen3ForCausalLM", "model_type": "qwen3", "dtype": "float32",
    "layers": [{"layer": layer, **LAYER} for layer in range(LAYERS)], "query_heads": 4,
    "weight_bytes": 4_000_000, "embedding_bytes": 1_000_000, "max_positions": 4096, "vocabulary": 100,
}  # fmt: skip
Tables = dict[str, list[dict[str, Any]]]
Sets = dict[tuple[int, int], list[int]]  # by layer and head


def overlap(first: list[int], second: list[int]) -> float:
    return len(set(first) & set(second)) / min(len(first), len(second))


def make_trace(
    folder,
    *,
    steps: int = 60,
    requests: int = 1,
    seed: int = 0,
    policy: str = "full-kv",
    sentence: int = 10,
    audit: int | None = 1,
    **manifest,
):
    """Write a trace: a trigger every `sentence` steps, supports that jump there and drift in between.

    Under "full-kv" every step is slow; otherwise step 0 and those after a trigger are. Under "freekv" fast
    steps correct a head whose query moved, let the others select for the next step, and recall what is new.
    """
    rng = Random(seed)
    tables: Tables = {name: [] for name in TABLES}
    for request in range(requests):
        _request(tables, rng, request, steps, policy, sentence, audit)
    for name, rows in tables.items():
        if rows:
            (folder / name).mkdir(parents=True)
            table = pa.Table.from_pylist(rows, schema=TABLES[name])
            parquet.write_table(table, folder / name / "part-00000.parquet")
    (folder / MANIFEST).write_text(json.dumps(_manifest(policy, requests, audit) | manifest))
    return folder


def _manifest(policy: str, requests: int, audit: int | None) -> dict:
    settings = {"every": audit, "top": TOP, "layers": None}
    return {
        "schema_version": SCHEMA_VERSION, "sfi_version": "0.1.0", "run_id": "0123456789abcdef" * 2,
        "created": "2026-11-21T10:00:00+00:00", "began_unix_ns": 1_795_255_200_250_000_000,
        "finished": "2026-11-21T10:01:00+00:00", "stopped": None, "ranks": 1,
        "graphs": False, "not_replayed": None, "spans": None, "redacted": False, "positions": True,
        "audit": settings if audit else None, "model": MODEL, "policy": policy, "lossless": False,
        "preset": "default", "backend": "torch", "device": "cpu", "config": CONFIG,
        "trigger_token_ids": [STOP], "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "prompts": [{"request": r, "tokens": PROMPT, "sha256": "0" * 64} for r in range(requests)],
    }  # fmt: skip


def _request(
    tables: Tables, rng: Random, request: int, steps: int, policy: str, sentence: int, audit: int | None
) -> None:
    tables["prompts"] += [
        {"request": request, "position": p, "token_id": p % 90, "token_text": f" {WORDS[p % 10]}"}
        for p in range(PROMPT)
    ]
    tops: Sets = {}
    refreshes: Sets = {}
    chosen: Sets = {}
    ended, since, began = 0, 0, 0.0
    for step in range(steps):
        context = PROMPT + step
        boundary = step > 0 and step % sentence == 0
        slow = policy == "full-kv" or step == 0 or boundary
        since = 0 if slow else since + 1
        audited = audit is not None and (slow or step % audit == 0)
        ended += boundary
        last = step % sentence == sentence - 1
        attended = context if slow else 4 + 20 + 16 + since
        reason = "full-kv" if policy == "full-kv" else "first" if step == 0 else "trigger"
        elapsed = (900.0 if slow else 300.0) + rng.uniform(0, 50)
        tables["steps"].append(
            {
                "request": request, "step": step, "position": context - 1,
                "token_id": STOP if last else step % 90,
                "token_text": "." if last else f" {WORDS[step % 10]}",
                "slow": slow, "reason": reason if slow else "", "steps_since_slow": since, "sentence": ended,
                "trigger": last, "attended_tokens": attended, "context_tokens": context,
                "read_ratio": attended / context, "elapsed_us": elapsed, "audited": audited,
            }
        )  # fmt: skip
        name = "prefill" if step == 0 else "forward"
        kind = "attention.dense" if slow else "attention.fast"
        spans = [(None, name, 0.0, 0.9, 0), (None, "sample", 0.9, 0.05, 0)]
        spans += [(layer, kind, 0.1 + 0.3 * layer, 0.2, attended * 512) for layer in range(LAYERS)]
        if slow and policy != "full-kv":
            spans += [
                (layer, span, 0.3 + 0.3 * layer + extra, 0.04, 0)
                for layer in range(LAYERS)
                for span, extra in (("selector", 0.0), ("top_k", 0.04), ("pack", 0.08))
            ]
        tables["timings"] += [
            {
                "request": request, "step": step, "layer": layer, "name": span, "stream": "main",
                "begin_us": began + at * elapsed, "elapsed_us": share * elapsed, "bytes": moved,
            }
            for layer, span, at, share, moved in spans
        ]  # fmt: skip
        began += elapsed
        for layer in range(LAYERS):
            for head in range(HEADS):
                key = {"request": request, "step": step, "layer": layer, "head": head}
                place = (layer, head)
                old = tops.get(place)
                moved = TOP if old is None else 10 if boundary else 2
                shared = rng.sample(old, TOP - moved) if old else []
                free = sorted(set(range(context)) - set(shared))
                top = sorted(shared + rng.sample(free, moved))
                raw = [rng.random() ** 3 + 0.01 for _ in top]
                mass = [0.9 * value / sum(raw) for value in raw]
                if audited:
                    since_refresh = refreshes.get(place)
                    tables["supports"].append(
                        {
                            **key, "positions": top, "mass": mass,
                            "retained_mass": 1.0 if slow else 0.7 + 0.2 * rng.random(),
                            "overlap_previous_step": overlap(old, top) if old and audit == 1 else None,
                            "overlap_last_refresh": overlap(since_refresh, top) if since_refresh else None,
                            "query_cosine": rng.uniform(0.6, 1.0) if step else None,
                            "output_error": 0.0 if slow else rng.uniform(0.01, 0.2),
                        }
                    )  # fmt: skip
                tops[place] = top
                if slow:
                    refreshes[place] = top
                    if policy != "full-kv":
                        _select(tables, rng, key, top, chosen)
            if policy == "freekv" and not slow:
                _correct(tables, rng, {"request": request, "step": step, "layer": layer}, tops, chosen)
        if audited and not slow:
            tables["logits"].append(
                {
                    "request": request, "step": step, "kl_next_token": rng.uniform(0, 0.1),
                    "argmax_agrees": rng.random() < 0.9, "dense_token_id": 91,
                    "dense_token_text": " river", "dense_probability": 0.25 + step / 1000,
                }
            )  # fmt: skip


def _correct(tables: Tables, rng: Random, key: dict[str, int], tops: Sets, chosen: Sets) -> None:
    before = len(tables["selections"])
    for head in range(HEADS):
        cosine = rng.uniform(0.6, 1.0)
        if cosine < 0.8:
            why = {"reason": "correction", "query_cosine": cosine}
        elif rng.random() < 0.7:
            why = {"reason": "speculative", "query_cosine": cosine}
        else:
            continue
        _select(tables, rng, {**key, "head": head}, tops[key["layer"], head], chosen)
        tables["selections"][-1] |= {**why, "lambda_star": None}
    fetched = sum(row["added"] for row in tables["selections"][before:])
    tables["recalls"].append({**key, "rows": fetched, "bytes": 256 * fetched, "waited_us": rng.uniform(0, 20)})


def _select(tables: Tables, rng: Random, key: dict[str, int], top: list[int], chosen: Sets) -> None:
    place = (key["layer"], key["head"])
    new, old = top[:20], chosen.get(place)
    both = len(set(new) & set(old)) if old else 0
    tables["selections"].append(
        {
            **key, "selected": len(new), "lambda_star": rng.choice([0.02, rng.uniform(0, 0.02)]),
            "evidence_norm2": 0.1, "evidence_dot_prior": 0.01, "prior_norm2": 0.005, "evidence_entropy": 2.0,
            "overlap_previous": both / min(len(new), len(old)) if old else None,
            "jaccard_previous": both / len(set(new) | set(old)) if old else None,
            "added": len(new) - both, "removed": len(old) - both if old else 0, "positions": new,
            "reason": "",
        }
    )  # fmt: skip
    chosen[place] = new
