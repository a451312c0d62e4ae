"""The tables of `sfi trace show` about supports, retained mass and selections."""

from sfi_traces.views.table import Row, Table, count, number, percent, span

SPREAD = ("mean", "sd", "p5", "p50", "p95")


def by_layer(found: Row) -> list[tuple[str, Row]]:
    """List the values of all layers, and of each."""
    return [("all", found), *((str(one["layer"]), one) for one in found["layers"])]


def stability_table(found: Row) -> Table:
    """Show the overlap of consecutive supports, within sentences and across boundaries."""
    rows = [
        (place, kind, *_spread(values[key]))
        for place, values in by_layer(found)
        for kind, key in (("within a sentence", "within"), ("across a boundary", "across"))
    ]
    chance = f"of two random ones {number(found['chance'])}"
    title = f"Overlap coefficient of consecutive supports ({chance})"
    return Table(title, ("layer", "steps", *SPREAD, "n"), rows, left=2)


def lag_table(found: Row) -> Table:
    """Show how the overlap with the support of the last refresh falls."""
    rows = []
    for lag in found["lags"]:
        mean, _, *quantiles, n = _spread(lag["reuse"])
        refresh = _spread(lag["refresh"])
        rows.append((span(lag["from_lag"], lag["to_lag"]), mean, *quantiles, n, refresh[0], refresh[-1]))
    recorded = found["refreshes"] == "recorded"
    since = "last refresh" if recorded else "last step that Eq. 5 makes slow"
    title = f"Overlap with the support at the {since}, by steps since then"
    columns = ("lag", "mean", *SPREAD[2:], "n", "at refreshes", "n")
    return Table(title, columns, rows)


def audit_table(found: Row) -> Table:
    """Show by layer the mass that fast steps retained, their output error, and the query cosine."""
    rows = []
    for place, one in by_layer(found):
        names = ("retained_mass", "retained_mass_min", "top_1_read", "output_error", "query_cosine")
        kept, least, top_1, error, cosine = (one[name] for name in names)
        rows.append(
            (
                place, *(number(kept[name]) for name in ("mean", "p5", "min")), count(kept["n"]),
                number(least["mean"]), number(top_1["mean"]),
                *(number(error[name]) for name in ("mean", "p95")),
                *(number(cosine[name]) for name in ("mean", "p5")),
            )
        )  # fmt: skip
    title = "Audited steps: mass that fast ones retained and their error, query cosine of all"
    columns = (
        "layer", "retained", "p5", "min", "n", "least head", "top-1 read", "output error", "error's p95",
        "query cosine", "cosine's p5",
    )  # fmt: skip
    return Table(title, columns, rows, spare=("cosine's p5", "error's p95", "p5"))


def logits_line(found: Row) -> str:
    """Say how far the next token's distribution is from dense attention's."""
    return f"next token: {compared_words(found)} fast steps\n"


def compared_words(found: Row) -> str:
    """Say how far next-token distributions are from dense attention's, and of how many."""
    kl = found["kl_next_token"]
    return (
        f"KL {number(kl['mean'], 4)} nats on average, p95 {number(kl['p95'], 4)}, at most {number(kl['max'], 4)}; "
        f"same most probable token in {percent(found['argmax_agreement'])} of {count(kl['n'])}"
    )


def selection_table(found: Row) -> Table:
    """Show the overlap of consecutive selections, lambda*, and what codescan's scores say."""
    names = {
        "overlap_previous": "overlap with the one before",
        "jaccard_previous": "Jaccard index with it",
        "lambda_star": "lambda*",
        "unread_estimate": "estimated attention not read",
        "score_margin": "last score chosen over first left",
    }
    rows = [
        (title, *_spread(found[name], 4 if name == "lambda_star" else 3))
        for name, title in names.items()
        if found[name]["n"]
    ]
    clipped = found["clipped_share"]
    title = "Selections"
    if clipped is not None:
        title += f"; lambda* is clipped in {percent(clipped)} of them"
    return Table(title, ("", *SPREAD, "n"), rows)


def coverage_line(found: Row) -> str:
    """Say how much of the prompt was ever selected, at what distance, and for how many refreshes."""
    far = found["distance"]
    sampled = f", positions of every {found['every']}th refresh" if found["every"] > 1 else ""
    p5, p50, p95, most = (number(far[name], 0) for name in ("p5", "p50", "p95", "max"))
    return (
        f"selected: {percent(found['selected'])} of the prompt's positions by a KV head, "
        f"{percent(found['selected_by_any'])} by any; {p50} tokens behind the query (5 to 95 %: "
        f"{p5} to {p95}, at most {most}); a position stays for {number(found['stay'], 1)} "
        f"refreshes{sampled}\n"
    )


def _spread(values: Row | None, digits: int = 3) -> list[str]:
    if values is None:
        return ["-"] * len(SPREAD) + ["0"]
    return [*(number(values[name], digits) for name in SPREAD), count(values["n"])]
