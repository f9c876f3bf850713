// For keyboards and screen readers: what scrolls sideways can be reached by key, and the theme's search box has a name.
addEventListener("load", () => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  for (const part of document.querySelectorAll("pre > code, .md-typeset__scrollwrap, div.formula")) {
    if (part.scrollWidth > part.clientWidth) part.tabIndex = 0;
  }
});
