"use strict";
const figures = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
// a trace holds prompts: no button that sends a figure anywhere
const SHOWN = {
  responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "",
  modeBarButtonsToRemove: ["select2d", "lasso2d"],
};

// Plotly knows no CSS: it gets the colors that the page has now
function template() {
  const body = getComputedStyle(document.body);
  const card = getComputedStyle(document.querySelector(".card"));
  const note = getComputedStyle(document.querySelector(".note"));
  const axis = {
    automargin: true, gridcolor: card.borderTopColor, linecolor: card.borderTopColor,
    zerolinecolor: card.borderTopColor,
  };
  return {
    layout: {
      font: { color: body.color, family: body.fontFamily, size: 12 },
      paper_bgcolor: "rgba(0, 0, 0, 0)",
      plot_bgcolor: "rgba(0, 0, 0, 0)",
      xaxis: axis,
      yaxis: axis,
      hoverlabel: { bgcolor: card.backgroundColor, bordercolor: note.color, font: { color: body.color } },
      modebar: { bgcolor: "rgba(0, 0, 0, 0)", color: note.color, activecolor: body.color },
    },
  };
}

function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches;
}

function restyle() {
  document.getElementById("theme").textContent = isDark() ? "Light mode" : "Dark mode";
  const colors = template();
  for (const name of Object.keys(figures)) Plotly.relayout(name, { template: colors });
}

// four cells to a byte, the first in the lowest bits; a row of cells for each stretch of positions
function unpack(text, [high, wide]) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const cells = new Uint8Array(high * wide);
  for (let i = 0; i < cells.length; i++) cells[i] = (bytes[i >> 2] >> (2 * (i & 3))) & 3;
  return Array.from({ length: high }, (_, row) => cells.subarray(row * wide, (row + 1) * wide));
}

function fillSelect(select, values, chosen) {
  for (const value of values) select.add(new Option(value, value, false, value === chosen));
}

function setUpRaster() {
  const raster = figures.raster;
  const layer = document.getElementById("layer");
  const head = document.getElementById("head");
  const first = raster.choices[raster.chosen];
  let now = first;
  const heads = () => raster.choices.filter((c) => c.layer === Number(layer.value)).map((c) => c.head);
  fillSelect(layer, new Set(raster.choices.map((c) => c.layer)), first.layer);
  fillSelect(head, heads(), first.head);
  const show = () => {
    now = raster.choices.find((c) => c.layer === Number(layer.value) && c.head === Number(head.value));
    Plotly.restyle("raster", { z: [unpack(now.cells, raster.shape)] }, [0]);
    const title = `Support of each step in layer ${now.layer}, KV head ${now.head}`;
    document.querySelector(".raster h2").textContent = title;
    document.getElementById("raster").setAttribute("aria-label", title);
  };
  layer.addEventListener("change", () => {
    const before = Number(head.value);
    head.replaceChildren();
    fillSelect(head, heads(), before);
    show();
  });
  head.addEventListener("change", show);
  raster.data[0].z = unpack(first.cells, raster.shape);
  return (event) => {
    const point = event.points.find((p) => p.curveNumber === 0);
    if (!point) return;
    const [row, column] = point.pointIndex;
    const from = row * raster.perCell;
    const to = from + raster.perCell - 1;
    const where = to > from ? `positions ${from} to ${to}` : `position ${from}`;
    const step = `step ${point.x}${raster.slow[column] ? ", slow" : ""}`;
    const text = raster.texts[row] ? `: “${raster.texts[row]}”` : "";
    const kind = now.words[point.z] ? `; ${now.words[point.z]}` : "";
    document.getElementById("cell").textContent = `${step}; ${where}${text}${kind}`;
  };
}

function setUpText() {
  const tip = document.getElementById("tip");
  const text = document.getElementById("text");
  text.addEventListener("pointermove", (event) => {
    tip.hidden = !event.target.dataset.about;
    if (tip.hidden) return;
    tip.textContent = event.target.dataset.about;
    tip.style.left = `${Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 12)}px`;
    tip.style.top = `${Math.min(event.clientY + 18, innerHeight - tip.offsetHeight - 8)}px`;
  });
  text.addEventListener("pointerleave", () => { tip.hidden = true; });
}

const describeCell = figures.raster && setUpRaster();
const colors = template();
for (const [name, figure] of Object.entries(figures)) {
  Plotly.newPlot(name, figure.data, { ...figure.layout, template: colors }, SHOWN);
}
if (describeCell) document.getElementById("raster").on("plotly_hover", describeCell);
setUpText();
document.getElementById("theme").textContent = isDark() ? "Light mode" : "Dark mode";
document.getElementById("theme").addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  restyle();
});
prefersDark.addEventListener("change", restyle);
