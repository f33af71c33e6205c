"""The pages of ``docs/papers``, from the papers' published numbers and the kept JSON alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.papers.draw import draw
from benchmarks.papers.found import HERE, PAPERS, ROOT, read
from benchmarks.papers.verdicts import RULES, WORDS, Verdict, judge, worst
from plait.core.base.codec.toml_text import read_toml

DOCS = ROOT / "docs" / "papers"
UNITS = {
    "x": "{:.2f}x", "%": "{:.0%}", "+%": "{:+.1%}", "s": "{:.3g} s", "GB": "{:.3g} GB", "": "{:.4g}", "MFU": "{:.1%}",
}  # fmt: skip
NOTHING = "-"


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A published row of a figure, as ``judge`` takes it; what was found of it; its verdict."""

    row: Mapping[str, Any]
    result: Mapping[str, Any]
    verdict: Verdict


def published(paper: str) -> dict[str, Any]:
    """A paper's file."""
    return read_toml(HERE / "published" / f"{paper}.toml")


def judged(paper: str, figure: Mapping[str, Any]) -> list[Quantity]:
    """The quantities that a figure prints beside published ones."""
    results = {row["name"]: row for row in (read(paper, figure["id"]) or {}).get("rows", ())}
    rows = [{"unit": figure["unit"], "differs": figure.get("differs"), **row} for row in figure["rows"]]
    return [
        Quantity(row=row, result=results.get(row["name"], {}),
                 verdict=judge(row, results.get(row["name"]), emulated=figure["how"] == "emulated"))
        for row in rows if "published" in row
    ]  # fmt: skip


def quantities(paper: str) -> list[Quantity]:
    """All of a paper."""
    return [one for figure in published(paper)["figures"] for one in judged(paper, figure)]


def claims() -> Iterator[tuple[str, Mapping[str, Any], str, list[Quantity]]]:
    """Every claim by number: its paper, what is published, the worst verdict of its quantities, and these."""
    every = [(paper, claim) for paper in PAPERS for claim in published(paper)["claims"]]
    for paper, claim in sorted(every, key=lambda one: one[1]["number"]):
        own = [one for one in quantities(paper) if one.row.get("claim") == claim["number"]]
        yield paper, claim, worst(one.verdict.word for one in own), own


def index() -> str:
    """The page of all papers: verdicts of all quantities, and of the claims that have a number."""
    every = list(claims())
    lines = [
        "# The five papers", "",
        "What the papers publish that Plait is made of, beside what Plait computes. `make papers` writes these pages "
        "from JSON ([benchmarks/results/papers](../../benchmarks/results/papers)), which has a command for each row; "
        "no number of Plait's is typed.", "",
        f"Of {len(every)} numbered claims {counted(word for _, _, word, _ in every)}.", "",
        "|paper|quantities|" + "|".join(WORDS) + "|", "|---" * (2 + len(WORDS)) + "|",
    ]  # fmt: skip
    total: Counter[str] = Counter()
    for paper in PAPERS:
        words = Counter(one.verdict.word for one in quantities(paper))
        total += words
        lines.append(_counts(f"[{paper}]({paper}.md)", words))
    lines += [
        _counts("all", total), "",
        f"One rule ([rules.toml](../../benchmarks/papers/rules.toml)) judges all: a published range is widened by "
        f"{RULES['tolerance']['gain']:.0%} of a gain over one, by {RULES['tolerance']['value']:.0%} of other values.",
        "",
    ]  # fmt: skip
    lines += [f"- *{word}*: {means}." for word, means in RULES["verdicts"].items()]
    lines += ["", "|claim|paper|what is published|Plait|verdict|", "|---|---|---|---|---|"]
    for paper, claim, word, own in every:
        values = "; ".join(dict.fromkeys(_plait(one) for one in own))
        lines.append(f"|{claim['number']}|[{paper}]({paper}.md)|{claim['says']} ({claim['place']})|{values}|{word}|")
    lines += ["", "[points.md](points.md) has what the papers say, point by point, and what Plait has of it."]
    return "\n".join(lines) + "\n"


def counted(words: Iterable[str]) -> str:
    """How many of each verdict, the best first.

    >>> counted(["direction", "as published", "direction"])
    '1 is as published, 2 direction'
    """
    counts = Counter(words)
    parts = [f"{counts[word]} {word}" for word in WORDS if counts[word]]
    first, _, rest = ", ".join(parts).partition(" ")
    return f"{first} {'is' if first == '1' else 'are'} {rest}"


def _counts(name: str, words: Counter[str]) -> str:
    return "|".join(["", name, *map(str, [words.total(), *(words[word] for word in WORDS)]), ""])


def page(paper: str) -> str:
    """One paper's page."""
    about = published(paper)
    facts: dict[str, Any] = {}
    for figure in about["figures"]:
        facts |= (read(paper, figure["id"]) or {}).get("facts", {})
    numbers = "; ".join(f"{claim['number']} {word}" for of, claim, word, _ in claims() if of == paper)
    every = quantities(paper)
    lines = [
        f"# {about['title']}", "", f"[{about['source']}]({about['url']}). {about['about']}", "",
        f"Of {len(every)} quantities beside published ones {counted(one.verdict.word for one in every)} "
        f"([rules](README.md)). Claims: {numbers}.", "",
        f"**Against it**: {about['against'].format(**facts)}", "",
        f"{about['fitted']} The JSON ([results](../../benchmarks/results/papers/{paper})) has a command for every row.",
    ]  # fmt: skip
    for figure in about["figures"]:
        lines += ["", *_figure(paper, figure, facts)]
    return "\n".join(lines) + "\n"


def _figure(paper: str, figure: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[str]:
    kept = read(paper, figure["id"])
    assert kept, f"make papers computes {paper} {figure['id']}"
    facts = {**facts, **kept["facts"]}
    when = f"on {facts['measured']}" if figure["how"] == "emulated" else f"{kept['date']}, {kept['commit']}"
    place = figure["place"][0].upper() + figure["place"][1:]
    yield from (f"## {figure['title']}", "", f"{place}; {figure['how']} {when}.")
    own = judged(paper, figure)
    if own:
        yield from ("", "|quantity|published|Plait (by a reading)|verdict|", "|---|---|---|---|")
        for one in own:
            name = one.row["name"] + (f" (claim {one.row['claim']})" if "claim" in one.row else "")
            yield f"|{name}|{shown(one.row['published'], one.row['unit'])}|{_plait(one)}|{one.verdict}|"
    again = f"python -m benchmarks.papers {paper} --figure {figure['id']} --again"
    yield from ("", f"    {next((one.result['command'] for one in own if one.result.get('command')), again)}")
    if figure["chart"] != "none":
        yield from ("", f"![{figure['id']}]({picture(paper, figure).relative_to(DOCS)})")
    differs = "; ".join(dict.fromkeys(one.row["differs"] for one in own if one.row["differs"]))
    yield from ("", figure["why"].format(**facts) + f" Read: {differs}." * bool(differs))


def _plait(one: Quantity) -> str:
    """The value, over all that is not printed; in brackets by a reading."""
    unit, over = one.row["unit"], one.result.get("over") or ()
    text = shown(one.result.get("value"), unit)
    if over:
        words = {shown(one, unit) for one in over if isinstance(one, (bool, str))}
        ends = [] if words else [end for one in over for end in (one if isinstance(one, Sequence) else [one])]
        text = ", ".join(sorted(words)) if words else shown([min(ends), max(ends)], unit)
    reading = shown(one.result.get("reading"), unit)
    return text if reading in (NOTHING, text) else f"{text} ({reading})"


def picture(paper: str, figure: Mapping[str, Any]) -> Path:
    """The file of a figure's picture."""
    return DOCS / "pictures" / f"{paper}-{figure['id']}.svg"


def shown(value: Any, unit: str) -> str:
    """A number, words, whether it holds, or a range, in a figure's unit.

    >>> shown([1.14, 1.26], "x"), shown(None, "x"), shown("none", "x"), shown([0.2, 0.2], "%")
    ('1.14x–1.26x', '-', 'none', '20%')
    >>> shown([0.9, inf], "%"), shown(False, "x"), shown([-0.1, 0.1], "+%")
    ('90% or more', 'no', '-10.0% to +10.0%')
    """
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    ends = value if isinstance(value, Sequence) else [value]
    if ends[-1] == inf:
        return f"{UNITS[unit].format(ends[0])} or more"
    return (" to " if unit == "+%" else "–").join(dict.fromkeys(UNITS[unit].format(one) for one in ends))


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
