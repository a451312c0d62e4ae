"""The HTML report: what stands in it, and how it does in a real browser."""

import base64
import json
import re
import shutil
import zlib
from contextlib import contextmanager
from pathlib import Path
from runpy import run_path

import numpy as np
import pytest

from sfi_core.models.load import load_tokenizer
from sfi_traces.importing import import_trace
from sfi_traces.model.request import Request
from sfi_traces.model.trace import Trace
from sfi_traces.report import render
from sfi_traces.summary.similarity import compare_heads, drift
from sfi_traces.summary.supports import query_cosine
from sfi_traces.views.figure_data import HeadMap, lag_lines
from tests.traces.imports import LAYERS, STEPS, selection_arrays, write_npz
from tests.traces.made import WORDS, make_trace
from tests.traces.small import rewrite

pytest.importorskip("jinja2")
get_plotlyjs = pytest.importorskip("plotly.offline").get_plotlyjs
DOCS = Path(__file__).parent.parent.parent / "docs"
HOSTILE = "</script><script>document.title='x'</script><img src=x onerror=\"document.title='x'\"><b>"
FIGURES = ["heatmap", "lag", "retained", "timeline", "lambda", "drift", "head-similarity", "query-cosine"]


@pytest.fixture
def sfi(tmp_path) -> Request:
    return Request(Trace.open(make_trace(tmp_path / "sfi", steps=40, policy="sfi")))


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> tuple[Request, str]:
    folder = tmp_path_factory.mktemp("shown") / "sfi"
    view = Request(Trace.open(make_trace(folder, steps=40, policy="sfi")))
    return view, render(view)


@pytest.fixture
def full(tmp_path) -> Request:
    return Request(Trace.open(make_trace(tmp_path / "full", steps=30, requests=2)), index=1)


def data(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1])


def visible(page: str) -> str:
    return re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def array(value: dict) -> np.ndarray:
    flat = np.frombuffer(base64.b64decode(value["bdata"]), value["dtype"])
    return flat.reshape([int(size) for size in value.get("shape", str(len(flat))).split(",")])


def test_the_page_has_the_numbers_of_the_summary(shown):
    sfi, page = shown
    assert sorted(data(page)) == sorted(FIGURES)
    order = re.findall(r'class="plot" id="([a-z-]+)"', page)
    assert (order[0], order[-2:]) == ("heatmap", ["timeline", "lambda"])
    for words in (
        "<h1>sfi</h1>", "made-up, policy sfi, request 0, 200 prompt tokens, 40 steps",
        "10.0%, 4 of 40 (3 trigger, 1 first)", "retained mass", "of 36 audited fast steps; KL",
    ):  # fmt: skip
        assert words in page
    steps = sfi.steps
    ratio = steps.attended[1:].sum() / steps.context[1:].sum()
    assert f'<p class="value">{ratio:.1%}</p>' in page


def test_the_figures_have_the_numbers_of_the_trace(shown):
    sfi, page = shown
    figures = data(page)
    heat = figures["heatmap"]["data"][0]
    assert (array(heat["z"]) == np.round(100 * sfi.supports.overlap)).all()
    assert heat["x"][:2] == ["0 the", "1 cat"]
    mean = figures["lag"]["data"][2]
    assert array(mean["y"]).tolist() == lag_lines(sfi)[0].mean.tolist()
    assert array(figures["lambda"]["data"][0]["x"]).tolist() == [0, 10, 20, 30]
    drifted = figures["drift"]["data"][2]
    assert array(drifted["y"]).tolist() == drift(sfi.supports)[1].mean(0).tolist()
    for name in ("drift", "lag"):
        layout = figures[name]["layout"]
        (low, high), (chance,) = layout["yaxis"]["range"], layout["shapes"]
        assert chance["y0"] == pytest.approx(sfi.supports.chance)
        assert 0 <= low <= chance["y0"] <= high < 1
    alike = array(figures["head-similarity"]["data"][0]["z"])
    assert alike.tolist() == compare_heads([sfi.supports])["matrix"].tolist()
    cosine, *courses = figures["query-cosine"]["data"]
    heads = query_cosine(sfi)["heads"]
    mean_of = {(head["layer"], head["head"]): head["mean"] for head in heads}
    assert array(cosine["z"]).tolist() == HeadMap.of(mean_of).value.T.tolist()
    assert [len(array(line["y"])) for line in courses] == [39] * 4


def words(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="reading">(.*?)</script>', page)[1])


def test_the_page_has_what_each_refresh_selected(tmp_path):
    """As many KV heads of each layer as the trace's own rows say, though some select on their own."""
    view = Request(Trace.open(make_trace(tmp_path / "t", steps=40, policy="freekv")))
    page_data = words(render(view))
    begins, layers = page_data["counts"]["begins"], page_data["layers"]
    deltas = np.frombuffer(zlib.decompress(base64.b64decode(page_data["counts"]["packed"])), np.uint8)
    counts = deltas.reshape(len(begins), len(layers), -1).cumsum(0, dtype=np.uint8)
    assert page_data["cells"][10] == f" {WORDS[0]}"
    for step in (5, 17, 39):
        reads = view.reads(step)
        state = np.searchsorted(begins, step, side="right") - 1
        for row, layer in enumerate(layers):
            expected = np.zeros(counts.shape[2], int)
            for place, positions in reads.selected.items():
                expected[positions] += place[0] == layer
            assert counts[state, row].tolist() == expected.tolist()


def test_the_page_has_the_places_with_the_most_attention(sfi):
    half = [True, False] * 12
    rewrite(sfi.trace.path, "supports", lambda rows: [row | {"read": half} for row in rows])
    masses = words(render(Request(sfi.trace)))["mass"]
    lists = np.frombuffer(zlib.decompress(base64.b64decode(masses["packed"])), np.uint16)
    lists = lists.reshape(len(masses["steps"]), len(masses["layers"]), masses["list"], 3)
    whole, lost = np.zeros(260), np.zeros(260)
    supports = sfi.supports.of_places([(1, 0), (1, 1)])
    for position, mass in zip(supports.position_NUK[7], supports.mass_NUK[7], strict=True):
        np.add.at(whole, position, mass / 2)
        np.add.at(lost, position[1::2], mass[1::2] / 2)
    cell, mass, missed = lists[masses["steps"].index(7), 1].astype(int).T
    assert sorted(mass, reverse=True) == mass.tolist()
    assert np.abs(mass / 65_535 - whole[cell]).max() < 1e-5
    assert np.abs(missed / 65_535 - lost[cell]).max() < 1e-5


def test_refreshes_that_do_not_fit_are_left_out_and_the_page_says_from_where(sfi, monkeypatch):
    monkeypatch.setattr("sfi_traces.report.text.MOST_BYTES", 0)
    monkeypatch.setattr("sfi_traces.report.text.MOST_CELLS", 100)
    page_data = words(render(sfi))
    assert page_data["perCell"] == 3
    assert len(page_data["cells"]) == 80
    assert (page_data["counts"]["begins"], page_data["counts"]["until"]) == ([1], 11)


def test_an_imported_step_lights_the_positions_of_its_own_selection(tmp_path):
    import_trace(write_npz(tmp_path / "a.npz"), tmp_path / "a", tokenizer=load_tokenizer())
    page_data = words(render(Request(Trace.open(tmp_path / "a"))))
    assert page_data["slow"] == []
    assert page_data["counts"]["begins"] == list(range(STEPS))
    deltas = np.frombuffer(zlib.decompress(base64.b64decode(page_data["counts"]["packed"])), np.uint8)
    counts = deltas.reshape(STEPS, LAYERS, -1).cumsum(0, dtype=np.uint8)
    for step, layers in enumerate(selection_arrays()["positions"]):
        for layer, position in enumerate(layers):
            expected = sorted(position[position >= 0].tolist())
            assert np.flatnonzero(counts[step, layer]).tolist() == expected


def test_a_long_trace_is_thinned_out_and_the_page_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("sfi_traces.report.figures.MOST_STEPS", 50)
    monkeypatch.setattr("sfi_traces.report.text.MOST_TOKENS", 70)
    page = render(Request(Trace.open(make_trace(tmp_path / "t", steps=100))))
    assert "50 of 100 audited steps are drawn, evenly chosen." in page
    assert "The last 30 tokens are left out." in page


def test_text_of_the_run_is_text_on_the_page(sfi):
    rewrite(sfi.trace.path, "steps", lambda rows: [row | {"token_text": HOSTILE} for row in rows])
    rewrite(sfi.trace.path, "prompts", lambda rows: [row | {"token_text": HOSTILE} for row in rows])
    page = render(Request(sfi.trace))
    assert "<img" not in visible(page)
    assert "&lt;/script&gt;" in visible(page)
    assert "<" not in "".join(data(page)["heatmap"]["data"][0]["x"])  # Plotly would read it as markup


def test_a_redacted_trace_shows_steps_for_tokens(full):
    hide = {"token_id": None, "token_text": None}
    rewrite(full.trace.path, "steps", lambda rows: [row | hide for row in rows])
    rewrite(full.trace.path, "prompts", lambda _: [])
    page = render(Request(full.trace))
    assert data(page)["heatmap"]["data"][0]["x"] == [str(step) for step in range(30)]
    assert "> 29 </span>" in page
    assert words(page) is None
    assert "has no text: it was recorded without a tokenizer" in page


def test_a_trace_of_steps_alone_makes_a_page_that_says_what_records_the_rest(tmp_path):
    folder = make_trace(tmp_path / "t", steps=3, audit=None, finished=None)
    shutil.rmtree(folder / "timings")
    page = render(Request(Trace.open(folder)))
    assert data(page) == {}
    assert "record it with --audit 1" in page
    assert "3 steps, killed" in page


# every figure is as wide as its place
FOLLOWED = """[...document.querySelectorAll('.plot')].every(
    (plot) => plot.querySelector('.main-svg').width.baseVal.value <= plot.clientWidth + 1)"""


def until(page, expression: str) -> None:
    """Wait; the page's own policy forbids what Playwright would do."""
    for _ in range(200):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(25)
    raise AssertionError(f"never came: {expression}")


@pytest.fixture
def opened(browser, sfi, tmp_path):
    strange = {"token_text": HOSTILE}
    rewrite(sfi.trace.path, "prompts", lambda rows: [row | strange if row["position"] == 5 else row for row in rows])
    rewrite(sfi.trace.path, "steps", lambda rows: [row | strange if row["step"] == 12 else row for row in rows])
    file = tmp_path / "report.html"
    file.write_text(render(Request(sfi.trace)), encoding="utf-8")
    with visited(browser, file) as page:
        yield page


@contextmanager
def visited(browser, file: Path):
    """A report in Chromium; whatever it says or asks for beside itself fails the test."""
    said, asked = [], []
    page = browser.new_page(viewport={"width": 1366, "height": 768}, color_scheme="light")
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    until(page, "document.querySelectorAll('.plot .main-svg').length >= 6")
    yield page
    assert said == []
    assert [url for url in asked if not url.startswith(("data:", "blob:"))] == [file.as_uri()]


@pytest.mark.exhaustive
def test_the_example_in_the_docs_works_in_a_browser(browser):
    with visited(browser, DOCS / "report.html") as page:
        _every_figure_is_drawn(page, [name for name in FIGURES if name != "lambda"])  # at its clip: not drawn


@pytest.mark.exhaustive
def test_a_report_with_a_packed_plotly_works_in_a_browser(browser, sfi, tmp_path):
    small = run_path(str(DOCS / "small_report.py"))["small"]
    page, file = render(sfi), tmp_path / "small.html"
    file.write_text(small(page, get_plotlyjs().encode()), encoding="utf-8")
    assert file.stat().st_size < len(page) / 2
    with visited(browser, file) as page:
        _every_figure_is_drawn(page)


@pytest.mark.exhaustive
def test_the_page_works_in_a_browser(opened):
    page = opened
    _every_figure_is_drawn(page)
    _text_stays_text(page)
    _the_page_is_in_the_order_of_an_engineer_s_questions(page)
    _a_step_unlike_full_attention_leads_to_what_it_missed(page)
    _a_token_lights_up_what_its_step_read(page)
    _a_pointer_shows_what_it_is_over(page)
    _dark_and_light_restyle_the_figures(page)
    for width, height in ((1366, 768), (1920, 1080), (420, 900)):
        page.set_viewport_size({"width": width, "height": height})
        until(page, FOLLOWED)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        _no_button_covers_a_label(page)
        _every_figure_is_drawn(page)


def _every_figure_is_drawn(page, figures=FIGURES) -> None:
    for name in figures:
        box = page.locator(f"#{name} .main-svg").first.bounding_box()
        assert box["width"] > 250, name
        assert box["height"] >= 200, name
    traces = "name => document.querySelectorAll(`#${name} :is(.trace, .hm, .scatterlayer path)`).length"
    assert all(page.evaluate(traces, name) for name in figures)
    buttons = page.locator(".modebar-btn").evaluate_all("all => all.map(b => b.dataset.title)")
    assert "Download plot as a PNG" in buttons
    assert not [title for title in buttons if "hare" in title or "loud" in title]
    images = page.evaluate("[...document.querySelectorAll('#heatmap image')].map(i => i.href.baseVal.length)")
    assert len(images) == 1
    assert min(images) > 200


def _no_button_covers_a_label(page) -> None:
    covered = """[...document.querySelectorAll('.plot')].flatMap((plot) => {
        const bar = plot.querySelector('.modebar-container .modebar').getBoundingClientRect();
        return [...plot.querySelectorAll('.colorbar text, .cbaxis text, .legendtext')].filter((label) => {
            const box = label.getBoundingClientRect();
            return box.top < bar.bottom && box.bottom > bar.top && box.left < bar.right && box.right > bar.left;
        }).map((label) => `${plot.id} ${label.textContent}`);
    })"""
    assert page.evaluate(covered) == []


def _the_page_is_in_the_order_of_an_engineer_s_questions(page) -> None:
    cards = page.locator(".cards h3").all_text_contents()
    assert cards == ["full attention's token", "retained mass", "cache read", "tokens/s"]
    titles = page.locator("h2").all_text_contents()
    assert titles[:3] == ["What it answered", "Where full attention would have said something else", "What a step read"]
    assert [title.partition(":")[0] for title in titles[3:5]] == [
        "Selection health",
        "Support overlap of every two steps",
    ]
    assert not page.locator(".health li").first.is_visible()  # a note is not among the first things


def _a_step_unlike_full_attention_leads_to_what_it_missed(page) -> None:
    """Each is a colored token of the answer; the page opens with that of the largest divergence."""
    until(page, "document.getElementById('source').dataset.ready === 'true'")
    listed = page.locator("#others button")
    labels = [text.split() for text in listed.all_inner_texts()]
    assert page.locator("#text .other").count() == len(labels) > 1
    assert page.locator("#words-step").text_content().startswith(f"step {labels[0][1]} fast")
    listed.nth(1).click()
    said = page.locator("#words-step").text_content()
    assert said.startswith(f"step {labels[1][1]} fast; attended ")
    assert "full attention: ' river' (" in said
    assert re.search(
        r"full attention ' river' \(\d+%\)\s+KL 0\.\d+; missed: .+ of the attention\)", listed.nth(1).inner_text()
    )


def _text_stays_text(page) -> None:
    assert page.title() == "sfi: sfi trace report"
    assert page.locator("main img").count() == 0
    assert HOSTILE in page.locator("#text").text_content()
    assert HOSTILE in page.locator("pre").text_content()
    lines = page.locator("#text li")
    assert lines.count() == 4
    assert lines.nth(0).inner_text().split() == [*WORDS[:9], "."] or lines.nth(0).inner_text().strip()
    assert page.locator("#text .slow").count() == 4


def _a_token_lights_up_what_its_step_read(page) -> None:
    """Click, keys, layer, dark and light: the trace's step 17 read what step 10 selected."""
    until(page, "document.getElementById('source').dataset.ready === 'true'")
    lit = "[...document.querySelectorAll('#source span')].flatMap((s, i) => s.style.background ? [i] : [])"
    kept = "[...document.querySelectorAll('#source span')].flatMap((s, i) => s.matches('.kept') ? [i] : [])"
    said = page.locator("#words-step")
    page.select_option("#words-by", "heads")
    page.locator("#text li span").nth(17).click()
    assert said.text_content().startswith("step 17: fast; attended ")
    first = page.evaluate(lit)
    assert page.evaluate(kept) == [*range(4), *range(194, 217)]
    page.select_option("#words-layer", "1")
    of_layer = page.evaluate(lit)
    assert set(of_layer) < set(first)
    page.select_option("#words-by", "mass")
    assert page.evaluate(lit) not in (first, of_layer)
    passage = page.locator("#passages li").first
    assert re.search(r"positions? \d+.*; \d+\.\d+ % of the attention", passage.inner_text())
    passage.locator("button").click()
    assert page.locator("#source .shown").count() > 0
    page.select_option("#words-layer", "")
    page.select_option("#words-by", "heads")
    page.locator("#text").press("ArrowRight")
    assert said.text_content().startswith("step 18: fast; ")
    assert page.evaluate(lit) == first
    page.locator("#text").press("ArrowRight")
    page.locator("#text").press("ArrowRight")
    assert said.text_content().startswith("step 20: slow, trigger; ")
    assert "a slow step reads everything" in said.text_content()
    assert page.evaluate(lit) == page.evaluate(kept) == []
    page.locator("#text").press("Home")
    assert page.locator("#text .chosen").count() == 1
    assert said.text_content().startswith("step 0: slow")


def _a_pointer_shows_what_it_is_over(page) -> None:
    page.locator("#text li span").nth(10).hover()
    tip = page.locator("#tip").text_content()
    assert tip.startswith("step 10: slow, trigger; attended 210 of 210 tokens; ")
    page.locator("h1").hover()
    assert not page.locator("#tip").is_visible()


def _dark_and_light_restyle_the_figures(page) -> None:
    def colors() -> tuple[str, str]:
        body = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return body, page.evaluate(
            "getComputedStyle(document.querySelector('#lag .xtick text, #lag .x2tick text')).fill"
        )

    light = colors()
    page.locator("#theme").click()
    until(page, "document.getElementById('theme').textContent === 'Light mode'")
    dark = colors()
    assert dark[0] != light[0]
    assert dark[1] != light[1]
    page.locator("#theme").click()
    assert colors() == light
    page.evaluate("delete document.documentElement.dataset.theme")
    page.emulate_media(color_scheme="dark")
    until(page, "document.getElementById('theme').textContent === 'Light mode'")
    assert colors() == dark
