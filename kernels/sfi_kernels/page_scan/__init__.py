"""The best pages of a whole batch, by the extremes of their keys: the choice of a `quest` or `freekv` step.

Two launches: the first brings the extremes up to date and scores the pages, the second takes the best.
"""

from sfi_kernels.op import Op
from sfi_kernels.page_scan import reference
from sfi_kernels.page_scan.reference import LastStep, PageSummaries, summarize

page_scan = Op(reference.page_scan)

__all__ = ["LastStep", "PageSummaries", "page_scan", "summarize"]
