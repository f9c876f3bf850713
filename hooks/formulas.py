"""Formulas become MathML while the site is built, so that a browser shows them without a script or a network."""

import html
import re

from latex2mathml.converter import convert

# What the extension pymdownx.arithmatex leaves: \( … \) in a span, \[ … \] in a div.
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def to_mathml(page: str) -> str:
    """The page with every formula as MathML."""

    def replace(match: re.Match[str]) -> str:
        tag, bracket, latex = match.groups()
        formula = convert(html.unescape(latex).strip(), display="block" if bracket == "[" else "inline")
        return f'<{tag} class="formula">{formula}</{tag}>'

    return FORMULA.sub(replace, page)


def on_page_content(html: str, **_: object) -> str:
    """Called by MkDocs with the body of each page."""
    return to_mathml(html)
