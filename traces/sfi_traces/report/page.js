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

const colors = template();
for (const [name, figure] of Object.entries(figures)) {
  Plotly.newPlot(name, figure.data, { ...figure.layout, template: colors }, SHOWN);
}
setUpText();
document.getElementById("theme").textContent = isDark() ? "Light mode" : "Dark mode";
document.getElementById("theme").addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  restyle();
});
prefersDark.addEventListener("change", restyle);
