"""Pages of HTML: no script, no other file, readable on a phone and on a wide screen, in light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --text: #1a1a1a; --page: #fff; --panel: #f6f7f9; --line: #d4d8de; --dim: #5d6570;
  --true: #4c78a8; --padded: #f5b36b; --bad: #c0272d; --good: #1f7a33; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e8eb; --page: #15181c; --panel: #1f242a; --line: #3a414a;
  --dim: #9aa3ae; --bad: #ff7b7b; --good: #7bd88f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1200px; padding: 1rem; background: var(--page); color: var(--text);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: .2rem 0; } h2 { font-size: 1.15rem; margin: 0 0 .2rem; overflow-wrap: anywhere; }
p { margin: .2rem 0 .8rem; color: var(--dim); overflow-wrap: anywhere; }
section { margin: 1.5rem 0; padding-top: 1rem; border-top: 1px solid var(--line); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .3rem; font-size: .82rem; text-align: right;
  border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--page);
  white-space: normal; overflow-wrap: anywhere; min-width: min(9.5rem, 40vw); }
th { font-weight: 600; color: var(--dim); } .bad { color: var(--bad); } .good { color: var(--good); }
ul, ol { margin: .4rem 0; padding-left: 1.3rem; } li { margin: .25rem 0; font-size: .87rem; overflow-wrap: anywhere; }
li small { display: block; color: var(--dim); font-size: inherit; } li b { font-weight: 600; }
"""


def make_html(title: str, body: str, style: str = "") -> str:
    """A whole page.

    Args:
        title: as text.
        body: as HTML.
        style: rules beside those of every page.
    """
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}{style}</style></head><body>{body}</body></html>\n"
    )


def write_table(headings: Iterable[str], rows: Sequence[Sequence[str]], kinds: Sequence[str] | None = None) -> str:
    """A table, which scrolls by itself where it is wider than the screen.

    Args:
        headings, rows: as text.
        kinds: "bad", "good" or "" for each row.
    """
    head = "".join(f"<th>{escape(each)}</th>" for each in headings)
    body = "".join(
        f'<tr class="{kind}">' + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row, kind in zip(rows, kinds or [""] * len(rows), strict=True)
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
