"""The look of the page: no fonts, pictures or rules from elsewhere, light and dark, from 390 pixels on."""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root {
  color-scheme: light dark;
  --paper: #f7f8f9; --card: #ffffff; --ink: #15181c; --dim: #646b75; --rule: #dfe2e6; --track: #e9ecef;
  --accent: #b3541e; --red: #d8413a; --green: #1f9d57; --blue: #2f6fde;
  --sans: ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  --mono: ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #101215; --card: #171a1e; --ink: #e8eaed; --dim: #98a0ab; --rule: #2a2f36; --track: #22262c;
    --accent: #f2a65a; --red: #ff6b61; --green: #42cf85; --blue: #6ca4ff;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 var(--sans); }
main, .main, .top, footer { max-width: 1120px; margin: 0 auto; padding: 0 20px; }
.top { padding-top: 56px; padding-bottom: 40px; }
h1, h2, p, ul, dl, figure { margin: 0; }
h1 { font-size: clamp(2rem, 6vw, 3.4rem); line-height: 1.05; letter-spacing: -0.03em; font-weight: 680;
  overflow-wrap: anywhere; text-wrap: balance; }
.top code { white-space: nowrap; }
.top p { margin-top: 14px; max-width: 80ch; color: var(--dim); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(132px, 1fr)); gap: 0; margin-top: 34px;
  border-top: 1px solid var(--ink); }
.figures div { padding: 12px 16px 4px 0; min-width: 0; }
.figures dt { font-size: 0.8rem; color: var(--dim); }
.figures dd { margin: 0; font-size: 1.6rem; line-height: 1.25; font-weight: 560; letter-spacing: -0.02em;
  font-variant-numeric: tabular-nums; white-space: nowrap; }

/* The one loud thing: a contact sheet on black, captions in the amber of film's edge print. */
.sheet { background: #0c0c0d; color: #f3f1ec; padding: 36px 0 44px; }
.sheet > * { max-width: 1120px; margin: 0 auto; padding: 0 20px; }
.sheet h2 { font-size: 1.15rem; font-weight: 620; }
.sheet .note { color: #9a9894; font-size: 0.9rem; margin-bottom: 26px; }
.frames { display: grid; gap: 30px 22px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, var(--strip)), 1fr)); }
.frames figure { min-width: 0; }
.strip { display: grid; gap: 3px; grid-auto-flow: column; grid-auto-columns: minmax(0, 1fr); }
.strip img { display: block; width: 100%; height: auto; background: #1d1d1f; }
.strip.small img { image-rendering: pixelated; }
.strip.drawn { grid-auto-flow: row; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }
figcaption { display: grid; grid-template-columns: minmax(0, 1fr) auto; column-gap: 12px; align-items: baseline;
  padding-top: 8px; font-size: 0.9rem; line-height: 1.35; }
figcaption .frame { font: 0.74rem/1 var(--mono); color: #f0a33c; font-variant-numeric: tabular-nums; }
figcaption .label { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; font-weight: 560; }
figcaption .path { grid-column: 1 / -1; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; color: #8d8b87;
  font-size: 0.78rem; }

section { display: grid; grid-template-columns: minmax(0, 1fr); gap: 18px; padding: 44px 0;
  border-top: 1px solid var(--rule); }
main section:first-child, .main section:first-child { border-top: 0; }
section h2 { font-size: 1.15rem; line-height: 1.3; font-weight: 620; letter-spacing: -0.01em; }
section header p { margin-top: 6px; color: var(--dim); font-size: 0.9rem; }
section > div > * + * { margin-top: 20px; }
@media (min-width: 860px) { section { grid-template-columns: 232px minmax(0, 1fr); gap: 40px; } }

.bars { list-style: none; padding: 0; }
.bars li { display: grid; grid-template-columns: minmax(0, 9.5rem) minmax(40px, 1fr) auto 3.9em; gap: 12px;
  align-items: center; padding: 4px 0; font-size: 0.94rem; }
.bars .name { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.bars .track { background: var(--track); height: 12px; border-radius: 2px; overflow: hidden; }
.bars .bar { display: block; height: 100%; min-width: 1px; background: var(--accent); }
.bars .count, .bars .share { text-align: right; font-variant-numeric: tabular-nums; }
.bars .share { color: var(--dim); font-size: 0.86rem; }
@media (max-width: 520px) {
  .bars li { grid-template-columns: minmax(0, 7rem) minmax(40px, 1fr) auto; }
  .bars .share { display: none; }
}

.chart svg { display: block; width: 100%; height: 150px; border-bottom: 1px solid var(--dim); overflow: hidden; }
.chart .scale { display: flex; justify-content: space-between; gap: 12px; padding-top: 6px; color: var(--dim);
  font-size: 0.82rem; font-variant-numeric: tabular-nums; }
.columns { fill: var(--accent); }
polygon { fill-opacity: 0.16; stroke-width: 1.6; stroke-linejoin: round; vector-effect: non-scaling-stroke; }
.red { fill: var(--red); stroke: var(--red); } .green { fill: var(--green); stroke: var(--green); }
.blue { fill: var(--blue); stroke: var(--blue); } .grey { fill: var(--dim); stroke: var(--dim); }
polyline { stroke-width: 1.8; stroke-linejoin: round; vector-effect: non-scaling-stroke; }
polyline.line { fill: none; }
polyline.faint { stroke-opacity: 0.35; stroke-width: 1; }
.accent { fill: var(--accent); stroke: var(--accent); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 22px; color: var(--dim); font-size: 0.88rem; }
.chart + .legend, .legend + .chart { margin-top: 8px; }
.dot { display: inline-block; width: 0.6em; height: 0.6em; border-radius: 50%; margin-right: 0.5em;
  background: var(--dim); }
.dot.accent { background: var(--accent); }
.dot.red { background: var(--red); } .dot.green { background: var(--green); } .dot.blue { background: var(--blue); }

table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
th { text-align: left; font-weight: 500; color: var(--dim); font-size: 0.82rem; }
th, td { padding: 7px 14px 7px 0; border-bottom: 1px solid var(--rule); vertical-align: top; overflow-wrap: anywhere; }
th:last-child, td:last-child { padding-right: 0; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.stacked { table-layout: fixed; }
@media (max-width: 520px) {
  .stacked thead { display: none; }
  .stacked td { display: block; padding-right: 0; }
  .stacked td:first-child { border-bottom: 0; padding-bottom: 0; }
}
.matrix { table-layout: auto; font-size: 0.82rem; }
.matrix th, .matrix td { padding: 5px 7px; text-align: right; font-variant-numeric: tabular-nums; }
.matrix td:first-child, .matrix th:first-child { text-align: left; padding-left: 0; }
.wide { overflow-x: auto; }
td.c { font-family: var(--mono); font-size: 0.84em; }

.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 300px), 1fr)); column-gap: 36px;
  font-size: 0.94rem; }
.facts div { display: grid; grid-template-columns: minmax(0, 8rem) minmax(0, 1fr); gap: 12px; padding: 7px 0;
  border-bottom: 1px solid var(--rule); }
.facts dt { color: var(--dim); }
.facts dd { margin: 0; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
a { color: var(--accent); }
article { border-top: 1px solid var(--ink); }
code, pre { font-family: var(--mono); font-size: 0.86em; }
code { overflow-wrap: anywhere; }
pre { margin: 0; padding: 16px 18px; background: var(--card); border: 1px solid var(--rule); border-radius: 4px;
  line-height: 1.6; white-space: pre-wrap; overflow-wrap: anywhere; }
details > summary { cursor: pointer; color: var(--accent); font-size: 0.92rem; padding: 4px 0; }
details[open] > summary { margin-bottom: 10px; }
summary:focus-visible { outline: 2px solid var(--accent); outline-offset: 3px; }
footer { padding-top: 28px; padding-bottom: 56px; color: var(--dim); font-size: 0.86rem; }
@media print { .sheet { background: none; color: inherit; } body { background: none; } }
"""
