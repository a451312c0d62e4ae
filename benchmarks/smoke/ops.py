"""Stage 2: each op once against its reference, small and at 16K x 4; errors over what rounding allows."""

from itertools import chain
from typing import Any

from benchmarks.smoke.journal import Journal
from benchmarks.smoke.plan import Plan
from sfi_core.measure.bench.bench import release
from sfi_core.measure.kernel_bench.cases import groups
from sfi_core.measure.kernel_bench.data import LayerData
from sfi_core.measure.kernel_bench.gates import logits_error
from sfi_core.measure.kernel_bench.settings import KernelSettings
from sfi_kernels.dense_attention import window_logits

WINDOW = 64  # a prompt's last queries


def check(journal: Journal, plan: Plan) -> None:
    """Compare every op in every dtype, width and shape."""
    for shape in plan.shapes:
        for dtype in plan.dtypes:
            for width in plan.widths:
                settings = KernelSettings(**{**shape, "dtype": dtype, "head_dim": width})
                at = f"{dtype} D={width} {settings.context} x {settings.batch}"
                journal.trial(at, lambda at=at, settings=settings: _one(journal, plan, settings, at))
                release(plan.device)


def _one(journal: Journal, plan: Plan, settings: KernelSettings, at: str) -> None:
    layer = LayerData(settings, "triton", plan.device)
    for variant in chain.from_iterable(variants for _, variants in groups(layer)):
        form = f" ({variant.form})" if variant.form else ""
        journal.trial(f"{at}: {variant.label}{form}", lambda variant=variant: _measured(variant))
    journal.note(f"{at}: notes", said="; ".join(layer.notes))
    journal.trial(f"{at}: prompt, window_logits", lambda: _window(layer))


def _measured(variant: Any) -> dict[str, Any]:
    return {"error_share": variant.error_share, **({"failed": variant.failure} if variant.failure else {})}


def _window(data: LayerData) -> dict[str, Any]:
    scale, settings = data.settings.scale, data.settings
    query = data.draw(settings.batch, settings.kv_heads, settings.group, WINDOW, settings.head_dim)
    key, _, table = data.paged
    got, expected = (
        backend(query, key, table, data.length_B, scale=scale).float().nan_to_num(neginf=0.0)
        for backend in (window_logits.triton, window_logits.reference)
    )
    share = logits_error(got, expected, query, data.key_BHTD, scale)
    return {"error_share": share, "right": share <= 1}
