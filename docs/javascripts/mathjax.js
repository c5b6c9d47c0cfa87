// Renders what pymdownx.arithmatex marks as mathematics.
window.MathJax = {
  tex: { inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]] },
  options: { ignoreHtmlClass: ".*|", processHtmlClass: "arithmatex" },
};
