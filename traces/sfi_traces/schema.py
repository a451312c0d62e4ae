"""The tables of a trace: `manifest.json`, and a folder of Parquet parts for each table.

A row's `request` numbers the requests of all runs that one trace holds, in order. A reader of version N reads
versions 1 to N; a new column raises no version, a changed or missing one does.
"""

import pyarrow as pa

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
PART = "part-{number:05d}.parquet"
# of a run on several ranks, each but the first writes a trace of its own in such a folder of the first one's;
# these tables are those of all ranks, and the others the first one's
RANK = "rank-{number:05d}"
OF_EVERY_RANK = ("selections", "recalls", "supports", "timings")
AHEAD = "speculative"  # the reason of a selection that serves the next step

KEY = [("request", pa.int32()), ("step", pa.int32())]
HEAD = [("layer", pa.int16()), ("head", pa.int16())]
POSITIONS = pa.list_(pa.int32())

TABLES: dict[str, pa.Schema] = {
    # a prompt's token; text and ids are null in a redacted trace, here and in `steps`
    "prompts": pa.schema(
        [
            ("request", pa.int32()),
            ("position", pa.int32()),
            ("token_id", pa.int32()),
            ("token_text", pa.string()),
        ]
    ),
    # a request and step; `position` is the query's, `token_id` the token that the step generated,
    # `batch_step` the step of the batch, another one where the request began later; null is the same one
    "steps": pa.schema(
        [
            *KEY,
            ("position", pa.int32()),
            ("token_id", pa.int32()),
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
            ("drafted", pa.bool_()),  # of a lossless run: the token was drafted, and kept
            (
                "draft_token_id",
                pa.int32(),
            ),  # what was drafted here, kept or not; null without a draft
            ("graphs", pa.bool_()),  # the step was replayed as a CUDA graph
            # of the batch's step, the same for all its requests; null where the engine does not know
            ("slow_requests", pa.int32()),
            ("fast_requests", pa.int32()),
            ("cached_tokens", pa.int64()),
            ("moved_bytes", pa.int64()),  # of K and V, that attention read in full-attention layers
            (
                "bandwidth_share",
                pa.float32(),
            ),  # moved_bytes over elapsed_us, of what the machine copies; null unless that was measured
        ]
    ),
    # a verification of a lossless run; `step` is that of the last token that it gave
    "verifications": pa.schema(
        [
            *KEY,
            ("batch_step", pa.int32()),
            ("base", pa.int32()),  # verified tokens in the cache before it
            ("drafted", pa.int32()),
            ("accepted", pa.int32()),
            ("reason", pa.string()),
            ("evidence_position", pa.int32()),  # null where nothing was selected
            ("attended_tokens", pa.float32()),  # of the steps that drafted and of the verification
            ("elapsed_us", pa.float64()),  # of the verification's pass
        ]
    ),
    # a request, refresh, layer and KV head that selected; null where the policy has no Selector or there was
    # none before; `reason` is "" for a slow step's refresh, else "correction" or "speculative" (FreeKV)
    "selections": pa.schema(
        [
            *KEY,
            *HEAD,
            ("selected", pa.int32()),
            ("lambda_star", pa.float32()),
            ("evidence_norm2", pa.float32()),
            ("evidence_dot_prior", pa.float32()),
            ("prior_norm2", pa.float32()),
            ("evidence_entropy", pa.float32()),
            ("overlap_previous", pa.float32()),
            ("jaccard_previous", pa.float32()),
            ("added", pa.int32()),
            ("removed", pa.int32()),
            ("positions", POSITIONS),
            ("reason", pa.string()),
            ("query_cosine", pa.float32()),  # C_i, where the policy looked at it
        ]
    ),
    # a request, step and layer that fetched keys and values from the host
    "recalls": pa.schema(
        [
            *KEY,
            ("layer", pa.int16()),
            ("rows", pa.int32()),  # of K and V, the sum over KV heads
            ("bytes", pa.int64()),
            ("waited_us", pa.float64()),
        ]
    ),
    # an audited request, step, layer and KV head
    "supports": pa.schema(
        [
            *KEY,
            *HEAD,
            ("positions", POSITIONS),
            ("mass", pa.list_(pa.float32())),
            ("retained_mass", pa.float32()),
            ("overlap_previous_step", pa.float32()),  # null unless the step before was audited
            ("overlap_last_refresh", pa.float32()),  # with the last slow step before this one
            ("query_cosine", pa.float32()),
            ("output_error", pa.float32()),
            (
                "read",
                pa.list_(pa.bool_()),
            ),  # of each of `positions`: whether the step attended to it
            (
                "top_1_read",
                pa.float32(),
            ),  # share of query heads whose most probable one was attended
            ("retained_mass_min", pa.float32()),  # that of the query head that retained least
        ]
    ),
    # an audited request and step that was fast; of a lossless run one whose token a draft was tested for
    "logits": pa.schema([*KEY, ("kl_next_token", pa.float32()), ("argmax_agrees", pa.bool_())]),
    # a span; `request` is the first of its run, `step` the batch's; `begin_us` counts from `began_unix_ns`
    # of the manifest, on every rank
    "timings": pa.schema(
        [
            *KEY,
            ("layer", pa.int16()),  # null for what is not a layer's
            ("name", pa.string()),
            ("stream", pa.string()),
            ("begin_us", pa.float64()),
            ("elapsed_us", pa.float64()),
            ("bytes", pa.int64()),
            ("rank", pa.int16()),  # that it ran on
        ]
    ),
}
