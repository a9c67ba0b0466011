"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const root = document.documentElement;
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const paperWidthPixels = 690;

// The page's colours for plotly: the browser resolves them for the current colour scheme.
function template() {
  const text = getComputedStyle(document.body).color;
  const line = getComputedStyle(document.querySelector("nav")).borderBottomColor;
  const card = getComputedStyle(document.querySelector("section")).backgroundColor;
  const axis = { gridcolor: line, linecolor: line, zerolinecolor: line, automargin: true };
  return { data: { bar: [{ error_x: { color: text } }] }, layout: {
    modebar: { orientation: "v", bgcolor: "rgba(0,0,0,0)", color: line, activecolor: text },
    font: { color: text, family: "system-ui, sans-serif", size: 13 }, xaxis: axis, yaxis: axis,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hoverlabel: { align: "left", bgcolor: card, bordercolor: line, font: { color: text } },
  } };
}

// Charts show the rows that the table's filter keeps. Lists of bars are as long as the table: they leave out
// the rows that are folded up in it, too.
function traceOf(trace, labels) {
  if (trace.meta !== undefined) return labels.has(trace.meta) ? trace : null;
  if (!trace.customdata) return trace;
  const keep = trace.customdata.map((label) => labels.has(label));
  if (!keep.includes(true)) return null;
  const picked = (value) => {
    if (Array.isArray(value)) return value.length === keep.length ? value.filter((_, index) => keep[index]) : value;
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, picked(inner)]));
  };
  return picked(trace);
}

function figureOf(name) {
  const { data, layout } = structuredClone(figures[name]);
  const isList = layout.barmode === "stack";
  const labels = new Set(rows.filter((row) => isKept(row) && !(isList && isFolded(row))).map((row) => row.dataset.label));
  if (labels.size === rows.length) return { data, layout };
  const traces = data.map((trace) => traceOf(trace, labels)).filter(Boolean);
  return layout.meta ? withPlaces(traces, layout) : { data: traces, layout };
}

// Leave out the places without a bar, and make the list shorter.
function withPlaces(traces, layout) {
  const used = new Set(traces.flatMap((trace) => trace.y));
  const places = layout.yaxis.categoryarray;
  const kept = places.filter((place) => used.has(place));
  const height = layout.height - layout.meta.place_pixels * (places.length - kept.length);
  return { data: traces, layout: { ...layout, height, annotations: layout.annotations.filter((annotation) => used.has(annotation.y)),
    yaxis: { ...layout.yaxis, categoryarray: kept, range: [kept.length - 0.5, -0.7] } } };
}

function draw(widthPixels) {
  const style = template();
  for (const chart of document.querySelectorAll(".chart")) {
    const { name } = figures[chart.dataset.figure];
    const { data, layout } = figureOf(chart.dataset.figure);
    const isNarrow = chart.clientWidth < 500 && layout.showlegend; // then the legend has one column: add room for its lines
    const height = layout.height + (isNarrow ? 24 * data.filter((trace) => trace.showlegend !== false).length : 0);
    const size = widthPixels ? { width: widthPixels, autosize: false, height } : { autosize: true, height };
    const keep = { filename: name, format: "svg" };
    Plotly.react(chart, data, { ...layout, ...size, template: style }, { responsive: true, displaylogo: false, displayModeBar: "hover", modeBarButtonsToRemove: ["select2d", "lasso2d"], toImageButtonOptions: keep });
    const numFolded = layout.barmode === "stack" ? rows.filter((row) => isKept(row) && isFolded(row)).length : 0;
    const rest = chart.parentElement.querySelector(".rest");
    const isEmpty = !data.some((trace) => trace.customdata || trace.meta !== undefined) && figures[chart.dataset.figure].data.some((trace) => trace.customdata || trace.meta !== undefined);
    rest.hidden = numFolded === 0 && !isEmpty;
    rest.textContent = isEmpty ? "the table's filter keeps none of the rows that are drawn here" : `without the ${numFolded} rows that are folded up in the table`;
  }
}

let drawSoon;
function drawLater() { // while somebody types
  clearTimeout(drawSoon);
  drawSoon = setTimeout(draw, 150);
}

const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);
const themeButton = document.getElementById("theme");
function show() {
  themeButton.textContent = isDark() ? "light" : "dark";
  draw();
}
themeButton.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  show();
});
prefersDark.addEventListener("change", show);

let themeBeforePrint;
addEventListener("beforeprint", () => {
  themeBeforePrint = root.dataset.theme;
  root.dataset.theme = "light";
  draw(paperWidthPixels);
});
addEventListener("afterprint", () => {
  if (themeBeforePrint) root.dataset.theme = themeBeforePrint;
  else delete root.dataset.theme;
  show();
});

// The table: sorted, filtered, and folded by model.
const body = document.querySelector("tbody");
const heads = [...document.querySelectorAll("thead th")];
const rows = [...body.rows];
const cellsOf = new Map(rows.map((row) => [row, [...row.cells]])); // in the order of `heads`
const models = [...new Set(rows.map((row) => row.dataset.model))];
const mostOpen = 60, numFirst = 24; // a table of more rows begins with the first of each model, 24 in all
const limit = rows.length > mostOpen ? Math.max(6, Math.floor(numFirst / models.length)) : Infinity;
const folds = new Map(models.map((model) => [model, { isOpen: true, limit, shown: new Set() }]));
let words = [];
const isKept = (row) => words.every((word) => row.textContent.toLowerCase().includes(word) || row.dataset.model.toLowerCase().includes(word));
const isFolded = (row) => !folds.get(row.dataset.model).shown.has(row);
const text = (row, column) => cellsOf.get(row)[column].textContent;
const number = (cell) => (/\d/.test(cell) && /^[\s\d.,$%±+=~eE-]*(or more)?$/.test(cell) ? parseFloat(cell.replace(/[,$%±+=~]/g, "")) : NaN);

function button(words, className, onClick) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = words;
  made.addEventListener("click", () => { onClick(); layOut(); draw(); });
  const cell = document.createElement(className === "fold" ? "th" : "td");
  cell.colSpan = heads.length;
  cell.append(made);
  const line = document.createElement("tr");
  line.className = className;
  line.append(cell);
  return line;
}

// Put the rows into the body: those of a model below its heading, the folded ones left out.
function layOut() {
  const lines = [];
  for (const [model, fold] of folds) {
    const kept = rows.filter((row) => row.dataset.model === model && isKept(row));
    const shown = fold.isOpen ? kept.slice(0, fold.limit) : [];
    fold.shown = new Set(shown);
    if (models.length > 1 && kept.length) {
      const heading = button(`${model}: ${kept.length} row${kept.length > 1 ? "s" : ""}`, "fold", () => { fold.isOpen = !fold.isOpen; });
      heading.querySelector("button").setAttribute("aria-expanded", fold.isOpen);
      lines.push(heading);
    }
    lines.push(...shown);
    if (fold.isOpen && kept.length > shown.length)
      lines.push(button(`show the other ${kept.length - shown.length} rows${models.length > 1 ? ` of ${model}` : ""}`, "more", () => { fold.limit = Infinity; }));
  }
  body.replaceChildren(...lines);
  const numKept = rows.filter(isKept).length;
  const all = `${rows.length} row${rows.length === 1 ? "" : "s"}`;
  document.getElementById("count").textContent = numKept === rows.length ? all : `${numKept} of ${all}`;
}

heads.forEach((head, column) => {
  const isNumeric = rows.every((row) => text(row, column) === "-" || !isNaN(number(text(row, column))));
  for (const cell of [head, ...rows.map((row) => cellsOf.get(row)[column])]) cell.classList.toggle("number", isNumeric);
  head.firstChild.addEventListener("click", () => {
    const order = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    for (const other of heads) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    const unknown = (row) => text(row, column) === "-"; // unknown values come last in both orders
    rows.sort((a, b) => unknown(a) - unknown(b) || sign * (isNumeric ? number(text(a, column)) - number(text(b, column)) : text(a, column).localeCompare(text(b, column), "en", { numeric: true })));
    layOut();
    draw();
  });
});

document.getElementById("filter").addEventListener("input", (event) => {
  words = event.target.value.toLowerCase().split(/\s+/);
  layOut();
  drawLater();
});

// A phone shows the strategy, its status and its rate first; the rest is to their right.
const phone = matchMedia("(max-width: 600px)");
const firstOnPhones = ["strategy", "status", "tokens/s"];
function arrange() {
  const place = (column) => (phone.matches ? (firstOnPhones.indexOf(heads[column].textContent) + 1 || Infinity) : column);
  const order = heads.map((_, column) => column).sort((a, b) => (place(a) === place(b) ? a - b : place(a) - place(b)));
  heads[0].parentElement.append(...order.map((column) => heads[column]));
  for (const row of rows) row.append(...order.map((column) => cellsOf.get(row)[column]));
  sayWhetherItScrolls();
}
function sayWhetherItScrolls() {
  const box = document.querySelector(".scroll");
  const edge = box.getBoundingClientRect().right;
  const numHidden = heads.filter((head) => head.getBoundingClientRect().right > edge + 1).length;
  const line = document.getElementById("scrolls");
  line.hidden = box.scrollWidth <= box.clientWidth;
  line.textContent = `scrolls sideways: ${numHidden} more column${numHidden === 1 ? "" : "s"}\u00a0\u2192`;
}
phone.addEventListener("change", arrange);
addEventListener("resize", sayWhetherItScrolls);
document.querySelector(".scroll").addEventListener("scroll", sayWhetherItScrolls);

layOut();
arrange();
show();
