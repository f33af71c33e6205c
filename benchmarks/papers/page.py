"""The pages of ``docs/papers``, from the papers' published numbers and the kept JSON alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.papers.draw import draw
from benchmarks.papers.found import HERE, PAPERS, ROOT, read
from benchmarks.papers.verdicts import Verdict, asked, judge
from plait.core.base.codec.toml_text import read_toml

DOCS = ROOT / "docs" / "papers"
FIT = (
    "Planned and simulated numbers rest on the constants that ship "
    "([specs/efficiency](../../specs/efficiency)), fitted to published steps of other sources; none is fitted to "
    "this page."
)
UNITS = {
    "x": "{:.2f}x", "%": "{:.0%}", "+%": "{:+.1%}", "s": "{:.3g} s", "GB": "{:.3g} GB", "": "{:.4g}", "MFU": "{:.1%}",
    "tokens": "{:,.0f}",
}  # fmt: skip
NOTHING, UNEXPLAINED = "-", "Why is not known."


def published(paper: str) -> dict[str, Any]:
    """A paper's file."""
    return read_toml(HERE / "published" / f"{paper}.toml")


def verdicts() -> Iterator[tuple[str, Mapping[str, Any], Verdict]]:
    """Every claim, those first that are not reproduced: its paper, what is published, how it stands."""
    found = [
        (paper, claim, judge(claim, read(paper, claim["figure"])))
        for paper in PAPERS for claim in published(paper)["claims"]
    ]  # fmt: skip
    yield from sorted(found, key=lambda each: (each[2].reproduced, each[1]["number"]))


def index() -> str:
    """The page of all claims."""
    rows = list(verdicts())
    won = sum(verdict.reproduced for _, _, verdict in rows)
    lines = [
        "# The five papers", "",
        "What the papers publish that Plait is made of, beside what Plait computes. `make papers` writes these pages "
        "from JSON ([benchmarks/results/papers](../../benchmarks/results/papers)); no number of Plait's is typed. "
        + FIT, "",
        f"Of {len(rows)} claims {won} are reproduced: every value is as *asked*. Of a published gain that is from half "
        "of the lowest to twice of the highest, over one; of others the rule is ours "
        "([verdicts.py](../../benchmarks/papers/verdicts.py)).", "",
        "| | paper | claim | place | asked | Plait | verdict |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    lines += [
        f"| {claim['number']} | [{paper}]({paper}.md) | {_judged(claim, verdict)}" for paper, claim, verdict in rows
    ]
    lines += ["", "[points.md](points.md) counts what the papers say, point by point, and what Plait has of it."]
    return "\n".join(lines) + "\n"


def page(paper: str) -> str:
    """One paper's page."""
    about = published(paper)
    lines = [f"# {about['title']}", "", f"[{about['source']}]({about['url']}). {about['about']} {FIT}", ""]
    lines += ["## Claims", "", "| | claim | place | asked | Plait | verdict |", "|---|---|---|---|---|---|"]
    ours = [(claim, verdict) for of, claim, verdict in verdicts() if of == paper]
    lines += [f"| {claim['number']} | {_judged(claim, verdict)}" for claim, verdict in ours]
    for claim, verdict in ours:
        if not verdict.reproduced:
            lines += ["", _explained(paper, claim, verdict)]
    for figure in about["figures"]:
        lines += ["", *_figure(paper, figure)]
    return "\n".join(lines) + "\n"


def _judged(claim: Mapping[str, Any], verdict: Verdict) -> str:
    """The rest of a claim's row: what the paper says and where, what is asked, what there is."""
    return f"{claim['says']} | {claim['place']} | {asked(claim)} | {_values(verdict)} | {verdict.word} |"


def _explained(paper: str, claim: Mapping[str, Any], verdict: Verdict) -> str:
    if verdict.failed is None:
        return f"{claim['number']}: nothing is kept of it; `make papers` computes it."
    facts = (read(paper, claim["figure"]) or {}).get("facts", {})
    count = f"{len(verdict.failed)} of {len(verdict.values)} outside"
    return (
        f"{claim['number']}: {count} ({_values(verdict, failed=True)}). {claim.get('why', UNEXPLAINED).format(**facts)}"
    )


def _values(verdict: Verdict, *, failed: bool = False) -> str:
    """The range of numbers; of what holds or does not, how many do."""
    values = list((verdict.failed or {} if failed else verdict.values).values())
    if not values:
        return NOTHING
    if all(isinstance(one, bool) for one in values):
        return ", ".join(verdict.failed or {}) if failed else f"{sum(map(bool, values))} of {len(values)} hold"
    low, high = f"{min(values):.4g}", f"{max(values):.4g}"
    return low if low == high else f"{low} to {high}"


def _figure(paper: str, figure: Mapping[str, Any]) -> Iterator[str]:
    kept = read(paper, figure["id"])
    yield f"## {figure['title']}"
    yield ""
    how = kept["how"] if kept else figure["how"]
    when = f", {kept['date']} at commit {kept['commit']}" if kept else ""
    yield f"Published in {figure['place']}. Plait's numbers are {how}{when}."
    yield ""
    yield "| | published | Plait | command |"
    yield "|---|---|---|---|"
    found = {row["name"]: row for row in (kept or {}).get("rows", ())}
    for row in figure["rows"]:
        own = found.get(row["name"], {})
        note = f" ({own['note']})" if own.get("note") else ""
        told = f"{shown(own.get('value'), row.get('unit', figure['unit']))}{note}"
        command = f"`{own['command']}`" if own.get("command") else NOTHING
        yield f"| {row['name']} | {shown(row.get('published'), row.get('unit', figure['unit']))} | {told} | {command} |"
    if kept:
        if figure["chart"] != "none":
            yield ""
            yield f"![{figure['title']}]({picture(paper, figure).relative_to(DOCS)})"
        yield ""
        yield figure["why"].format(**kept["facts"])


def picture(paper: str, figure: Mapping[str, Any]) -> Path:
    """The file of a figure's picture."""
    return DOCS / "pictures" / f"{paper}-{figure['id']}.svg"


def shown(value: Any, unit: str) -> str:
    """A number, words, or a range, in a figure's unit.

    >>> shown([1.14, 1.26], "x"), shown(None, "x"), shown("up to 1.5", "x"), shown([0.2, 0.2], "%")
    ('1.14x to 1.26x', '-', 'up to 1.5', '20%')
    """
    if value is None:
        return NOTHING
    if isinstance(value, str):
        return value
    ends = [UNITS[unit].format(one) for one in (value if isinstance(value, Sequence) else [value])]
    return " to ".join(dict.fromkeys(ends))


def write_pages(papers: Sequence[str] = PAPERS) -> None:
    """All pages and pictures."""
    DOCS.mkdir(parents=True, exist_ok=True)
    for paper in papers:
        (DOCS / f"{paper}.md").write_text(page(paper))
        for figure in published(paper)["figures"]:
            if (kept := read(paper, figure["id"])) and figure["chart"] != "none":
                picture(paper, figure).parent.mkdir(exist_ok=True)
                draw(figure, kept, picture(paper, figure))
    (DOCS / "README.md").write_text(index())
