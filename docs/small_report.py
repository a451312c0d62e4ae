"""Write `sfi trace report` with a smaller build of Plotly, compressed, for a file that the web serves.

python docs/small_report.py run docs/report.html plotly-cartesian.min.js
"""

import argparse
import base64
import gzip
from pathlib import Path

from plotly.offline import get_plotlyjs

from sfi_traces import Trace
from sfi_traces.model.request import Request
from sfi_traces.report import render

# a module may wait: it unpacks Plotly, then the page's own script follows
UNPACK = """\
<script type="module">
const packed = Uint8Array.from(atob("PACKED"), (c) => c.charCodeAt(0));
const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
const plotly = document.createElement("script");
plotly.textContent = await new Response(stream).text();
document.head.append(plotly);
"""


def main() -> None:
    """Write the report of a trace's first request."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("plotly", type=Path, help="a build with heat maps and lines")
    arguments = parser.parse_args()
    page = small(render(Request(Trace.open(arguments.trace))), arguments.plotly.read_bytes())
    arguments.output.write_text(page, encoding="utf-8")
    print(f"Wrote {arguments.output} ({len(page.encode()) / 1e6:.1f} MB)")


def small(page: str, plotly: bytes) -> str:
    """Put a packed Plotly in the place of the page's own."""
    whole = f"<script>{get_plotlyjs()}</script>\n<script>\n"
    assert whole in page, "the report has Plotly in it, and its own script next"
    packed = base64.b64encode(gzip.compress(plotly, mtime=0)).decode()
    return page.replace(whole, UNPACK.replace("PACKED", packed))


if __name__ == "__main__":
    main()
