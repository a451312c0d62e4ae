"""Titles and notes of the figures of what SyncKV and FreeKV observed."""

from sfi_traces.views.captions import Caption, layers_left_out, left_out, places, support
from sfi_traces.views.drift import Drift
from sfi_traces.views.head_similarity import HeadSimilarity
from sfi_traces.views.observations import Corrections, Cosines
from sfi_traces.views.view import View


def drift(view: View, data: Drift) -> Caption:
    """Describe the overlap with the prompt's support."""
    where = places(list(data.overlap))
    note = f"{support(view, view.k)}, {where}."
    if data.points > 1:
        note += f" A point is over {data.points:,} of them; the band holds 10 to 90 %."
    return Caption(
        "Attention drift: overlap with the support of step 0, the prompt's",
        note + left_out(view, view.supports, view.supports),
    )


def head_similarity(view: View, data: HeadSimilarity) -> Caption:
    """Describe the overlap of each two layers' heads."""
    note = (
        f"{support(view, view.k)}, {data.steps:,} steps. Mean overlap of each KV head of a layer "
        "with those of another at the same step, and on the diagonal with the others of its own. "
        f"Within a layer {data.within:.3f}, between layers {data.between:.3f}."
        f"{layers_left_out(view)}"
    )
    return Caption("Similarity of heads, layer by layer", note)


def query_cosine(data: Cosines) -> Caption:
    """Describe the query cosine."""
    under = " and ".join(f"{share:.1%} under {tau:g}" for tau, share in data.below.items())
    note = (
        f"Mean over the query heads of a KV head, rotated queries. Of {data.values:,} values, mean "
        f"{data.overall:.3f}, {under}: where FreeKV would correct at this tau. The course is that of the "
        "lowest heads."
    )
    return Caption("Query cosine with the step before", note)


def corrections(data: Corrections) -> Caption:
    """Describe the corrections."""
    note = (
        f"Share of {data.pairs:,} fast steps x layers x KV heads whose query moved, so that the head "
        f"selected anew before it attended: {data.overall:.1%}."
    )
    return Caption("Corrections of single heads (FreeKV)", note)
