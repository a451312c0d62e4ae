"""The tables of `sfi tune heads`, from its document."""

from typing import Any

from sfi_cli.terminal.tables import number, percent, plural, table, wrapped

COLUMNS = ("layer", "clusters", "representatives", "alike within", "between")
COMPARED = ("layer", "pairs that agree", "least", "same representatives")
AGREEMENT = ("agreement", "agreement_least", "same_representatives")
COMPARISON = (
    "pairs that agree: head pairs that two parts both put together or both keep apart, the mean over every "
    "two parts; least: of the two parts that differ most. same representatives: parts that choose the same."
)
TRIVIAL = " One cluster, or a cluster for each head: there the pairs agree whatever the texts."


def heads_text(document: dict[str, Any]) -> str:
    """Return the clusters of each layer, and how far the parts agree."""
    blocks: list[Any] = [_heading(document), "", _clusters(document["layers"])]
    blocks.append(
        f"alike: overlap of the top {document['top_k']:,} of two heads, of one cluster or of two, over "
        f"{plural(document['steps'], 'step')}; a dash where there is no such pair."
    )
    if document["parts"] > 1:
        blocks += ["", *_robustness(document)]
    if not document["digest"]:
        blocks += ["", "The head file does not say which checkpoint it is of; add --model."]
    return wrapped(blocks)


def _heading(document: dict[str, Any]) -> str:
    places = ", ".join(document.get("traces") or document["files"])
    return (
        f"{document['model']}, {plural(document['texts'], 'text')} of {places}: "
        f"{plural(document['clusters'], 'cluster')} a layer"
    )


def _clusters(layers: list[dict[str, Any]]) -> Any:
    return table(
        "Clusters of KV heads",
        COLUMNS,
        [
            [
                str(one["layer"]),
                _groups(one["cluster_of"]),
                ", ".join(map(str, one["representatives"])),
                number(one["similarity_within"]),
                number(one["similarity_between"]),
            ]
            for one in layers
        ],
        left=3,
    )


def _groups(cluster_of: list[int]) -> str:
    # 0 2 3 | 1
    return " | ".join(
        " ".join(str(head) for head, own in enumerate(cluster_of) if own == cluster)
        for cluster in range(max(cluster_of) + 1)
    )


def _robustness(document: dict[str, Any]) -> list[Any]:
    rows = [[str(one["layer"]), *(percent(one[name]) for name in AGREEMENT)] for one in document["layers"]]
    rows.append(["all", *(percent(_mean(document["layers"], name)) for name in AGREEMENT)])
    return [
        table(f"{document['parts']} disjoint parts of the texts, clustered alone", COMPARED, rows),
        COMPARISON + (TRIVIAL if all(map(_alone, document["layers"])) else ""),
    ]


def _mean(layers: list[dict[str, Any]], name: str) -> float:
    return sum(float(one[name]) for one in layers) / len(layers)


def _alone(one: dict[str, Any]) -> bool:
    return len(one["representatives"]) in (1, len(one["cluster_of"]))
