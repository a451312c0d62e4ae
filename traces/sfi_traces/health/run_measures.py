"""What health rules measure of a run's steps: triggers, the sparse path, drift."""

from sfi_core.settings.policy_names import built_in, triggered
from sfi_traces.health.measured import Measured, Unjudged, measured, worse_of_beginning
from sfi_traces.model.request import Request

NEGLIGIBLE_KL = 0.01  # nats; below, a step's next token hardly changes


def never_fast(request: Request) -> list[Measured]:
    """Share of slow steps from step 1 on, by request."""
    if request.trace.manifest["policy"] == "full-kv":
        raise Unjudged("full-kv reads everything at every step")
    if request.trace.imported:
        raise Unjudged("an imported trace does not say which steps were slow")
    return measured(request, _share("slow", "chosen_steps WHERE step > 0"))


def trigger_never(request: Request) -> list[Measured]:
    """Share of generated tokens that are no triggers, by request."""
    return _trigger_share(request, "NOT trigger")


def trigger_always(request: Request) -> list[Measured]:
    """Share of generated tokens that are triggers, by request."""
    return _trigger_share(request, "trigger")


def fast_disagrees(request: Request) -> list[Measured]:
    """Share of fast steps whose most probable token differs from dense attention's, by request."""
    if request.trace.lossless:
        raise Unjudged("a lossless run replaces the tokens that differ: see its acceptance")
    return measured(
        request,
        f"""
        SELECT request, count(*) AS n, {worse_of_beginning("(NOT argmax_agrees)::INT")} AS value
        FROM (
            SELECT *, row_number() OVER (PARTITION BY request ORDER BY step) AS place FROM chosen_logits
        )
        GROUP BY request
        """,  # noqa: S608 - our own words
    )


def drift_agreement(request: Request) -> list[Measured]:
    """How far agreement falls over the run, by request."""
    return _fall(request, "SELECT request, step, argmax_agrees::INT AS value FROM chosen_logits")


def drift_kl(request: Request) -> list[Measured]:
    """How far ln KL rises over the run, by request."""
    return _fall(
        request,
        f"""
        SELECT request, step, -ln(greatest(kl_next_token, {NEGLIGIBLE_KL})) AS value FROM chosen_logits
        WHERE isfinite(kl_next_token)
        """,  # noqa: S608 - our number
    )


def drift_retained(request: Request) -> list[Measured]:
    """How far the retained mass falls over the run, by request; the mean over layers and heads."""
    return _fall(
        request,
        """
        SELECT request, step, avg(retained_mass) AS value
        FROM chosen_supports JOIN chosen_steps USING (request, step)
        WHERE NOT slow AND isfinite(retained_mass) GROUP BY ALL
        """,
    )


def _trigger_share(request: Request, which: str) -> list[Measured]:
    manifest = request.trace.manifest
    if not _asks_triggers(request):
        raise Unjudged(f"{manifest['policy']} has no trigger")
    if manifest["config"].get("trigger_policy", "boundary") != "boundary":
        raise Unjudged(f"the trigger is {manifest['config']['trigger_policy']}, not the sentence's end")
    return measured(request, _share(which, "chosen_steps"))


def _asks_triggers(request: Request) -> bool:
    policy = request.trace.manifest["policy"]
    if policy in built_in():
        return policy in triggered()
    # one of another package, which need not be installed here: its steps say it
    return not {"trigger", "t_max"}.isdisjoint(request.trace.table("steps", ["reason"])["reason"].unique().to_pylist())


def _share(which: str, source: str) -> str:
    return f"""
        SELECT request, avg(({which})::INT) AS value, count(*) AS n FROM {source} GROUP BY request
    """  # noqa: S608 - our own words


def _fall(request: Request, query: str) -> list[Measured]:
    # mean of the first third less the last third's; 0 within three standard errors
    return measured(
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
