"""Fills HTML pages that load nothing: template, style, scripts and Plotly in one file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def page(template: str, scripts: Sequence[str], **values: Any) -> str:
    """Fill a template of this folder; `scripts` are files beside it, `values` what the template names."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # noqa: PLC0415 - an extra
    from plotly.offline import get_plotlyjs  # noqa: PLC0415 - an extra

    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(
        **values,
        style=(HERE / "page.css").read_text(encoding="utf-8"),
        script="\n".join((HERE / name).read_text(encoding="utf-8") for name in scripts),
        plotly=get_plotlyjs(),
    )
