"""What health rules measure of the table `selections`."""

from sfi_traces.health.measured import Measured, Unjudged, at_clip, by_head, measured, sample_selections
from sfi_traces.model.request import Request

SINKS = 4  # first positions; StreamingLLM's number
OF_STEP = "chosen_selections JOIN chosen_steps USING (request, step)"


def evidence_broken(request: Request) -> list[Measured]:
    """Share of refreshes whose evidence or lambda* is zero, infinite or null (NaN is recorded as null)."""
    broken = """
        evidence_norm2 IS NULL OR NOT isfinite(evidence_norm2) OR evidence_norm2 <= 0
        OR lambda_star IS NULL OR NOT isfinite(lambda_star)
    """
    return _of_selector(request, f"avg(({broken})::INT)", "coalesce(chosen_selections.reason, '') = ''")


def evidence_flat(request: Request) -> list[Measured]:
    """Mean share of the allowed positions that the evidence is spread over: exp(entropy) / allowed."""
    allowed = _allowed(request)
    return _of_selector(request, f"avg(exp(evidence_entropy) / {allowed})", f"{allowed} > 2 * selected")


def prior_outweighs(request: Request) -> list[Measured]:
    """Mean lambda*."""
    return _of_selector(request, "avg(lambda_star)", "isfinite(lambda_star)")


def lambda_clipped(request: Request) -> list[Measured]:
    """Share of refreshes where lambda* equals its clip."""
    _require_selector(request)
    value = f"avg({at_clip(request)}::INT)"
    return by_head(request, value, "chosen_selections WHERE lambda_star IS NOT NULL")


def unread_estimated(request: Request) -> list[Measured]:
    """Mean share of the attention that the policy's own scores, codescan's, put on keys it did not read."""
    return by_head(request, "avg(unread_estimate)", "chosen_selections WHERE isfinite(unread_estimate)")


def selection_trailing(request: Request) -> list[Measured]:
    """Share of the selected positions among as many last ones before the recent window."""
    sample_selections(request)
    recent = request.trace.manifest["config"]["recent"]
    source = f"""(
        SELECT * EXCLUDE (positions), unnest(positions) AS p FROM sampled_selections
        JOIN chosen_steps USING (request, step)
        WHERE {_allowed(request)} > 2 * selected AND selected > 0
    )"""  # noqa: S608 - our own words and numbers
    value = f"avg((p >= context_tokens - {recent:d} - selected)::INT)"
    return by_head(request, value, source, "count(DISTINCT step)")


def selection_same(request: Request) -> list[Measured]:
    """Share of a layer's refreshes at which two or more KV heads all selected the same positions."""
    sample_selections(request)
    return measured(
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
    return by_head(request, "avg((added = 0 AND removed = 0)::INT)", f"{OF_STEP} WHERE {where}")


def sink_unselected(request: Request) -> list[Measured]:
    """Share of selections without any of the first positions, where nothing else reads these."""
    if request.trace.manifest["config"]["sink"]:
        raise Unjudged("the policy reads the first tokens by itself (sink)")
    sample_selections(request)
    value = f"avg((positions[1] >= {SINKS})::INT)"
    return by_head(request, value, "sampled_selections WHERE selected > 0")


def _of_selector(request: Request, value: str, where: str) -> list[Measured]:
    _require_selector(request)
    return by_head(request, value, f"{OF_STEP} WHERE selected > 0 AND ({where})")


def _require_selector(request: Request) -> None:
    # sfi always has a Selector; another package's policy may have one
    policy = request.trace.manifest["policy"]
    found = request.single("SELECT count(evidence_norm2) + count(lambda_star) AS n FROM chosen_selections")
    if policy != "sfi" and not found["n"]:
        raise Unjudged(f"{policy} has no Selector")


def _allowed(request: Request) -> str:
    # SQL: how many positions the Selector may choose from, about
    config = request.trace.manifest["config"]
    return f"greatest(context_tokens - {config['sink']:d} - {config['recent']:d}, 0)"
