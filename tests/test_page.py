"""Pages of results: what they show, and how a browser sees them."""

import html
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from bochner.experiments.rows import read_rows, write_rows
from bochner.experiments.theory import NINE
from bochner.reports import tables, toys
from bochner.reports.blocks import Block, MissingRowsError, as_markdown
from bochner.reports.drawing import draw, how_to_make
from bochner.reports.page import Section, render, write
from bochner.reports.results import _made, _sections, results_sections
from browser import needs_browser

RESULTS = Path(__file__).parents[1] / "results"
EVIL = "<script>alert('a')</script>"


def _figure(label: str = "x") -> Figure:
    figure = Figure(figsize=(4, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1, 2], [1, 3, 2], "o-")
    axes.imshow(np.eye(3))
    axes.set_xlabel(label)
    return figure


# ---------------------------------------------------------------------- the page


def test_a_page_is_the_same_every_time_and_ids_are_unique_and_all_there():
    sections = [Section("One", figures=(_figure(), _figure())), Section("One", figures=(_figure(),))]
    page = render("Twice", sections)
    assert render("Twice", sections) == page
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids)) > 20
    used = set(re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', page))
    assert {a or b for a, b in used} <= set(ids)
    assert {"section-1", "section-2"} <= {a for a, _ in used}


def test_nothing_is_loaded_from_elsewhere_and_nothing_runs():
    page = render("Alone", [Section("Figure", figures=(_figure(),))])
    assert set(re.findall(r"https?://[^\"' )>]*", page)) == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert not re.search(r"<script|<link|@import|<!--|<metadata|<\?xml", page)
    assert page.count("<!DOCTYPE") == 1
    assert '<html lang="en">' in page
    assert 'name="viewport"' in page
    assert 'href="data:image/png;base64,' in page


def test_texts_are_escaped_wherever_they_stand():
    section = Section(EVIL, f"{EVIL}\n\nsecond", [[EVIL, "b"], [EVIL, "2"]], (_figure(EVIL),), (f'"{EVIL}',))
    page = render(EVIL, [section], note=EVIL)
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 9
    assert 'aria-label="&#34;&lt;script&gt;' in page
    assert "<p>second</p>" in page


def test_text_of_a_figure_that_looks_like_an_id_stays_as_it_is():
    page = render("Ids", [Section("Figure", figures=(_figure('id="a" url(#b)'),))])
    assert 'id="a" url(#b)</text>' in html.unescape(page)


def test_names_in_other_scripts_are_drawn_by_the_browser():
    assert "面积</text>" in render("Script", [Section("Figure", figures=(_figure("面积"),))])


def test_columns_of_numbers_are_set_to_the_right_and_the_first_is_a_heading():
    table = [["name", "value", "text"], ["a", "−1.5", "x"], ["b", "—", "2 of 3"], ["c", "+3 ✓", "y"]]
    page = render("Table", [Section("Table", table=table)])
    assert '<th scope="col" class="number">value</th><th scope="col">text</th>' in page
    assert '<th scope="row"><span>a</span></th><td class="number">−1.5</td><td>x</td>' in page
    assert '<th scope="col">value</th>' in render("Table", [Section("Header only", table=[["name", "value"]])])


def test_only_wide_figures_scroll_on_a_phone():
    wide = Figure(figsize=(10, 3))
    assert 'class="wide"' in render("Wide", [Section("Wide", figures=(wide,))])
    assert 'class="wide"' not in render("Narrow", [Section("Narrow", figures=(_figure(),))])


def test_a_section_that_does_not_fit_together_says_why():
    with pytest.raises(ValueError, match=r"'A' must have a caption for each of its 1 figures or none, got 2"):
        Section("A", figures=(_figure(),), captions=("a", "b"))
    with pytest.raises(ValueError, match=r"'B' must have a header and lines of its length, got lengths \[1, 2\]"):
        Section("B", table=[["a", "b"], ["c"]])
    with pytest.raises(ValueError, match=r"'C' must have a header and lines of its length, got lengths \[\]"):
        Section("C", table=[])


def test_writing_replaces_the_file_and_leaves_nothing_else(tmp_path):
    path, sections = tmp_path / "new" / "report.html", [Section("Ünïcode", "ℓ ± σ")]
    for title in ("first", "second"):
        assert write(path, title, sections, note="n") == path
        assert path.read_text(encoding="utf-8") == render(title, sections, note="n")
    assert list(path.parent.iterdir()) == [path]


# ---------------------------------------------------------------------- results


@pytest.fixture(scope="module")
def results():
    return results_sections(RESULTS)


def test_the_results_of_this_repository_are_all_shown(results):
    titles = [section.title for section in results]
    assert len(titles) == len(set(titles))
    assert sum(title.startswith("Theory: ") for title in titles) == 6
    assert sum(title.startswith("Toys: ") for title in titles) == 7  # banana by both protocols
    assert all(section.captions and all(section.captions) for section in results if section.figures)
    assert {"Images: rotated-mnist", "Images: cifar-ood, head text", "UCI: both protocols"} <= set(titles)
    assert len(next(s for s in results if s.title == "Images: rotated-mnist").figures) == 2


def test_differences_are_coloured_by_whether_they_are_near():
    table = [["model", "difference", "other"], ["a", "+0.01 ✓", "1"], ["b", "−0.50", "2"], ["c", "—", "3"]]
    page = render("t", [Section("s", table=table)])
    assert '<td class="number near">+0.01 ✓</td>' in page
    assert '<td class="number far">−0.50</td>' in page
    assert '<td class="number">—</td>' in page


def test_results_say_how_they_were_made(results):
    (section,) = [s for s in results if s.title == "UCI: how the rows were made"]
    assert (
        "bochner run uci-regression --posterior kfac --protocol paper. Made in 280 s, on NVIDIA H200, by commit 5f5e813."
        in section.text
    )
    assert any("Periodic models against the others" in s.title for s in results)
    for section in results:
        if section.figures:
            said = [section.text] if "cifar" in section.title else section.captions
            assert all("Command: bochner run " in text and "Made in " in text for text in said), section.title


def test_a_run_counts_once_however_many_rows_it_made():
    origin = {"hardware": "a machine", "commit": "1234567890"}
    angles = [
        {"model": m, "protocol": "paper", "posterior": p, "angle": a, "seconds": s, **origin}
        for m, s in (("relu", 100.0), ("sin", 50.0))
        for p in ("map", "kfac")
        for a in (0, 10)
    ]
    assert _made(angles, "c") == "Command: c. Made in 150 s, on a machine, by commit 1234567."
    methods = [{"model": "relu", "method": m, "run_seconds": 1.25, **origin} for m in ("slices", "gp")]
    assert "Made in 2.5 s," in _made(methods, "c")
    whole = [{"prior": p, "file_seconds": 0.08, **origin} for p in "abc"]
    assert "Made in 0.08 s," in _made(whole, "c")
    pretrained = [{"model": m, "seed": 3, "seconds": 20.0, "pretrain_seconds": 100.0, **origin} for m in "ab"]
    assert _made(pretrained, "c").startswith("Command: c, and with --seed 3. Made in 140 s,")
    assert _made([{"seconds": 1.0, "hardware": "h", "commit": "1234567890-dirty"}], "c").endswith(
        "by commit 1234567-dirty."
    )
    assert "Made in a time that the rows do not hold," in _made([{"model": "relu", **origin}], "c")


def test_tables_of_results_hold_the_numbers_of_their_rows(results):
    by = {section.title: section for section in results}
    table = by["uci-regression, kfac, protocol paper: boston"].table
    assert table[0][:4] == ["model", "NLPD ours", "paper", "difference"]
    rows = [
        r
        for r in read_rows(RESULTS / "uci" / "uci-regression.jsonl")
        if (r["set"], r["protocol"]) == ("boston", "paper")
    ]
    for line in table[1:]:
        values = [row["nlpd"] for row in rows if row["model"] == line[0] and row["status"] == "ok"]
        assert abs(float(line[1].split(" ")[0].replace("−", "-")) - np.mean(values)) <= 0.00501
    assert by["UCI: how to read the tables"].text == tables.RULE


def test_blocks_become_sections_and_markdown():
    blocks = [
        Block(text=("rule",)),
        Block("one", text=("a", "b")),
        Block("one", "set", table=[["x", "y"], ["1|2", ""]]),
        Block("two", text=("last",)),
    ]
    assert _sections(blocks, "T", prefix="p ") == [
        Section("T", "rule"),
        Section("p one", "a\n\nb"),
        Section("p one: set", "", [["x", "y"], ["1|2", ""]]),
        Section("p two", "last"),
    ]
    text = "rule\n\n## one\n\n- a\n- b\n\n### set\n\n| x | y |\n| --- | --- |\n| 1\\|2 |  |\n\n## two\n\nlast\n"
    assert as_markdown(blocks) == text


def test_folders_are_optional_but_one_must_hold_rows(tmp_path):
    with pytest.raises(
        ValueError, match=r"no rows in the folders theory, toys, uci, images of .*; make some with bochner run"
    ):
        results_sections(tmp_path)
    (tmp_path / "theory").mkdir()
    shutil.copy(RESULTS / "theory" / "mixture.jsonl", tmp_path / "theory")
    assert [section.title for section in results_sections(tmp_path)] == ["Theory: the error of keeping one harmonic"]


def toy_rows() -> list[dict]:
    """Rows as toy-1d makes them, three points each; one of the networks has not converged by R-hat, another by its ESS."""
    curve = {"grid": [-1.0, 0.0, 1.0], "mean": [0.0] * 3, "std": [1.0] * 3, "std_y": [1.1] * 3}
    quality = {"RBF": (1.02, 900.0), "Exponential": (1.0, 399.0)}
    rows = [{"method": "data", "x": [0.0], "y": [0.1]}]
    for prior in NINE:
        r_hat, ess = quality.get(prior, (1.01, 400.0))
        rows.append({"prior": prior, "method": "slices", "r_hat": r_hat, "ess": ess} | curve)
        rows.append({"prior": prior, "method": "gp", "paper": [0.0] * 3, "paper_difference": 0.1} | curve)
    return rows


def test_every_sampled_panel_says_whether_it_converged():
    titles = [axes.get_title().split("\n") for axes in toys.finite_regression_figure(toy_rows()).axes]
    assert [title[0] for title in titles] == list(NINE)
    said = dict(titles)
    assert said.pop("RBF") == "slices: not converged: R-hat 1.020, ESS 900"
    assert said.pop("Exponential") == "slices: not converged: R-hat 1.000, ESS 399"
    assert set(said.values()) == {"slices: R-hat 1.010, ESS 400"}


@pytest.mark.parametrize(
    ("lost", "missing", "title"),
    [
        (lambda row: row["method"] == "slices", "rows of networks for ArcCos-1 ~ ReLU, ", "networks of ten"),
        (
            lambda row: (row.get("prior"), row["method"]) == ("RBF", "gp"),
            "rows of Gaussian processes for RBF;",
            "in one dim",
        ),
        (lambda row: row["method"] == "data", "the row of the data (method 'data');", ""),
    ],
)
def test_a_figure_without_its_rows_says_what_is_missing_and_how_to_make_it(lost, missing, title, tmp_path):
    """On the page in its place; for the command that draws as an error, after the figures whose rows are there."""
    path = tmp_path / "toys" / "toy-1d.jsonl"
    write_rows(path, [row for row in toy_rows() if not lost(row)])
    sections = results_sections(tmp_path)
    texts = [section.text for section in sections if title in section.title]
    assert len(sections) == 2
    assert all(f"toy-1d.jsonl lacks {missing}" in text for text in texts)
    assert all(f"Remove the file and run bochner run toy-1d --out {path.parent}." in text for text in texts)
    assert [bool(section.figures) for section in sections].count(False) == len(texts)
    with pytest.raises(MissingRowsError, match=re.escape(missing.rstrip(";"))):
        draw("toy-1d", path)
    assert len(list(path.parent.glob("*.svg"))) == 2 - len(texts)


def test_the_remedy_for_rows_of_the_published_networks_names_their_protocol(tmp_path):
    text = how_to_make(tmp_path / "banana-paper.jsonl", MissingRowsError("a row"))
    assert "lacks a row;" in text
    assert f"bochner run banana --protocol paper --out {tmp_path}." in text


@pytest.mark.parametrize("figure", ["teaser", "comparisons_app_meanvar", "comparisons_app"])
def test_figures_of_banana_say_which_rows_are_missing(figure):
    with pytest.raises(MissingRowsError, match=r"rows of (networks|Gaussian processes) for "):
        toys.FIGURES[figure]([{"method": "data", "x": [0.0, 0.0], "y": [0]}])


# ---------------------------------------------------------------------- in a browser


SIZES = """(() => {
  const root = document.documentElement, sizes = x => [...document.querySelectorAll(x)].map(t => [t.clientWidth, t.scrollWidth]);
  return {inner: innerWidth, scroll: root.scrollWidth, height: root.scrollHeight, tables: sizes(".table"),
          figures: [...document.querySelectorAll("svg")].map(s => s.getBoundingClientRect().width)};
})()"""


def _open(browser, folder: Path, page: str, width: int = 1280, theme: str = "light") -> None:
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    browser.open(path, width, theme)


@needs_browser
def test_pages_fit_a_desk_and_a_phone(results, browser, tmp_path):
    by_title = {section.title: section for section in results}
    wide_figure, wide_table = by_title["Theory: the error of finite width"], by_title["Images: cifar-ood, head text"]
    sections = [wide_figure, replace(wide_table, figures=(), captions=())]
    page = render("A title " + "without_end_" * 12, sections, note="A note.")
    for width in (1280, 390):
        _open(browser, tmp_path, page, width)
        seen = browser.run(SIZES)
        assert browser.errors == []
        assert seen["inner"] == width
        assert seen["scroll"] <= seen["inner"]
        assert seen["height"] > 900
        assert all(inner <= width - 30 for inner, _ in seen["tables"])
    assert any(scroll > inner for inner, scroll in seen["tables"])
    assert seen["figures"] == [672]  # legible, in its own scroller


@needs_browser
def test_in_the_dark_the_page_is_dark_and_figures_stay_on_light_cards(browser, tmp_path):
    page = render("Dark", [Section("Figure", figures=(_figure(),))])
    brightness = {}
    for theme in ("light", "dark"):
        _open(browser, tmp_path, page, theme=theme)
        for part in ("body", ".picture"):
            color = browser.run(f"getComputedStyle(document.querySelector('{part}')).backgroundColor")
            brightness[theme, part] = sum(map(int, re.findall(r"\d+", color)[:3])) / 3
    assert brightness["light", "body"] > 240
    assert brightness["light", ".picture"] > 240
    assert brightness["dark", "body"] < 40
    assert brightness["dark", ".picture"] > 230


@needs_browser
def test_a_script_that_got_into_a_page_would_not_run_and_would_be_noticed(browser, tmp_path):
    page = render("Safe", [Section("Text", "words")]).replace(
        "</body>", "<script>document.title = 'changed'</script></body>"
    )
    _open(browser, tmp_path, page)
    assert browser.run("document.title") == "Safe"
    assert any("Content Security Policy" in line for line in browser.errors)
