"""Write `sfi trace report` with a smaller build of Plotly, for a file that is looked at on the web.

python docs/small_report.py run docs/report.html plotly-cartesian.min.js
"""

import argparse
from pathlib import Path

from plotly.offline import get_plotlyjs

from sfi_traces import Trace
from sfi_traces.report import render
from sfi_traces.views.view import View


def main() -> None:
    """Write the report of a trace's first request."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("plotly", type=Path, help="a build with heat maps and lines")
    arguments = parser.parse_args()
    page, whole = render(View(Trace.open(arguments.trace))), get_plotlyjs()
    assert whole in page, "the report has Plotly in it"
    page = page.replace(whole, arguments.plotly.read_text(encoding="utf-8"))
    arguments.output.write_text(page, encoding="utf-8")
    print(f"Wrote {arguments.output} ({len(page.encode()) / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
