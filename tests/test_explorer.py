"""The prior explorer of the documentation: its mathematics against the library by node, its controls in a browser."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from bochner import ClosedForm, Gaussian, Model, StationaryLayer, induced_kernel
from browser import needs_browser

DOCS = Path(__file__).parents[1] / "docs"
KERNELS = ["rbf", "matern52", "matern32", "exponential"]
PERIODIC = ["sin", "sincos", "paired", "triangle", "periodic_relu"]

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")


def javascript(body: str, given: object = None):
    """What the body of a function returns, with the explorer as E and the given value as given."""
    code = f"const E = require({json.dumps(str(DOCS / 'explorer/core.js'))}); const given = {json.dumps(given)};"
    code += f"process.stdout.write(JSON.stringify((() => {{ {body} }})()))"
    return json.loads(subprocess.run([str(NODE), "-e", code], capture_output=True, text=True, check=True).stdout)


@needs_node
def test_quantiles_are_those_of_scipy():
    u = [1e-9, 1e-4, 0.03, 0.31, 0.5, 0.77, 0.999, 1 - 1e-9]
    np.testing.assert_allclose(javascript("return given.map(E.normalQuantile)", u), scipy.special.ndtri(u), atol=1e-7)
    for degrees in (1, 3, 5):
        found = javascript("return given[0].map(u => E.chiSquareQuantile(u, given[1]))", [u[1:-1], degrees])
        np.testing.assert_allclose(found, scipy.stats.chi2.ppf(u[1:-1], degrees), rtol=1e-7)


@needs_node
def test_limits_are_the_kernels_of_the_library():
    r = np.linspace(-2, 3, 26)
    pairs = [(kernel, activation) for kernel in KERNELS for activation in PERIODIC] + [("rbf", "relu")]
    body = """return given.pairs.map(([kernel, activation]) =>
        given.r.map(r => E.limit({kernel, activation, lengthscale: 0.7}, 0.4, r)))"""
    found = javascript(body, {"pairs": pairs, "r": r.tolist()})
    for (kernel, activation), values in zip(pairs, found, strict=True):
        expected = induced_kernel(activation, kernel, lengthscale=0.7)
        x, start = torch.from_numpy(r)[:, None], torch.tensor([[0.4]], dtype=torch.float64)
        # The page stops at the harmonic 399: what is left weighs less than 398⁻³/6.
        np.testing.assert_allclose(values, expected(start, x)[0], atol=398**-3 / 6, err_msg=f"{kernel} {activation}")


@needs_node
@pytest.mark.parametrize("activation", [*PERIODIC, "relu"])
def test_covariance_and_posterior_are_those_of_the_library(activation):
    """The page's own units, put into a layer of the library."""
    given = {
        "x": [-1.5, -0.2, 0.4, 1.1],
        "y": [0.3, -1.0, 0.8, 0.2],
        "places": [-6.0, 0.1, 2.0],
        "layer": {"kernel": "matern32", "activation": activation, "width": 12, "inputs": 1, "method": "iid", "seed": 3},
    }
    body = """const units = E.drawLayer(given.layer);
        const of = x => E.features(units, given.layer.activation, 0.7, x);
        return {units, rows: of(given.x), ...E.posterior(of, given.x, given.y, 0.2, given.places)}"""
    found = javascript(body, given)
    layer = StationaryLayer(1, 12, kernel="matern32", activation=activation, lengthscale=0.7, dtype=torch.float64)
    bias = torch.tensor([unit["bias"] for unit in found["units"]], dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[unit["weight"]] for unit in found["units"]]))
        if layer.bias is not None:
            layer.bias.copy_(torch.logit((bias / torch.pi + 1) / 2) if activation != "relu" else bias)
    x, y, places = (torch.tensor(given[k], dtype=torch.float64)[:, None] for k in ("x", "y", "places"))
    h = layer(x).detach()
    rows = np.array(found["rows"])
    np.testing.assert_allclose(rows @ rows.T, h @ h.T / 12, atol=1e-7)
    posterior = ClosedForm(Model(layer, 1, Gaussian(noise=0.2)), x, y)
    prediction = posterior.predict(places)
    np.testing.assert_allclose(found["mean"], prediction.mean[:, 0], atol=1e-6)
    np.testing.assert_allclose(found["std"], prediction.f_variance[:, 0].sqrt(), atol=1e-6)
    assert found["evidence"] == pytest.approx(float(posterior.log_marginal_likelihood), abs=1e-5)


@needs_node
def test_units_are_unbiased_however_they_are_drawn():
    """The covariance, averaged over seeds, is the kernel: five standard errors of 40 × 64 products of variance at most 3/2."""
    body = """return given.flatMap(kernel => ["iid", "orthogonal", "sobol"].flatMap(method => [1, 2, 5].map(inputs => {
        let sum = 0;
        for (let seed = 0; seed < 40; seed++) {
            const units = E.drawLayer({kernel, activation: "sin", width: 64, inputs, method, seed});
            const [a, b] = E.features(units, "sin", 1, [2, 2.8]);
            sum += E.dot(a, b) / 40;
        }
        return [kernel, method, inputs, sum, E.limit({kernel, activation: "sin", lengthscale: 1}, 2, 2.8)];
    })))"""
    for *case, found, expected in javascript(body, KERNELS):
        assert abs(found - expected) < 5 * (1.5 / (40 * 64)) ** 0.5, case


DRIVER = """
window.problems = [];
addEventListener("error", event => problems.push(event.message));
console.error = console.warn = (...words) => problems.push(words.join(" "));
addEventListener("load", async () => {
  const form = document.getElementById("explorer");
  const shown = () => [...form.querySelectorAll("figure, p, output")].map(part => part.innerHTML).join();
  const drawn = () => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
  const set = (control, value) => { control.value = value; control.dispatchEvent(new Event("input", {bubbles: true})); };
  const effects = {};
  const act = async (name, action) => { const before = shown(); action(); await drawn(); effects[name] = shown() !== before; };
  for (const control of form.querySelectorAll("select"))
    for (const option of [...control.options].filter(option => !option.selected))
      await act(`${control.name} ${option.value}`, () => set(control, option.value));
  for (const control of form.querySelectorAll("input[type=range]"))
    for (const value of [control.max, control.min])
      await act(`${control.name} ${value}`, () => set(control, value));
  for (const name of ["again", "add", "undo", "clear"]) await act(name, () => form.elements[name].click());
  form.elements.x.value = -3;
  form.elements.y.value = 2;
  await act("x and y", () => form.elements.add.click());
  const box = document.querySelector("#ex-fit svg").getBoundingClientRect();
  const spot = {clientX: box.left + box.width * 0.7, clientY: box.top + box.height * 0.4, bubbles: true};
  await act("click", () => document.querySelector("#ex-fit svg").dispatchEvent(new MouseEvent("click", spot)));
  const said = document.getElementById("ex-said").textContent;
  const unlabelled = [...form.querySelectorAll("select, input")].filter(part => !part.labels.length).map(part => part.name);
  const overflow = document.documentElement.scrollWidth > innerWidth;
  const result = {effects, problems, said, unlabelled, overflow, width: innerWidth};
  window.result = result;
});
"""


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["default", "slate"])  # light and dark, as the site says it
def test_every_control_has_an_effect_and_the_console_stays_clean(width, scheme, browser, tmp_path):
    form = re.search(r"<form.*</script>", (DOCS / "explorer.md").read_text(), re.DOTALL)
    assert form is not None
    shutil.copytree(DOCS / "explorer", tmp_path / "explorer")
    body = f"<body class='md-typeset' data-md-color-scheme='{scheme}'>"
    page = f"<!doctype html><meta charset='utf-8'><script>{DRIVER}</script>{body}{form[0]}"
    (tmp_path / "page.html").write_text(page)
    browser.open(tmp_path / "page.html", width)
    result = browser.wait("window.result")
    assert result["width"] == width
    colours = {"default": "rgb(50, 70, 176)", "slate": "rgb(157, 176, 255)"}
    assert browser.run("getComputedStyle(document.querySelector('.ex-line')).stroke") == colours[scheme]
    assert [name for name, effect in result["effects"].items() if not effect] == []
    assert len(result["effects"]) >= 4 + 4 + 2 + 2 + 2 * 3 + 4 + 2 - 1
    assert result["problems"] == browser.errors == []
    assert result["unlabelled"] == []
    assert not result["overflow"]
    assert result["said"].startswith("2 points.")
