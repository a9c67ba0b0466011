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

function draw(widthPixels) {
  const style = template();
  for (const chart of document.querySelectorAll(".chart")) {
    const { name, data, layout } = structuredClone(figures[chart.dataset.figure]);
    const isNarrow = chart.clientWidth < 500 && layout.showlegend; // then the legend has one column: add room for its lines
    const height = layout.height + (isNarrow ? 24 * data.filter((trace) => trace.showlegend !== false).length : 0);
    const size = widthPixels ? { width: widthPixels, autosize: false, height } : { autosize: true, height };
    const keep = { filename: name, format: "svg" };
    Plotly.react(chart, data, { ...layout, ...size, template: style }, { responsive: true, displaylogo: false, displayModeBar: "hover", modeBarButtonsToRemove: ["select2d", "lasso2d"], toImageButtonOptions: keep });
  }
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
for (const select of document.querySelectorAll("select[data-of]"))
  select.addEventListener("change", () => {
    document.getElementById("chart-" + select.dataset.of).dataset.figure = select.value;
    draw();
  });

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

const body = document.querySelector("tbody");
const rows = [...body.rows];
const text = (row, column) => row.cells[column].textContent;
const number = (cell) => (/\d/.test(cell) && /^[\s\d.,$%±+=~eE-]*(or more)?$/.test(cell) ? parseFloat(cell.replace(/[,$%±+=~]/g, "")) : NaN);
document.querySelectorAll("th").forEach((head, column) => {
  const isNumeric = rows.every((row) => text(row, column) === "-" || !isNaN(number(text(row, column))));
  for (const cell of [head, ...rows.map((row) => row.cells[column])]) cell.classList.toggle("number", isNumeric);
  head.firstChild.addEventListener("click", () => {
    const order = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    for (const other of document.querySelectorAll("th")) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    const unknown = (row) => text(row, column) === "-"; // unknown values come last in both orders
    rows.sort((a, b) => unknown(a) - unknown(b) || sign * (isNumeric ? number(text(a, column)) - number(text(b, column)) : text(a, column).localeCompare(text(b, column), "en", { numeric: true })));
    body.append(...rows);
  });
});

document.getElementById("filter").addEventListener("input", (event) => {
  const words = event.target.value.toLowerCase().split(/\s+/);
  let numShown = 0;
  for (const row of rows) {
    row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    numShown += !row.hidden;
  }
  document.getElementById("count").textContent = numShown === rows.length ? `${numShown} rows` : `${numShown} of ${rows.length} rows`;
});

show();
