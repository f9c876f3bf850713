// The page of the prior explorer: reads the controls, asks core.js, draws. Plain SVG, no library.
"use strict";

(() => {
  const form = document.getElementById("explorer");
  const { drawLayer, features, limit, posterior, samples, dot } = Explorer;
  const SIZE = { width: 420, height: 230, left: 30, right: 6, top: 6, bottom: 22 };
  const X = Array.from({ length: 121 }, (_, i) => -6 + i / 10);
  const STARTS = [0, 3]; // where covariances start from
  const FAR = 6;
  const state = { seed: 1, points: [[-1.5, -0.8], [-0.7, -0.9], [0, 0.1], [0.8, 0.9], [1.6, 0.7]] };

  const settings = () => ({
    kernel: form.kernel.value,
    activation: form.activation.value,
    method: form.method.value,
    inputs: Number(form.inputs.value),
    width: 2 ** Number(form.elements.width.value),
    lengthscale: Math.exp(Number(form.lengthscale.value)),
    noise: Number(form.noise.value),
    seed: state.seed,
  });

  let drawn = {}; // units are drawn again only when a setting asks for it
  function units(chosen) {
    const key = JSON.stringify(chosen);
    if (drawn[chosen.activation]?.key !== key) drawn[chosen.activation] = { key, units: drawLayer(chosen) };
    return drawn[chosen.activation].units;
  }

  function layer({ kernel, activation, method, inputs, width, lengthscale, seed }) {
    const own = units({ kernel, activation, method, inputs, width, seed });
    return places => features(own, activation, lengthscale, places);
  }

  const shape = (name, attributes, text) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };

  // A picture with axes: x and y to pixels and back, and an SVG to put lines into.
  function picture(id, title, [xLow, xHigh], [yLow, yHigh], clickable = false) {
    const { width, height, left, right, top, bottom } = SIZE;
    const toX = x => left + ((x - xLow) / (xHigh - xLow)) * (width - left - right);
    const toY = y => top + ((yHigh - Math.min(Math.max(y, yLow - 9), yHigh + 9)) / (yHigh - yLow)) * (height - top - bottom);
    const clip = { id: `${id}-clip` };
    const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
    const box = { x: left, y: top, width: width - left - right, height: height - top - bottom };
    const mask = shape("clipPath", clip);
    mask.append(shape("rect", box));
    svg.append(mask, shape("line", { class: "ex-axis", x1: left, x2: width - right, y1: toY(0), y2: toY(0) }));
    for (const x of [xLow, (xLow + xHigh) / 2, xHigh])
      svg.append(shape("text", { x: toX(x), y: height - 6, "text-anchor": x === xHigh ? "end" : x === xLow ? "start" : "middle" }, x));
    for (const y of [yLow, 0, yHigh])
      if (y !== yLow || yLow !== 0) svg.append(shape("text", { x: left - 4, y: Math.min(Math.max(toY(y) + 4, 14), height - bottom), "text-anchor": "end" }, y));
    const inside = shape("g", { "clip-path": `url(#${clip.id})` });
    svg.append(inside, shape("rect", { class: "ex-frame", ...box }));
    const caption = document.createElement("figcaption");
    caption.textContent = title;
    if (clickable) {
      svg.classList.add("ex-click");
      svg.addEventListener("click", event => {
        const frame = svg.getBoundingClientRect();
        const px = ((event.clientX - frame.left) / frame.width) * width, py = ((event.clientY - frame.top) / frame.height) * height;
        const x = xLow + ((px - left) / box.width) * (xHigh - xLow), y = yHigh - ((py - top) / box.height) * (yHigh - yLow);
        if (x >= xLow && x <= xHigh && y >= yLow && y <= yHigh) addPoint(x, y);
      });
    }
    document.getElementById(id).replaceChildren(caption, svg);
    return {
      line: (x, y, kind) => inside.append(shape("polyline", { class: kind, points: x.map((v, i) => `${toX(v).toFixed(1)},${toY(y[i]).toFixed(1)}`).join(" ") })),
      band: (x, low, high) => {
        const outline = [...x.map((v, i) => [v, high[i]]), ...x.map((v, i) => [v, low[i]]).reverse()];
        inside.append(shape("polygon", { class: "ex-band", points: outline.map(([v, w]) => `${toX(v).toFixed(1)},${toY(w).toFixed(1)}`).join(" ") }));
      },
      point: (x, y) => inside.append(shape("circle", { class: "ex-point", cx: toX(x), cy: toY(y), r: 4 })),
    };
  }

  const NAMES = { "": "stationary", "-relu": "ReLU" };

  function drawPrior(suffix, of) {
    const plot = picture(`ex-prior${suffix}`, `Drawn from the prior: ${NAMES[suffix]}`, [-6, 6], suffix ? [-8, 8] : [-3, 3]);
    for (const f of samples(of, X, 4, state.seed + 77)) plot.line(X, f, "ex-line");
  }

  // Draws cov(start, start + r) against r; returns the largest distance from the limit.
  function drawCovariance(suffix, of, chosen) {
    const r = X.filter(x => x >= 0 && x <= 5);
    const plot = picture(`ex-covariance${suffix}`, `Covariance with a place r further on: ${NAMES[suffix]}`, [0, 5], suffix ? [0, 16] : [-0.6, 1.2]);
    let worst = 0;
    STARTS.forEach((start, i) => {
      const [first, ...others] = of([start, ...r.map(v => start + v)]);
      const own = others.map(row => dot(first, row)), ideal = r.map(v => limit(chosen, start, start + v));
      const dashed = i ? " ex-dashed" : "";
      plot.line(r, ideal, "ex-limit" + dashed);
      plot.line(r, own, "ex-line" + dashed);
      own.forEach((value, j) => { worst = Math.max(worst, Math.abs(value - ideal[j])); });
    });
    return worst;
  }

  function drawFit(suffix, of, noise) {
    const [x, y] = [0, 1].map(i => state.points.map(point => point[i]));
    const { mean, std, evidence } = posterior(of, x, y, noise, X);
    const plot = picture(`ex-fit${suffix}`, `Fit to the points (click to add one): ${NAMES[suffix]}`, [-6, 6], [-3, 3], true);
    plot.band(X, mean.map((m, i) => m - 2 * std[i]), mean.map((m, i) => m + 2 * std[i]));
    plot.line(X, mean, "ex-line");
    state.points.forEach(point => plot.point(...point));
    const end = X.indexOf(FAR);
    return { far: `${mean[end].toFixed(2)} ± ${std[end].toFixed(2)}`, evidence: evidence.toFixed(1) };
  }

  function draw() {
    const chosen = settings();
    form.widthShown.value = chosen.width;
    form.lengthscaleShown.value = chosen.lengthscale.toFixed(2);
    form.noiseShown.value = chosen.noise.toFixed(2);
    const relu = { ...chosen, kernel: "rbf", activation: "relu", method: "iid" };
    const found = [["", chosen], ["-relu", relu]].map(([suffix, own]) => {
      const of = layer(own);
      drawPrior(suffix, of);
      return { worst: drawCovariance(suffix, of, own), ...drawFit(suffix, of, chosen.noise) };
    });
    document.getElementById("ex-width").textContent = `Largest distance of the ${chosen.width} units from their limit: ${found[0].worst.toFixed(3)}.`;
    document.getElementById("ex-said").textContent =
      `${state.points.length} points. At x = ${FAR}: stationary ${found[0].far}, ReLU ${found[1].far}. Log evidence: ${found[0].evidence} and ${found[1].evidence}.`;
  }

  function addPoint(x, y) {
    state.points.push([x, y]);
    draw();
  }

  let waiting = 0;
  form.addEventListener("input", event => {
    if (event.target.name === "x" || event.target.name === "y") return;
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(draw);
  });
  form.addEventListener("submit", event => event.preventDefault());
  form.again.addEventListener("click", () => { state.seed += 1; draw(); });
  form.add.addEventListener("click", () => {
    const x = form.elements.x.valueAsNumber, y = form.elements.y.valueAsNumber;
    if (Number.isFinite(x) && Number.isFinite(y)) addPoint(x, y);
  });
  form.undo.addEventListener("click", () => { state.points.pop(); draw(); });
  form.clear.addEventListener("click", () => { state.points = []; draw(); });
  draw();
})();
