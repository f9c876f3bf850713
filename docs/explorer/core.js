// The mathematics of the prior explorer: units, features, covariances and the closed-form posterior. No page, no library.
// tests/test_explorer.py compares it with the Python package.
"use strict";

const NU = { matern52: 2.5, matern32: 1.5, exponential: 0.5 }; // Student-t weights with 2ν degrees of freedom; RBF has normal ones

// Uniform numbers in (0, 1) from a seed (mulberry32).
function randomness(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return (((t ^ (t >>> 14)) >>> 0) + 0.5) / 4294967296;
  };
}

// 1 − erf(x): the series of erf near zero, a continued fraction beyond.
function erfc(x) {
  if (x < 0) return 2 - erfc(-x);
  if (x < 2.5) {
    let term = x, sum = x;
    for (let n = 1; Math.abs(term) > 1e-18; n++) {
      term *= (-x * x) / n;
      sum += term / (2 * n + 1);
    }
    return 1 - (2 / Math.sqrt(Math.PI)) * sum;
  }
  let fraction = x;
  for (let n = 120; n > 0; n--) fraction = x + n / 2 / fraction;
  return Math.exp(-x * x) / (Math.sqrt(Math.PI) * fraction);
}

// The quantile of the standard normal distribution: Halley's method, from a start that is good to two digits.
function normalQuantile(u) {
  if (u > 0.5) return -normalQuantile(1 - u);
  const t = Math.sqrt(-2 * Math.log(u));
  let x = (2.30753 + 0.27061 * t) / (1 + 0.99229 * t + 0.04481 * t * t) - t;
  for (let step = 0; step < 3; step++) {
    const move = (erfc(-x / Math.SQRT2) / 2 - u) * Math.sqrt(2 * Math.PI) * Math.exp((x * x) / 2);
    x -= move / (1 + (x * move) / 2);
  }
  return x;
}

// The quantile of χ² with 1, 3 or 5 degrees of freedom.
function chiSquareQuantile(u, degrees) {
  const cdf = x => {
    const tail = Math.sqrt((2 * x) / Math.PI) * Math.exp(-x / 2);
    return 1 - erfc(Math.sqrt(x / 2)) - (degrees > 1 ? tail : 0) - (degrees > 3 ? (tail * x) / 3 : 0);
  };
  let low = 0, high = 80;
  while (high - low > 1e-14 * high && high > 1e-14) {
    const middle = (low + high) / 2;
    if (cdf(middle) < u) low = middle;
    else high = middle;
  }
  return (low + high) / 2;
}

// Points in the unit cube: independent, or spread evenly ("sobol": a grid in the first coordinate and, in the others, steps
// by powers of the generalised golden ratio; the library has Sobol's sequence there).
function uniforms(count, dim, method, random) {
  if (method !== "sobol") return Array.from({ length: count }, () => Array.from({ length: dim }, random));
  let ratio = 2;
  for (let i = 0; i < 60; i++) ratio = Math.pow(1 + ratio, 1 / dim);
  const shift = Array.from({ length: dim }, random);
  return Array.from({ length: count }, (_, i) =>
    shift.map((s, j) => {
      const u = (s + (j === 0 ? i / count : (i + 1) * Math.pow(ratio, -j))) % 1;
      return Math.min(Math.max(u, 1e-12), 1 - 1e-12);
    }));
}

// d vectors of length 1 at right angles to each other, in random directions (Gram–Schmidt).
function orthogonalBlock(dim, random) {
  const block = [];
  while (block.length < dim) {
    const v = Array.from({ length: dim }, () => normalQuantile(random()));
    for (const w of block) {
      const along = v.reduce((sum, x, i) => sum + x * w[i], 0);
      w.forEach((x, i) => { v[i] -= along * x; });
    }
    const length = Math.hypot(...v);
    block.push(v.map(x => x / length));
  }
  return block;
}

// Units of a layer with d inputs, seen along the line (t, …, t)/√d: the weight of each unit along it, and its bias.
function drawUnits({ kernel, bias, count, inputs, method, seed }) {
  const random = randomness(seed);
  const nu = NU[kernel];
  const u = uniforms(count, inputs + (nu ? 1 : 0) + 1, method, random);
  let block = [];
  const units = u.map((row, k) => {
    let weight = row.slice(0, inputs).map(normalQuantile);
    const scale = nu ? Math.sqrt((2 * nu) / Math.max(chiSquareQuantile(row[inputs], 2 * nu), 1e-12)) : 1;
    if (method === "orthogonal") {
      if (k % inputs === 0) block = orthogonalBlock(inputs, random);
      const length = Math.hypot(...weight);
      weight = block[k % inputs].map(x => x * length);
    }
    const last = row[row.length - 1];
    return {
      weight: (scale * weight.reduce((sum, w) => sum + w, 0)) / Math.sqrt(inputs),
      bias: bias === "uniform" ? Math.PI * (2 * last - 1) : bias === "normal" ? normalQuantile(last) : 0,
    };
  });
  return units;
}

function trapezoid(z, shift, height, slope, limit) {
  const u = z / (2 * Math.PI) + shift;
  return Math.min(Math.max(height - slope * Math.abs(u - Math.round(u)), -limit), limit);
}

// Each activation: its bias prior, how many outputs a unit has, and those outputs. Prior variance is 1 for the periodic ones.
const ACTIVATIONS = {
  sin: { bias: "uniform", outputs: 1, value: z => [Math.SQRT2 * Math.sin(z)] },
  sincos: { bias: "none", outputs: 1, value: z => [Math.sin(z) + Math.cos(z)] },
  paired: { bias: "none", outputs: 2, value: z => [Math.SQRT2 * Math.sin(z), Math.SQRT2 * Math.cos(z)] },
  triangle: { bias: "uniform", outputs: 1, value: z => [trapezoid(z, -1 / 4, Math.sqrt(3), 4 * Math.sqrt(3), Math.sqrt(3))] },
  periodic_relu: { bias: "uniform", outputs: 1, value: z => [trapezoid(z, -1 / 8, 2 * Math.sqrt(1.5), 8 * Math.sqrt(1.5), Math.sqrt(1.5))] },
  relu: { bias: "normal", outputs: 1, value: z => [Math.max(z, 0)] },
};

function drawLayer({ kernel, activation, width, inputs, method, seed }) {
  const { bias, outputs } = ACTIVATIONS[activation];
  return drawUnits({ kernel, bias, count: width / outputs, inputs, method, seed });
}

// Features of each place x, divided by √K: then the covariance is their product, and output weights are N(0, 1).
function features(units, activation, lengthscale, x) {
  const { outputs, value } = ACTIVATIONS[activation];
  const factor = 1 / Math.sqrt(units.length * outputs);
  return x.map(place => units.flatMap(({ weight, bias }) => value((weight * place) / lengthscale + bias).map(h => factor * h)));
}

const dot = (a, b) => { let sum = 0; for (let i = 0; i < a.length; i++) sum += a[i] * b[i]; return sum; };

function correlation(kernel, r) {
  const z = Math.sqrt(2 * (NU[kernel] || 1)) * Math.abs(r);
  if (kernel === "rbf") return Math.exp((-r * r) / 2);
  if (kernel === "matern52") return (1 + z + (z * z) / 3) * Math.exp(-z);
  return kernel === "matern32" ? (1 + z) * Math.exp(-z) : Math.exp(-z);
}

// The covariance at infinite width: the kernel, its mixture over odd harmonics, or the arc-cosine kernel of ReLU.
function limit({ kernel, activation, lengthscale }, x, x2) {
  if (activation === "relu") return arcCosine(x / lengthscale, x2 / lengthscale);
  const r = (x2 - x) / lengthscale;
  if (activation !== "triangle" && activation !== "periodic_relu") return correlation(kernel, r);
  let sum = 0, left = 1;
  for (let odd = 1; odd < 400; odd += 2) {
    const share = 96 / Math.PI ** 4 / odd ** 4;
    sum += share * correlation(kernel, odd * r);
    left -= share;
  }
  return sum + left * correlation(kernel, 401 * r);
}

// E[max(wx + b, 0) max(wx′ + b, 0)] for standard normal w and b.
function arcCosine(x, x2) {
  const lengths = Math.sqrt((1 + x * x) * (1 + x2 * x2));
  const cosine = Math.min(1, (1 + x * x2) / lengths);
  const angle = Math.acos(cosine);
  return (lengths / (2 * Math.PI)) * (Math.sqrt(1 - cosine * cosine) + (Math.PI - angle) * cosine);
}

function cholesky(matrix) {
  const factor = matrix.map(row => row.map(() => 0));
  for (let i = 0; i < matrix.length; i++)
    for (let j = 0; j <= i; j++) {
      let sum = matrix[i][j];
      for (let k = 0; k < j; k++) sum -= factor[i][k] * factor[j][k];
      factor[i][j] = i === j ? Math.sqrt(sum) : sum / factor[j][j];
    }
  return factor;
}

function solveLower(factor, vector) {
  const out = [];
  factor.forEach((row, i) => {
    let sum = vector[i];
    for (let k = 0; k < i; k++) sum -= row[k] * out[k];
    out.push(sum / row[i]);
  });
  return out;
}

// The posterior of f given points, the output layer integrated out: mean, standard deviation and the log evidence.
function posterior(layerFeatures, x, y, noise, places) {
  const phi = layerFeatures(x), star = layerFeatures(places);
  const matrix = phi.map((row, i) => phi.map((other, j) => dot(row, other) + (i === j ? noise * noise : 0)));
  const factor = cholesky(matrix);
  const target = solveLower(factor, y);
  const mean = [], std = [];
  for (const row of star) {
    const half = solveLower(factor, phi.map(other => dot(row, other)));
    mean.push(dot(half, target));
    std.push(Math.sqrt(Math.max(dot(row, row) - dot(half, half), 0)));
  }
  const logDet = 2 * factor.reduce((sum, row, i) => sum + Math.log(row[i]), 0);
  return { mean, std, evidence: -0.5 * (dot(target, target) + logDet + x.length * Math.log(2 * Math.PI)) };
}

// Functions drawn from the prior of a layer at some places.
function samples(layerFeatures, places, count, seed) {
  const random = randomness(seed);
  const phi = layerFeatures(places);
  return Array.from({ length: count }, () => {
    const weight = phi[0].map(() => normalQuantile(random()));
    return phi.map(row => dot(row, weight));
  });
}

const Explorer = {
  ACTIVATIONS, randomness, erfc, normalQuantile, chiSquareQuantile, drawLayer, features, limit, posterior, samples, dot,
};
if (typeof module !== "undefined") module.exports = Explorer;
