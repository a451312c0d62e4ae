
// what a step read: click a generated token, and the source text lights up
const reading = JSON.parse(document.getElementById("reading").textContent);
const PASSAGES = 40; // of the list
const GAP = 2, LONGEST = 64; // tokens: between two of a passage, and of a passage

async function inflate(packed) {
  const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return await new Response(stream).arrayBuffer();
}

// each refresh is stored less the one before
async function unpackCounts({ packed, begins }) {
  const counts = new Uint8Array(await inflate(packed));
  const size = counts.length / begins.length;
  for (let i = size; i < counts.length; i++) counts[i] += counts[i - size];
  return counts;
}

function lastAtMost(values, wanted) {
  let low = 0;
  for (let high = values.length; low < high; ) {
    const middle = (low + high) >> 1;
    if (values[middle] <= wanted) low = middle + 1; else high = middle;
  }
  return low - 1;
}

class Reading {
  constructor(counts, lists) {
    this.counts = counts;
    this.lists = lists;
    this.slow = new Set(reading.slow);
    this.width = reading.cells.length;
  }

  // how many KV heads selected something of each cell, in one layer or in all
  heads(row, layer) {
    const found = new Float64Array(this.width);
    if (!this.counts || this.slow.has(row)) return found;
    const step = row + reading.first;
    if (reading.counts.until !== null && step >= reading.counts.until) return found; // not in this file
    const state = lastAtMost(reading.counts.begins, step);
    if (state < 0) return found;
    reading.layers.forEach((each, at) => {
      if (layer !== null && each !== layer) return;
      const from = (state * reading.layers.length + at) * this.width;
      for (let cell = 0; cell < this.width; cell++) found[cell] += this.counts[from + cell];
    });
    return found;
  }

  // the attention on each cell, and how much of it was not read; null where the step was not audited
  mass(row, layer) {
    if (!this.lists) return null;
    const at = reading.mass.steps.indexOf(row + reading.first);
    const own = reading.mass.layers.filter((each) => layer === null || each === layer);
    if (at < 0 || !own.length) return null;
    const whole = new Float64Array(this.width);
    const lost = new Float64Array(this.width);
    for (const each of own) {
      const list = at * reading.mass.layers.length + reading.mass.layers.indexOf(each);
      for (let i = 0; i < reading.mass.list; i++) {
        const from = 3 * (list * reading.mass.list + i);
        whole[this.lists[from]] += this.lists[from + 1] / 65535 / own.length;
        lost[this.lists[from]] += this.lists[from + 2] / 65535 / own.length;
      }
    }
    return { whole, lost };
  }
}

// neighboring cells that are lit, as passages
function passages(lit, kind) {
  const found = [];
  const gap = Math.floor(GAP / reading.perCell) + 1;
  let now = null;
  lit.forEach((value, cell) => {
    if (!value) return;
    const other = !now || cell - now.last > gap || kind(cell) !== now.kind
      || (cell - now.first + 1) * reading.perCell > LONGEST;
    if (other) found.push(now = { first: cell, last: cell, kind: kind(cell), sum: 0, most: 0 });
    now.last = cell;
    now.sum += value;
    now.most = Math.max(now.most, value);
  });
  return found;
}

function setUpReading(data) {
  const text = document.getElementById("text");
  const tokens = [...text.querySelectorAll("li span")];
  const source = document.getElementById("source");
  const layer = document.getElementById("words-layer");
  const by = document.getElementById("words-by");
  const list = document.getElementById("passages");
  const end = (cell) => (cell + 1) * reading.perCell;
  const cells = reading.cells.map((words, cell) => {
    const span = document.createElement("span");
    span.textContent = words;
    if (cell * reading.perCell >= reading.prompt) span.className = "generated";
    return span;
  });
  source.append(...cells);
  let chosen = -1;
  let lit = new Set();

  const known = new Set([...reading.layers, ...(reading.mass ? reading.mass.layers : [])]);
  layer.add(new Option("all", ""));
  for (const each of [...known].sort((a, b) => a - b)) layer.add(new Option(each, each));
  if (data.lists) by.add(new Option("by attention", "mass"));
  if (data.counts || !data.lists) by.add(new Option("by KV heads that selected it", "heads"));
  by.parentElement.hidden = by.options.length < 2;

  function light(row) {
    for (const cell of lit) {
      cells[cell].style.background = "";
      cells[cell].classList.remove("kept", "shown");
    }
    lit = new Set();
    const place = layer.value === "" ? null : Number(layer.value);
    const mass = data.mass(row, place);
    const heads = data.heads(row, place);
    const byMass = by.value === "mass" && mass !== null;
    const shade = byMass ? mass.whole : heads;
    const missed = (cell) => byMass && mass.lost[cell] > mass.whole[cell] / 2;
    const most = Math.max(...shade);
    shade.forEach((value, cell) => {
      if (!value) return;
      const strength = Math.round(15 + 85 * (byMass ? Math.sqrt(value / most) : value / most));
      cells[cell].style.background =
        `color-mix(in srgb, var(${missed(cell) ? "--lost" : "--lit"}) ${strength}%, transparent)`;
      lit.add(cell);
    });
    if (reading.recent && !data.slow.has(row)) {
      const context = reading.prompt + row;
      const recent = Math.floor(reading.recent[row] / reading.perCell);
      for (let cell = 0; cell < cells.length && cell * reading.perCell < context; cell++) {
        if (end(cell) > reading.sink && cell < recent) continue;
        cells[cell].classList.add("kept");
        lit.add(cell);
      }
    }
    listPassages(passages(shade, missed), { heads, mass, byMass });
  }

  function listPassages(found, { heads, mass, byMass }) {
    found.sort((a, b) => (byMass ? b.sum - a.sum : b.most - a.most || b.sum - a.sum) || a.first - b.first);
    list.replaceChildren(...found.slice(0, PASSAGES).map((one) => {
      const words = reading.cells.slice(one.first, one.last + 1).join("");
      const from = one.first * reading.perCell;
      const to = end(one.last) - 1;
      const facts = [to > from ? `positions ${from} to ${to}` : `position ${from}`];
      let read = 0, held = 0;
      for (let cell = one.first; cell <= one.last; cell++) {
        read = Math.max(read, heads[cell]);
        held += mass ? mass.whole[cell] : 0;
      }
      if (read) facts.push(`selected by ${read} KV head${read === 1 ? "" : "s"}`);
      if (held) facts.push(`${(100 * held).toFixed(2)} % of the attention`);
      if (one.kind) facts.push("mostly not read");
      const button = document.createElement("button");
      const small = document.createElement("small");
      small.textContent = facts.join("; ");
      button.type = "button";
      button.append(words.length > 160 ? `${words.slice(0, 78)} … ${words.slice(-78)}` : words, small);
      button.addEventListener("click", () => show(one));
      const item = document.createElement("li");
      item.className = one.kind ? "missed" : "";
      item.append(button);
      return item;
    }));
  }

  function show(one) {
    for (const cell of lit) cells[cell].classList.remove("shown");
    for (let cell = one.first; cell <= one.last; cell++) {
      cells[cell].classList.add("shown");
      lit.add(cell);
    }
    cells[one.first].scrollIntoView({ block: "center", inline: "nearest" });
  }

  function describe(row) {
    const step = row + reading.first;
    const words = [tokens[row].dataset.about];
    const heads = reading.heads.reduce((sum, each) => sum + each, 0);
    if (data.slow.has(row)) words.push("a slow step reads everything");
    else if (reading.recent) words.push("underlined: the sink and the recent tokens, which every head reads");
    if (!data.slow.has(row) && data.counts) words.push(`${heads} KV heads select`);
    if (reading.counts && reading.counts.until !== null && step >= reading.counts.until && !data.slow.has(row)) {
      words.push(`selections from step ${reading.counts.until} on did not fit into this file: `
        + `sfi trace show --step ${step} has them`);
    }
    if (by.value === "mass" && data.mass(row, null) === null) {
      words.push("this step's attention is not in this file");
    }
    if (reading.mass && by.value === "mass") {
      words.push(`shaded: the ${reading.mass.list} places of each layer with the most attention`
        + (reading.mass.known ? ", red where most of it was not read" : ""));
    }
    if (reading.dense.length) words.push(`layers left dense read everything: ${reading.dense.join(", ")}`);
    if (reading.perCell > 1) words.push(`shown in pieces of ${reading.perCell} tokens`);
    document.getElementById("words-step").textContent = words.join("; ");
  }

  function choose(row) {
    if (row < 0 || row >= tokens.length) return;
    if (chosen >= 0) tokens[chosen].classList.remove("chosen");
    chosen = row;
    tokens[row].classList.add("chosen");
    describe(row);
    light(row);
  }

  text.addEventListener("click", (event) => choose(tokens.indexOf(event.target)));
  text.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: 1, ArrowLeft: -1, Home: -tokens.length, End: tokens.length };
    if (!(event.key in moves) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    choose(Math.min(tokens.length - 1, Math.max(0, chosen + moves[event.key])));
    tokens[chosen].scrollIntoView({ block: "nearest", inline: "nearest" });
  });
  for (const picker of [layer, by]) {
    picker.addEventListener("change", () => choose(chosen));
  }
  const others = [...document.querySelectorAll("#others button")];
  for (const button of others) {
    button.addEventListener("click", () => {
      choose(Number(button.dataset.row));
      tokens[chosen].scrollIntoView({ block: "nearest", inline: "nearest" });
    });
  }
  // first where it matters: the step that differs most from full attention
  choose(others.length ? Number(others[0].dataset.row) : Math.max(0, tokens.findIndex((_, row) => !data.slow.has(row))));
}

async function openReading() {
  const counts = reading.counts && await unpackCounts(reading.counts);
  const lists = reading.mass && new Uint16Array(await inflate(reading.mass.packed));
  setUpReading(new Reading(counts, lists));
  document.getElementById("source").dataset.ready = "true";
}
if (reading) openReading();
