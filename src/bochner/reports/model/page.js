"use strict";
(() => {
const charts = JSON.parse(document.getElementById("charts").textContent);
const plain = new Intl.NumberFormat("en", { maximumSignificantDigits: 4, useGrouping: "min2" });
const tick = (value) => plain.format(value).replace("-", "−");

// A number as in the tables: the rule of number_text in rows.py.
function show(value) {
  if (value === null) return "—";
  const size = Math.abs(value), sign = value < 0 ? "−" : "";
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return sign + threeDigits(size);
  const power = Number(size.toExponential().split("e")[1]);
  const digits = Number.isInteger(size) ? 0 : Math.max(0, 3 - power), below = Math.floor(size);
  // Python rounds a half to the even neighbour, toFixed upwards.
  const text = digits === 0 && size - below === 0.5 ? String(below + (below % 2)) : size.toFixed(digits);
  return sign + (size < 1e4 ? text : text.replace(/\B(?=(\d{3})+$)/g, ","));
}

function threeDigits(size) {
  const rounded = Number(size.toPrecision(3));
  if (rounded >= 1e-4 && rounded < 1) return String(rounded);
  const [digits, power] = rounded.toExponential().split("e");
  return `${digits}e${power[0].replace("-", "−")}${power.slice(1).padStart(2, "0")}`;
}

// ---------------------------------------------------------------- elements; texts are only ever texts

function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function draw(name, attributes = {}, text = null) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  return element;
}

function canvas(width, height, label) {
  const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  svg.append(draw("title", {}, label));
  return svg;
}

// Cuts a text until it is no wider than the room that it has.
function fit(text, room) {
  let letters = [...text.textContent];
  const whole = text.textContent;
  if (text.getComputedTextLength() <= room) return;
  while (letters.length > 1 && text.getComputedTextLength() > room) {
    letters = letters.slice(0, Math.max(1, Math.floor(letters.length * 0.9)));
    text.textContent = letters.join("") + "…";
  }
  text.append(draw("title", {}, whole));
}

// ---------------------------------------------------------------- charts

const scale = (from, to) => (value) => to[0] + ((value - from[0]) / (from[1] - from[0] || 1)) * (to[1] - to[0]);

function range(values) {
  const known = values.filter((value) => value !== null);
  const low = Math.min(...known), high = Math.max(...known), room = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
  return [low - room, high + room];
}

function ticks([low, high], count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step / 1e6; value += step) found.push(Math.abs(value) < step / 1e6 ? 0 : value);
  return found;
}

// Horizontal bars, each under its name, with whiskers where a value has a low and a high end.
function bars(place, chart, label) {
  const width = place.clientWidth, step = 42, height = chart.items.length * step + 26, svg = canvas(width, height, label);
  place.replaceChildren(svg);
  const ends = chart.items.flatMap((item) => [item.value, item.low ?? item.value, item.high ?? item.value]);
  const domain = chart.domain ?? [Math.min(0, ...ends), Math.max(0, ...ends) || 1];
  const x = scale(domain, [2, width - 90]);
  svg.append(draw("line", { class: "axis", x1: x(0), x2: x(0), y1: 0, y2: height - 24 }));
  chart.items.forEach((item, index) => {
    const y = index * step, from = Math.min(x(0), x(item.value));
    const name = draw("text", { x: 2, y: y + 14 }, item.name);
    const bar = draw("rect", { class: item.plain ? "bar plain" : "bar", x: from, y: y + 20, height: 13, width: Math.max(1, Math.abs(x(item.value) - x(0))), rx: 2 });
    bar.append(draw("title", {}, `${item.name}: ${show(item.value)}${item.low == null ? "" : ` (${show(item.low)} to ${show(item.high)})`}`));
    svg.append(name, bar);
    let right = Math.max(x(0), x(item.value));
    if (item.low != null) {
      svg.append(draw("line", { class: "whisker", x1: x(item.low), x2: x(item.high), y1: y + 26.5, y2: y + 26.5 }));
      right = Math.max(right, x(item.high));
    }
    svg.append(draw("text", { x: right + 6, y: y + 31 }, item.text ?? show(item.value)));
    fit(name, width - 6);
  });
  const axis = draw("text", { class: "soft", x: 2, y: height - 6 }, chart.xlabel ?? "");
  svg.append(axis);
  fit(axis, width - 6);
}

// Axes of a chart with two directions; returns the two scales and the drawing.
function axes(place, chart, label, xs, ys) {
  const width = place.clientWidth, height = Math.min(380, Math.max(250, width * 0.6)), svg = canvas(width, height, label);
  place.replaceChildren(svg);
  const frame = { left: 62, right: width - 12, top: 24, bottom: height - 42 };
  const x = scale(xs, [frame.left, frame.right]), y = scale(ys, [frame.bottom, frame.top]);
  for (const value of ticks(ys, 5)) {
    svg.append(draw("line", { class: "axis", x1: frame.left, x2: frame.right, y1: y(value), y2: y(value) }));
    svg.append(draw("text", { class: "soft", x: frame.left - 6, y: y(value) + 4, "text-anchor": "end" }, tick(value)));
  }
  const marks = chart.dates ? [0, Math.floor(chart.x.length / 2), chart.x.length - 1].map((at) => [chart.x[at], chart.labels[at]])
    : ticks(xs, width < 450 ? 3 : 6).map((value) => [value, tick(value)]);
  for (const [value, text] of marks) {
    if (value === null) continue;
    const anchor = x(value) > frame.right - 40 ? "end" : x(value) < frame.left + 20 ? "start" : "middle";
    svg.append(draw("text", { class: "soft", x: x(value), y: frame.bottom + 17, "text-anchor": anchor }, text));
  }
  const below = draw("text", { class: "soft", x: frame.right, y: height - 6, "text-anchor": "end" }, chart.xlabel);
  const above = draw("text", { class: "soft", x: 2, y: 14 }, chart.ylabel);
  svg.append(below, above);
  fit(below, width - 10);
  fit(above, width - 10);
  return { svg, x, y };
}

// A curve with its band; a diagonal or a level as a guide; a mark at one position.
function lines(place, chart, label) {
  const low = chart.low ?? chart.y, high = chart.high ?? chart.y;
  const at = chart.x.map((value, index) => index).filter((index) => chart.x[index] !== null);
  const { svg, x, y } = axes(place, chart, label, chart.xs ?? range(chart.x), chart.ys ?? range([...low, ...high]));
  const path = (values, order) => order.map((index) => `${x(chart.x[index])},${y(values[index])}`);
  if (chart.diagonal) svg.append(draw("line", { class: "guide", x1: x(0), y1: y(0), x2: x(1), y2: y(1) }));
  if (chart.low) svg.append(draw("polygon", { class: "band", points: [...path(high, at), ...path(low, [...at].reverse())].join(" ") }));
  svg.append(draw("polyline", { class: "curve", points: path(chart.y, at).join(" ") }));
  for (const index of at.length > 40 ? [] : at) {
    const dot = draw("circle", { class: index === chart.mark ? "chosen" : "dot", r: index === chart.mark ? 7 : 3.5, cx: x(chart.x[index]), cy: y(chart.y[index]) });
    const name = chart.labels ? chart.labels[index] : show(chart.x[index]);
    dot.append(draw("title", {}, `${name}: ${show(chart.y[index])}${chart.low ? ` (${show(low[index])} to ${show(high[index])})` : ""}`));
    svg.append(dot);
  }
}

// Points that name their row, under the pointer or chosen with the arrow keys; in a band where they have low and high ends.
function points(place, chart, label) {
  const first = !place.firstElementChild;
  if (first) {
    const group = make("div", { class: "points", tabindex: "0", role: "group", "aria-label": `${label}. Arrow keys choose a row.` });
    place.append(group, make("div", { class: "details", role: "status" }, "Point at a row, or choose one with the arrow keys."));
  }
  const [group, details] = place.children;
  const order = chart.points.map((_, index) => index).sort((a, b) => chart.points[a][0] - chart.points[b][0]);
  const across = chart.points.map((point) => point[0]), up = chart.points.map((point) => point[1]);
  const { svg, x, y } = axes(group, chart, label, range(across), chart.ys ?? range([...up, ...(chart.low ?? [0]), ...(chart.high ?? [])]));
  const path = (values, order) => order.map((index) => `${x(across[index])},${y(values[index])}`);
  if (chart.low) svg.append(draw("polygon", { class: "band", points: [...path(chart.high, order), ...path(chart.low, [...order].reverse())].join(" ") }));
  if (chart.level !== undefined) svg.append(draw("line", { class: "guide", x1: 62, x2: group.clientWidth - 12, y1: y(chart.level), y2: y(chart.level) }));
  const dots = chart.points.map(([, , row, flagged], index) => {
    const dot = draw("circle", { class: flagged ? "dot flagged" : "dot", r: chart.low ? 2 : 3.5, cx: x(across[index]), cy: y(up[index]), "data-row": row });
    svg.append(dot);
    return dot;
  });
  let chosen = -1;
  const choose = (position) => {
    if (chosen >= 0) dots[order[chosen]].classList.remove("chosen");
    chosen = Math.max(0, Math.min(order.length - 1, position));
    dots[order[chosen]].classList.add("chosen");
    describe(details, chart.points[order[chosen]][2]);
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), at = [event.clientX - box.left, event.clientY - box.top];
    const away = order.map((index) => Math.hypot(x(chart.points[index][0]) - at[0], y(chart.points[index][1]) - at[1]));
    const nearest = away.indexOf(Math.min(...away));
    if (away[nearest] < 25 && nearest !== chosen) choose(nearest);
  });
  group.onkeydown = (event) => {
    const move = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    choose(chosen < 0 ? 0 : chosen + move);
  };
}

// The values of a row, from the table of rows.
function describe(details, row) {
  const table = document.querySelector("#rows table"), cells = table.querySelector(`tr[data-row="${row}"]`).cells;
  const list = make("dl");
  [...table.tHead.rows[0].cells].forEach((head, index) => {
    list.append(make("div", {}, make("dt", { dir: "auto" }, head.textContent), make("dd", { dir: "auto" }, cells[index].textContent)));
  });
  details.replaceChildren(list);
}

// ---------------------------------------------------------------- charts with controls

function chooser(name, options, change) {
  const select = make("select", {}, ...options.map((text, index) => make("option", { value: index, dir: "auto" }, text)));
  select.addEventListener("change", change);
  return [make("label", {}, name, select), select];
}

function dependence(place, chart, label) {
  if (!place.firstElementChild) {
    const redraw = () => dependence(place, chart, label);
    const [column, columns] = chooser("Column", chart.columns.map((own) => own.name), redraw);
    const [kind, kinds] = chooser("Class", chart.classes, redraw);
    kinds.value = chart.first;
    place.append(make("div", { class: "controls" }, column, ...(chart.classes.length > 1 ? [kind] : [])), make("div"));
    place.chosen = () => [chart.columns[columns.value], chart.classes.length > 1 ? Number(kinds.value) : 0];
  }
  const [own, number] = place.chosen();
  const ylabel = chart.classes.length > 1 ? `probability of ${chart.classes[number]}` : chart.ylabel;
  const [mean, low, high] = [own.mean[number], own.low[number], own.high[number]];
  const said = `${label}: ${own.name}`;
  if (own.line) return lines(place.lastElementChild, { ...own, y: mean, low, high, xlabel: own.name, ylabel }, said);
  const items = own.labels.map((name, index) => ({ name, value: mean[index], low: low[index], high: high[index] }));
  bars(place.lastElementChild, { items, xlabel: ylabel }, said);
}

function whatIf(place, chart, label) {
  if (!place.firstElementChild) {
    const start = () => {
      const own = chart.rows[rows.value].columns[columns.value];
      slider.max = own.labels.length - 1;
      slider.value = own.start;
      whatIf(place, chart, label);
    };
    const [row, rows] = chooser("Row", chart.rows.map((own) => own.name), start);
    const [column, columns] = chooser("Column to move", chart.rows[0].columns.map((own) => own.name), start);
    const slider = make("input", { type: "range", min: "0", step: "1" }), value = make("span", { dir: "auto" });
    slider.addEventListener("input", () => whatIf(place, chart, label));
    place.append(make("div", { class: "controls" }, row, column, make("label", {}, value, slider)));
    place.append(make("p", { class: "said", role: "status" }), make("div"));
    place.parts = { rows, columns, slider, value };
    return start();
  }
  const { rows, columns, slider, value } = place.parts, own = chart.rows[rows.value].columns[columns.value];
  const at = nameValue(own, slider, value), picture = tell(place, chart, label, own.answers[at], own.strange[at]);
  if (chart.classes.length) return;
  const column = (place) => own.answers.map((answer) => answer[place]);
  if (own.line && own.x[at] !== null) {
    lines(picture, { x: own.x, labels: own.labels, dates: own.dates, y: column(0), low: column(1), high: column(2), mark: at, xlabel: own.name, ylabel: chart.ylabel }, label);
    return;
  }
  const items = own.labels.map((name, index) => ({ name, value: own.answers[index][0], low: own.answers[index][1], high: own.answers[index][2], plain: index !== at }));
  bars(picture, { items, xlabel: chart.ylabel }, label);
}

// The most important columns of a row, moved together: every combination of values has its answer, those of the last column fastest.
function together(place, chart, label) {
  const redraw = () => together(place, chart, label);
  if (!place.firstElementChild) {
    const start = () => {
      chart.rows[rows.value].columns.forEach((own, index) => {
        sliders[index].max = own.labels.length - 1;
        sliders[index].value = own.start;
      });
      redraw();
    };
    const [row, rows] = chooser("Row", chart.rows.map((own) => own.name), start);
    const sliders = chart.rows[0].columns.map(() => make("input", { type: "range", min: "0", step: "1" }));
    const values = sliders.map(() => make("span", { dir: "auto" }));
    for (const slider of sliders) slider.addEventListener("input", redraw);
    place.append(make("div", { class: "controls" }, row, ...sliders.map((slider, index) => make("label", {}, values[index], slider))));
    place.append(make("p", { class: "said", role: "status" }), make("div"));
    place.parts = { rows, sliders, values };
    return start();
  }
  const { rows, sliders, values } = place.parts, own = chart.rows[rows.value];
  const combination = (choose) => own.columns.reduce((sum, column, index) => sum * column.labels.length + choose(column, index), 0);
  const at = combination((column, index) => nameValue(column, sliders[index], values[index]));
  const picture = tell(place, chart, label, own.answers[at], own.strange[at]);
  if (chart.classes.length) return;
  const bar = (name, [value, low, high], plain) => ({ name, value, low, high, plain });
  const items = [bar("with its own values", own.answers[combination((column) => column.start)], true), bar("with these values", own.answers[at], false)];
  bars(picture, { items, xlabel: chart.ylabel }, label);
}

// Names the value that a slider is at; returns its position.
function nameValue(own, slider, value) {
  const at = Number(slider.value), here = at === own.start ? " (its own value)" : "";
  value.textContent = `${own.name} = ${own.labels[at]}${here}`;
  slider.setAttribute("aria-valuetext", own.labels[at]);
  return at;
}

// Says an answer of the model, and draws it where it is of classes; returns the place of the picture.
function tell(place, chart, label, found, score) {
  const strange = score > chart.threshold ? "unlike the training data" : "like the training data";
  const [, said, picture] = place.children;
  if (!chart.classes.length) {
    said.textContent = `${show(found[0])}; ${chart.band} band from ${show(found[1])} to ${show(found[2])}; ${strange}`;
    return picture;
  }
  const best = found.indexOf(Math.max(...found));
  said.replaceChildren(make("bdi", {}, chart.classes[best]), `, with probability ${show(found[best])}; ${strange}`);
  const items = chart.classes.map((name, index) => ({ name, value: found[index] })).sort((a, b) => b.value - a.value).slice(0, 8);
  bars(picture, { items, domain: [0, 1], xlabel: "probability" }, label);
  return picture;
}

// ---------------------------------------------------------------- tables

function control(holder) {
  const table = holder.querySelector("table"), body = table.tBodies[0], rows = [...body.rows], heads = [...table.tHead.rows[0].cells];
  const count = make("span", { role: "status" }), search = make("input", { type: "search" });
  const value = (row, index) => row.cells[index].dataset.value;
  heads.forEach((head, index) => {
    const button = make("button", { type: "button" }, head.textContent);
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending", numeric = rows.some((row) => value(row, index) !== undefined);
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => (numeric ? Number(value(row, index) ?? -Infinity) : row.cells[index].textContent);
      const order = (a, b) => (numeric ? key(a) - key(b) || 0 : key(a).localeCompare(key(b), undefined, { numeric: true }));
      rows.sort((a, b) => (up ? order(a, b) : order(b, a)));
      body.append(...rows);
    });
  });
  search.addEventListener("input", () => {
    const text = search.value.toLocaleLowerCase();
    for (const row of rows) row.hidden = !row.textContent.toLocaleLowerCase().includes(text);
    count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  });
  holder.prepend(make("div", { class: "controls" }, make("label", {}, "Show rows with this text", search), count));
}

document.querySelectorAll("#rows tbody tr").forEach((row, index) => row.setAttribute("data-row", index));
document.querySelectorAll("[data-control]").forEach(control);
const kinds = { bars, lines, points, dependence, whatIf, together };
const figures = [...document.querySelectorAll("[data-chart]")].map((figure) => {
  const place = make("div");
  figure.prepend(place);
  return () => kinds[charts[figure.dataset.chart].type](place, charts[figure.dataset.chart], figure.dataset.label);
});
const redraw = () => figures.forEach((figure) => figure());
redraw();
let width = document.documentElement.clientWidth;
addEventListener("resize", () => {
  if (document.documentElement.clientWidth === width) return;
  width = document.documentElement.clientWidth;
  redraw();
});
})();
