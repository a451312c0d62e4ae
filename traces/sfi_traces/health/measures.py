"""What health rules measure of a run's steps, triggers and drift, of its selections and supports."""

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from sfi_traces.model.request import Request
from sfi_traces.model.trace import of_steps
from sfi_traces.schema import KEY, TABLES

BEGINNING = 32  # fast steps
MOST_POSITIONS = 1 << 22  # read at once
RECORD_AUDIT = "record a sparse policy with --audit N"
RECORD_POSITIONS = "record a policy that selects with --set trace.positions=true"
RECORD_SELECTOR = "only a policy with the Selector, such as sfi, has its evidence"
# replaces these for an imported trace
IMPORTED = "the imported file does not hold what this rule looks at"
RECORD = (RECORD_AUDIT, RECORD_POSITIONS, RECORD_SELECTOR)
AT_CLIP = 1e-6  # of selector.lambda_clip: how near lambda*, a float32, is to a clip that it stands at
SINKS = 4  # first positions; StreamingLLM's number
BY_TRIGGER = ("trigger", "t_max", "stride", "random")  # reasons of slow steps
PEAK = 0.05  # the largest probability of a support that stands out
OF_STEP = "chosen_selections JOIN chosen_steps USING (request, step)"

Measure = Callable[[Request], "list[Measured]"]


class Unjudged(Exception):  # noqa: N818 - no error: a rule that does not apply
    """Raised where a rule does not apply to a run; the text says why."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One value of a rule, of `n` samples; layer and head are None for a value of all.

    `whole` is the value of all samples, where `value` may be that of the first `BEGINNING`; else None.
    """

    request: int
    value: float
    n: int
    layer: int | None = None
    head: int | None = None
    whole: float | None = None

    @property
    def of_beginning(self) -> bool:
        """Whether the value is that of the first samples alone."""
        return self.whole is not None and self.value > self.whole


def _worse_of_beginning(value: str) -> str:
    # SQL: a mean over all rows as column `whole`, then that over the first rows if it is larger: a run that went wrong
    # often ends in repetition, which is easy to predict and hides errors at the beginning
    return f"avg({value}) AS whole, greatest(avg({value}), avg({value}) FILTER (place <= {BEGINNING}))"


def _by_head(request: Request, value: str, source: str, samples: str = "count(*)") -> list[Measured]:
    # the SQL `value` of each KV head's rows of `source`; `samples` counts those behind it
    columns = f"request, layer, head, {samples} AS n, {value} AS value"
    return _measured(request, f"SELECT {columns} FROM {source} GROUP BY request, layer, head")  # noqa: S608 - our own words


def _measured(request: Request, query: str) -> list[Measured]:
    # a query's rows; a null value becomes 0
    return [Measured(**row | {"value": float(row["value"] or 0)}) for row in request.query(query)]


def _sample_selections(request: Request) -> None:
    # makes the view `sampled_selections` of every n-th refresh of a request; `sampled_refreshes` has also selections
    # without positions. Not through DuckDB, which decodes the lists of every row in each scan
    if "sampled" in request.shared:
        return
    size = request.single("SELECT coalesce(sum(selected), 0) AS positions FROM chosen_selections")
    every = 1 + int(size["positions"]) // MOST_POSITIONS
    picked = request.query(f"""
        SELECT request, step FROM (SELECT DISTINCT request, step FROM chosen_selections)
        QUALIFY row_number() OVER (PARTITION BY request ORDER BY step) % {every:d} = {1 % every:d}
    """)  # noqa: S608 - a number
    keys = pa.Table.from_pylist(picked, pa.schema(KEY))
    rows = request.trace.rows("selections", TABLES["selections"].names, of_steps(keys["step"].to_numpy()))
    request.connection.register("sampled_rows", rows)
    request.connection.register("sampled_keys", keys)
    layer = "true" if request.layer is None else f"layer = {request.layer:d}"
    request.connection.execute(f"""
        CREATE TEMP VIEW sampled_refreshes AS
        SELECT * FROM sampled_rows SEMI JOIN sampled_keys USING (request, step) WHERE {layer};
        CREATE TEMP VIEW sampled_selections AS SELECT * FROM sampled_refreshes WHERE positions IS NOT NULL
    """)  # noqa: S608 - a number
    request.shared["sampled"] = True


def at_clip(request: Request) -> str:
    """Write the SQL condition that a selection's lambda* is at its upper bound, `selector.lambda_clip`."""
    clip = f"{request.trace.manifest['config']['selector']['lambda_clip']!r}::DOUBLE"
    return f"(abs(lambda_star - {clip}) <= {AT_CLIP} * {clip})"


def never_fast(request: Request) -> list[Measured]:
    """Share of slow steps from step 1 on, by request."""
    if request.trace.manifest["policy"] == "full-kv":
        raise Unjudged("full-kv reads everything at every step")
    if request.trace.imported:
        raise Unjudged("an imported trace does not say which steps were slow")
    return _measured(request, _share("slow", "chosen_steps WHERE step > 0"))


def fast_disagrees(request: Request) -> list[Measured]:
    """Share of fast steps whose most probable token differs from dense attention's, by request."""
    if request.trace.lossless:
        raise Unjudged("a lossless run replaces the tokens that differ: see its acceptance")
    return _measured(
        request,
        f"""
        SELECT request, count(*) AS n, {_worse_of_beginning("(NOT argmax_agrees)::INT")} AS value
        FROM (SELECT *, row_number() OVER (PARTITION BY request ORDER BY step) AS place FROM chosen_logits)
        GROUP BY request
        """,  # noqa: S608 - our own words
    )


def fast_kl(request: Request) -> list[Measured]:
    """Mean KL of fast steps to dense attention's next token, in nats, by request."""
    if request.trace.lossless:
        raise Unjudged("a lossless run replaces the tokens that differ: see its acceptance")
    return _measured(
        request,
        """
        SELECT request, count(*) AS n, avg(kl_next_token) AS value FROM chosen_logits
        WHERE isfinite(kl_next_token) GROUP BY request
        """,
    )


def trigger_share(which: str, request: Request) -> list[Measured]:
    """Share of generated tokens that are triggers, or no triggers, by request."""
    manifest = request.trace.manifest
    if (trigger := manifest["config"].get("trigger_policy", "boundary")) != "boundary":
        raise Unjudged(f"the trigger is {trigger}, not the sentence's end")
    # also of another package's policy, which need not be installed here
    if {"trigger", "t_max"}.isdisjoint(request.trace.table("steps", ["reason"])["reason"].unique().to_pylist()):
        raise Unjudged(f"{manifest['policy']} has no trigger")
    return _measured(request, _share(which, "chosen_steps"))


def _share(which: str, source: str) -> str:
    return f"""
        SELECT request, avg(({which})::INT) AS value, count(*) AS n FROM {source} GROUP BY request
    """  # noqa: S608 - our own words


def fall(query: str, request: Request) -> list[Measured]:
    """How far a value by `request` and `step` falls over the run, by request.

    The mean of the first third less the last third's; 0 within three standard errors.
    """
    return _measured(
        request,
        f"""
        WITH parts AS (
            SELECT *, ntile(3) OVER (PARTITION BY request ORDER BY step) AS part FROM ({query})
        ), fallen AS (
            SELECT request, count(*) AS n,
                avg(value) FILTER (part = 1) - avg(value) FILTER (part = 3) AS fall,
                sqrt(var_samp(value) FILTER (part = 1) / count(*) FILTER (part = 1)
                    + var_samp(value) FILTER (part = 3) / count(*) FILTER (part = 3)) AS error
            FROM parts GROUP BY request
        )
        SELECT request, n, CASE WHEN fall > 3 * coalesce(error, 0) THEN fall ELSE 0.0 END AS value FROM fallen
        """,  # noqa: S608 - our own words
    )


def selection_trailing(request: Request) -> list[Measured]:
    """Share of the selected positions among as many last ones before the recent window."""
    _sample_selections(request)
    recent = request.trace.manifest["config"]["recent"]
    source = f"""(
        SELECT * EXCLUDE (positions), unnest(positions) AS p FROM sampled_selections
        JOIN chosen_steps USING (request, step)
        WHERE {_allowed(request)} > 2 * selected AND selected > 0
    )"""  # noqa: S608 - our own words and numbers
    value = f"avg((p >= context_tokens - {recent:d} - selected)::INT)"
    return _by_head(request, value, source, "count(DISTINCT step)")


def selection_same(request: Request) -> list[Measured]:
    """Share of a layer's refreshes at which two or more KV heads all selected the same positions."""
    if request.trace.manifest["policy"] == "synckv":
        raise Unjudged("the heads of a cluster share a selection under synckv")
    _sample_selections(request)
    return _measured(
        request,
        f"""
        SELECT request, layer, count(*) AS n, avg((different = 1)::INT) AS value
        FROM (
            SELECT request, step, layer, count(DISTINCT hash(positions)) AS different
            FROM sampled_selections JOIN chosen_steps USING (request, step)
            WHERE {_allowed(request)} > 2 * selected AND selected > 0
            GROUP BY request, step, layer HAVING count(*) > 1
        )
        GROUP BY request, layer
        """,  # noqa: S608 - our own words and numbers
    )


def selection_frozen(request: Request) -> list[Measured]:
    """Share of the refreshes after the first that changed no position."""
    where = f"jaccard_previous IS NOT NULL AND selected > 0 AND {_allowed(request)} > 2 * selected"
    return _by_head(request, "avg((added = 0 AND removed = 0)::INT)", f"{OF_STEP} WHERE {where}")


def of_selector(value: str, where: str, request: Request) -> list[Measured]:
    """Measure the SQL `value` of each KV head's selections by a Selector, `{allowed}` being what it may choose from."""
    value, where = (text.format(allowed=_allowed(request)) for text in (value, where))
    _need_selector(request)
    return _by_head(request, value, f"{OF_STEP} WHERE selected > 0 AND ({where})")


def _need_selector(request: Request) -> None:
    # sfi always has a Selector; another package's policy may have one
    policy = request.trace.manifest["policy"]
    recorded = request.single("SELECT count(evidence_norm2) + count(lambda_star) AS n FROM chosen_selections")
    if policy != "sfi" and not recorded["n"]:
        raise Unjudged(f"{policy} has no Selector")


def selection_missed(request: Request) -> list[Measured]:
    """Share of the trigger's slow steps that selected nothing anew, by request."""
    _need_selector(request)
    if not request.single("SELECT count(*) AS n FROM chosen_selections")["n"]:
        raise Unjudged("the table selections is empty")
    return _measured(
        request,
        f"""
        SELECT request, avg((anew.step IS NULL)::INT) AS value, count(*) AS n
        FROM chosen_steps LEFT JOIN (SELECT DISTINCT request, step FROM chosen_selections) AS anew USING (request, step)
        WHERE reason IN {BY_TRIGGER} GROUP BY request
        """,  # noqa: S608 - our own words
    )


def _allowed(request: Request) -> str:
    # SQL: how many positions the Selector may choose from, about
    config = request.trace.manifest["config"]
    return f"greatest(context_tokens - {config['sink']:d} - {config['recent']:d}, 0)"


def sink_unread(request: Request) -> list[Measured]:
    """Dense mass of the first positions that the step did not read; the mean over sampled steps."""
    return _lost(request, f"p < {SINKS}")


def look_back(request: Request) -> list[Measured]:
    """Unread dense mass further back than any selected or recent token; the mean over sampled steps.

    A selection's four earliest positions do not count: another engine's include the sinks. A policy that
    selects nothing reaches as far as its recent tokens.
    """
    _sample_selections(request)
    unknown = "SELECT count(*) AS n FROM sampled_refreshes WHERE selected > 0 AND positions IS NULL"
    if request.single(unknown)["n"]:
        raise Unjudged(RECORD_POSITIONS)
    recent = request.trace.manifest["config"]["recent"]
    request.connection.execute(f"""
        CREATE OR REPLACE TEMP VIEW reach AS
        SELECT request, layer, head, max(position - coalesce(positions[{SINKS + 1}], positions[-1])) AS reach
        FROM sampled_selections JOIN chosen_steps USING (request, step)
        WHERE selected > 0 GROUP BY request, layer, head
    """)  # noqa: S608 - a number
    return _lost(request, f"p >= {SINKS} AND position - p > greatest(coalesce(reach, 0), {recent:d})")


def top_1_dropped(request: Request) -> list[Measured]:
    """Share of query heads whose most probable position was not read, in steps where one stands out."""
    source = f"""(
        SELECT request, layer, head, top_1_read,
            row_number() OVER (PARTITION BY request, layer, head ORDER BY step) AS place
        FROM chosen_supports JOIN chosen_steps USING (request, step)
        WHERE NOT slow AND top_1_read IS NOT NULL AND list_max(mass) >= {PEAK}
    )"""  # noqa: S608 - a number
    return _by_head(request, _worse_of_beginning("1 - top_1_read"), source)


def _lost(request: Request, where: str) -> list[Measured]:
    # the mass `where` a step did not read, of every n-th audited fast step
    size = request.single("SELECT count(*) AS rows FROM chosen_supports WHERE read IS NOT NULL")
    top = int((request.trace.manifest.get("audit") or {}).get("top", 1))
    every = 1 + int(size["rows"]) * top // MOST_POSITIONS
    reach = "LEFT JOIN reach USING (request, layer, head)" if "reach" in where else ""
    source = f"""(
        SELECT request, step, layer, head, position, unnest(positions) AS p, unnest(mass) AS m,
            unnest(read) AS r
        FROM chosen_supports JOIN (
            SELECT request, step, position FROM chosen_steps WHERE audited AND NOT slow
            QUALIFY row_number() OVER (PARTITION BY request ORDER BY step) % {every:d} = {1 % every:d}
        ) USING (request, step)
        WHERE read IS NOT NULL
    ) {reach}"""  # noqa: S608 - our own words
    value = f"sum(m) FILTER (NOT r AND {where}) / count(DISTINCT step)"
    return _by_head(request, value, source, "count(DISTINCT step)")
