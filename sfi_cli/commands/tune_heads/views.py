"""The tables of `sfi tune heads`, from its document."""

from typing import Any

from sfi_cli.terminal.tables import Part
from sfi_traces.views.table import Columns, Row, Table, number, percent, plural

AGREEMENT = ("agreement", "agreement_least", "same_representatives")
COMPARISON = (
    "pairs that agree: head pairs that two parts both put together or both keep apart, the mean over every "
    "two parts; least: of the two parts that differ most. same representatives: parts that choose the same."
)
TRIVIAL = " One cluster, or a cluster for each head: there the pairs agree whatever the texts."


def heads_text(document: dict[str, Any]) -> list[Part]:
    """Return the clusters of each layer, and how far the parts agree."""
    found = Table.of("Clusters of KV heads", CLUSTERS, document["layers"], left=3)
    blocks: list[Part] = [_heading(document), "", found]
    blocks.append(
        f"alike: overlap of the top {document['top_k']:,} of two heads, of one cluster or of two, over "
        f"{plural(document['steps'], 'step')}; a dash where there is no such pair."
    )
    if document["parts"] > 1:
        blocks += ["", *_robustness(document)]
    if not document["digest"]:
        blocks += ["", "The head file does not say which checkpoint it is of; add --model."]
    return blocks


def _heading(document: Row) -> str:
    places = ", ".join(document.get("traces") or document["files"])
    return (
        f"{document['model']}, {plural(document['texts'], 'text')} of {places}: "
        f"{plural(document['clusters'], 'cluster')} a layer"
    )


def _groups(cluster_of: list[int]) -> str:
    # 0 2 3 | 1
    return " | ".join(
        " ".join(str(head) for head, own in enumerate(cluster_of) if own == cluster)
        for cluster in range(max(cluster_of) + 1)
    )


def _robustness(document: Row) -> list[Part]:
    layers = document["layers"]
    means = {name: sum(float(one[name]) for one in layers) / len(layers) for name in AGREEMENT}
    rows = [*layers, {"layer": "all", **means}]
    trivial = all(len(one["representatives"]) in (1, len(one["cluster_of"])) for one in layers)
    title = f"{document['parts']} disjoint parts of the texts, clustered alone"
    return [Table.of(title, COMPARED, rows), COMPARISON + TRIVIAL * trivial]


CLUSTERS: Columns = {
    "layer": (str, "layer"),
    "clusters": (_groups, "cluster_of"),
    "representatives": lambda one: ", ".join(map(str, one["representatives"])),
    "alike within": (number, "similarity_within"),
    "between": (number, "similarity_between"),
}
COMPARED: Columns = {
    "layer": (str, "layer"),
    "pairs that agree": (percent, "agreement"),
    "least": (percent, "agreement_least"),
    "same representatives": (percent, "same_representatives"),
}
