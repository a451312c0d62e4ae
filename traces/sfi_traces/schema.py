"""The tables of a trace: `manifest.json`, and a folder of Parquet parts for each table.

Column `request` numbers the requests of all runs in one trace, in order. A reader of version N reads
versions 1 to N. A new column raises no version; a changed or removed column does.
"""

import pyarrow as pa

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
PART = "part-{:05d}.parquet"
# more than these no trace has; a number beyond them is damage, and would fill the memory
MOST_TOKENS, MOST_LAYERS, MOST_HEADS = 1 << 24, 1 << 15, 1 << 15
AHEAD = "speculative"  # the reason of a selection that serves the next step


def _each(kind: pa.DataType, *names: str) -> list[tuple[str, pa.DataType]]:
    return [(name, kind) for name in names]


KEY = _each(pa.int32(), "request", "step")
HEAD = _each(pa.int16(), "layer", "head")
POSITIONS = pa.list_(pa.int32())

TABLES: dict[str, pa.Schema] = {
    # one row a prompt token; a redacted trace has null ids and texts, here and in `steps`
    "prompts": pa.schema([*_each(pa.int32(), "request", "position", "token_id"), ("token_text", pa.string())]),
    # one row a request and step; `position` is the query's, `token_id` the generated token; `batch_step`
    # counts the batch's steps, which differ from the request's if it began later (null: equal)
    "steps": pa.schema(
        [
            *KEY,
            *_each(pa.int32(), "position", "token_id"),
            ("token_text", pa.string()),
            ("slow", pa.bool_()),
            ("reason", pa.string()),  # "" for a fast step
            ("steps_since_slow", pa.int32()),
            ("sentence", pa.int32()),  # trigger tokens among x_0 ... x_{t-1}
            ("trigger", pa.bool_()),  # whether the generated token is in T_trig
            ("attended_tokens", pa.float32()),
            ("context_tokens", pa.int32()),
            ("read_ratio", pa.float32()),
            ("elapsed_us", pa.float64()),
            ("audited", pa.bool_()),
            ("batch_step", pa.int32()),
            ("drafted", pa.bool_()),  # lossless run: the token was drafted, and kept
            ("draft_token_id", pa.int32()),  # the drafted token, kept or not
            ("graphs", pa.bool_()),  # the step was replayed as a CUDA graph
            # of the whole batch step, so equal for all its requests; null where the engine does not know
            *_each(pa.int32(), "slow_requests", "fast_requests"),
            # `moved_bytes`: of K and V, that attention read in full-attention layers
            *_each(pa.int64(), "cached_tokens", "moved_bytes"),
            ("bandwidth_share", pa.float32()),  # null: no run measures the machine's bandwidth
            ("selection_tokens", pa.float32()),  # read to choose, in tokens' worth; null: not recorded
        ]
    ),
    # one row a verification of a lossless run; `step` is the step of the last token it gave, `base` the
    # verified tokens in the cache before it
    "verifications": pa.schema(
        [
            *KEY,
            *_each(pa.int32(), "batch_step", "base", "drafted", "accepted"),
            ("reason", pa.string()),
            ("evidence_position", pa.int32()),  # null where nothing was selected
            ("attended_tokens", pa.float32()),  # sum over the drafting steps and the verification
            ("elapsed_us", pa.float64()),  # of the verification's forward pass
            ("selection_tokens", pa.float32()),  # likewise a sum
        ]
    ),
    # one row a request, refresh, layer and KV head; lambda* and evidence are null without a Selector,
    # overlaps at a first selection; `reason` is "" at a slow step, else FreeKV's "correction" or
    # "speculative"
    "selections": pa.schema(
        [
            *KEY,
            *HEAD,
            ("selected", pa.int32()),
            *_each(pa.float32(), "lambda_star", "evidence_norm2", "evidence_dot_prior", "prior_norm2"),
            *_each(pa.float32(), "evidence_entropy", "overlap_previous", "jaccard_previous"),
            *_each(pa.int32(), "added", "removed"),
            ("positions", POSITIONS),
            ("reason", pa.string()),
            ("query_cosine", pa.float32()),  # FreeKV's C_i
            ("unread_estimate", pa.float32()),  # codescan: estimated attention on J's keys that are not read
            ("score_margin", pa.float32()),  # codescan: score of the last key chosen over the first one left
        ]
    ),
    # one row a request, step and layer that fetched keys and values from the host; `rows` of all KV heads
    "recalls": pa.schema(
        [*KEY, ("layer", pa.int16()), ("rows", pa.int32()), ("bytes", pa.int64()), ("waited_us", pa.float64())]
    ),
    # one row an audited request, step, layer and KV head
    "supports": pa.schema(
        [
            *KEY,
            *HEAD,
            ("positions", POSITIONS),
            ("mass", pa.list_(pa.float32())),
            ("retained_mass", pa.float32()),
            ("overlap_previous_step", pa.float32()),  # null unless the step before was audited
            ("overlap_last_refresh", pa.float32()),  # with the last slow step before this one
            *_each(pa.float32(), "query_cosine", "output_error"),
            ("read", pa.list_(pa.bool_())),  # for each position: whether the step attended to it
            ("top_1_read", pa.float32()),  # share of query heads whose top position was attended
            ("retained_mass_min", pa.float32()),  # the least over the KV head's query heads
        ]
    ),
    # one row an audited fast step; in a lossless run, a step whose draft was tested. Dense attention's most
    # probable token (null in a redacted trace) and its probability there
    "logits": pa.schema(
        [
            *KEY,
            ("kl_next_token", pa.float32()),
            ("argmax_agrees", pa.bool_()),
            ("dense_token_id", pa.int32()),
            ("dense_token_text", pa.string()),
            ("dense_probability", pa.float32()),
        ]
    ),
    # one row a span; `request` is the first of its run, `step` the batch's; `begin_us` counts from the
    # manifest's `began_unix_ns`, on every rank
    "timings": pa.schema(
        [
            *KEY,
            ("layer", pa.int16()),  # null outside of layers
            *_each(pa.string(), "name", "stream"),
            *_each(pa.float64(), "begin_us", "elapsed_us"),
            ("bytes", pa.int64()),
            ("rank", pa.int16()),
        ]
    ),
}
