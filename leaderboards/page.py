"""The page: one HTML file with its style and charts inside, that opens from disk with no network and no script."""

import csv
from pathlib import Path
from typing import Any

from zaya.leaderboards import sections
from zaya.leaderboards.checks import Check, run_checks, verdict
from zaya.leaderboards.collect import Found, Release, Run
from zaya.leaderboards.html import Markup, tag
from zaya.leaderboards.parts import notes, section, table
from zaya.leaderboards.scores import scores
from zaya.results import Provenance

HERE = Path(__file__).parent
WORDS = {"pass": "passed", "fail": "failed", "even": "undecided", "missing": "not measured"}
SIGNS = {"pass": "✓", "fail": "✕", "even": "≈", "missing": "–"}
SECTIONS = {
    "scores": "Scores",
    "training": "Training",
    "experts": "Experts",
    "serving": "Serving",
    "verification": "Verification",
    "speed": "Training speed",
    "published": "Published elsewhere",
    "sources": "Sources",
}


def render(release: Release, title: str, bigram_margin_nats: float) -> str:
    """The whole page as text. `bigram_margin_nats` is how far below the bigram model the held-out loss must be."""
    checks = run_checks(release, bigram_margin_nats)
    style = (HERE / "style.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        Markup(f"<style>\n{style}</style>"),
    )
    links = [tag("li", tag("a", name, href=f"#{anchor}")) for anchor, name in SECTIONS.items()]
    body = tag(
        "body",
        tag("a", "Skip to the scores", href="#scores", class_="skip-link"),
        tag("header", _heading(release, title), _verdict(checks), _figures(release)),
        tag("nav", tag("ul", links), aria_label="Sections"),
        tag(
            "main",
            scores(release),
            sections.training(release),
            sections.experts(release),
            sections.serving(release),
            sections.verification(release),
            sections.speed(release),
            _published(),
            _sources(release),
        ),
    )
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def _heading(release: Release, title: str) -> Markup:
    made = [f.result.provenance for f in release.found if f.result.provenance is not None]
    last = max((p.started_at for p in made), default=None)
    commits = sorted({p.git_commit[:9] for p in made if p.git_commit})
    facts = []
    if release.ours is not None:
        others = [s for s in release.subjects if s != release.ours]
        facts.append(f"{release.ours} beside {' and '.join(others)}" if others else release.ours)
    facts += [f"last measured {last[:16].replace('T', ' ')} UTC"] if last else []
    facts += [f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}"] if commits else []
    return tag("div", tag("h1", title), tag("p", " · ".join(facts), class_="facts"), class_="heading")


def _verdict(checks: list[Check]) -> Markup:
    state, words = verdict(checks)
    items = [
        tag(
            "li",
            tag("span", SIGNS[c.state], class_="sign", aria_hidden="true"),
            tag(
                "div",
                tag("a", c.title, href=f"#{c.section}"),
                tag("span", WORDS[c.state], class_="state"),
                tag("p", c.says, notes(*c.notes)) if c.state != "missing" else None,
            ),
            class_=c.state,
        )
        for c in checks
    ]
    heading = tag("h2", tag("span", SIGNS[state], class_="sign", aria_hidden="true"), " ", words)
    return tag("section", heading, tag("ul", items), class_=f"verdict {state}", id="verdict", aria_label="Verdict")


def _figures(release: Release) -> Markup:
    """The few numbers to remember."""
    tiles = [t for t in (_loss(release), _bits(release), *_serving(release), _size(release)) if t is not None]
    return tag("dl", tiles, class_="figures") if tiles else Markup("")


def _tile(name: str, value: str, unit: str, note: Any) -> Markup:
    shown = tag("dd", tag("b", value), " ", tag("span", unit), class_="value")
    return tag("div", tag("dt", name), shown, tag("dd", note, class_="note"))


def _loss(release: Release) -> Markup | None:
    run = release.run(release.ours)
    loss = run.last("heldout_loss") if run else None
    if run is None or loss is None:
        return None
    bigram = (release.dataset or {}).get("bigram_heldout_nats_per_token")
    note = [f"bigram {bigram:.3f}" if bigram else None, notes(run.number, release.dataset_number)]
    return _tile("Held-out loss", f"{loss:.3f}", "nats per token", note)


def _bits(release: Release) -> Markup | None:
    for by in release.scores().values():
        ours = by.get(release.ours or "")
        value = ours.value("bits_per_byte") if ours else None
        if ours is not None and value is not None:
            other = by.get(release.baseline or "")
            rival = other.value("bits_per_byte") if other else None
            note = f"{release.baseline} {rival:.3f}" if rival is not None else None
            return _tile("Held-out text", f"{value:.3f}", "bits per byte", [note, notes(ours.number)])
    return None


def _serving(release: Release) -> list[Markup]:
    ours = [(level, f) for level, name, f in sections.loads(release) if name == release.ours]
    tiles = []
    if ours:
        level, f = ours[0]
        first = sections.latency(f, "ttft", "p50")
        if first is not None:
            tiles.append(_tile("First token", f"{first:.0f}", "ms, median", [f"{level} in flight", notes(f.number)]))
        level, f = ours[-1]
        speed = f.value("output_tokens_per_s")
        if speed is not None:
            tiles.append(_tile("Served", f"{speed:,.0f}", "tokens/s", [f"{level} in flight", notes(f.number)]))
    return tiles


def _size(release: Release) -> Markup | None:
    run = release.run(release.ours)
    size = run.about.get("parameters") if run else None
    if run is None or not size:
        return None
    note = [f"{size['active'] / 1e6:.2f} M active per token", notes(run.number)]
    return _tile("Parameters", f"{size['total'] / 1e6:.2f} M", "", note)


def published_rows() -> list[dict[str, str]]:
    """Scores that others published: benchmark, model, score_percent, protocol, source, url."""
    with open(HERE / "published.csv", encoding="utf-8", newline="") as f:
        return list(csv.DictReader(f))


def _published() -> Markup:
    rows = published_rows()
    tables = []
    for source in dict.fromkeys(r["source"] for r in rows):
        of = [r for r in rows if r["source"] == source]
        models = list(dict.fromkeys(r["model"] for r in of))
        kinds = list(dict.fromkeys((r["benchmark"], r["protocol"]) for r in of))
        score = {(r["benchmark"], r["model"]): r["score_percent"] for r in of}
        body = [[b, protocol, *(score.get((b, m), "–") for m in models)] for b, protocol in kinds]
        tables.append(table(["Benchmark", "Protocol", *models], body, f"{source} (percent)"))
        urls = list(dict.fromkeys(r["url"] for r in of))
        tables.append(tag("p", "Source: ", ", ".join(urls), class_="url"))
    intro = (
        "Reported by the models' authors or by others, of base models far larger than a demo's, on other items "
        "and with other prompts. Not measured here, and not to be ranked with the scores above."
    )
    return section("published", SECTIONS["published"], intro, tables)


def _sources(release: Release) -> Markup:
    entries = [(f.number, _result_source(f)) for f in release.found]
    entries += [(r.number, _run_source(r)) for r in release.runs]
    if release.dataset is not None:
        entries.append((release.dataset_number, _dataset_source(release)))
    items = [entry for _, entry in sorted(entries)]
    intro = "Where every number on this page comes from; the small figures beside numbers point here."
    return section("sources", SECTIONS["sources"], intro, tag("ol", items, class_="sources"))


def _source(number: int, title: str, path: str, made: Provenance | None, more: dict[str, Any]) -> Markup:
    facts: dict[str, Any] = {"file": tag("code", path)}
    if made is not None:
        dirty = ", with uncommitted changes" if made.git_dirty else ""
        facts |= {
            "command": tag("code", made.command),
            "commit": f"{made.git_commit or 'not recorded'}{dirty}",
            "time": f"{made.started_at}, {made.duration_s or 0:.0f} s",
            "hardware": ", ".join(f"{k} {v}" for k, v in made.hardware.items() if v not in ([], None)),
            "versions": ", ".join([f"python {made.python}", *(f"{k} {v}" for k, v in made.versions.items())]),
        }
    else:
        facts["command, commit, hardware"] = "not recorded"
    facts |= more
    terms = [tag("div", tag("dt", k), tag("dd", v)) for k, v in facts.items()]
    short = tag("summary", tag("b", f"{number}"), " ", title)
    return tag("li", tag("details", short, tag("dl", terms)), id=f"source-{number}", value=number)


def _result_source(f: Found) -> Markup:
    r = f.result
    settings = ", ".join(f"{k} {v}" for k, v in r.settings.items())
    more = {} if r.kind == "hardware" else {"weights sha256": r.subject_sha256 or "not recorded"}
    more["settings"] = settings
    if r.source != "measured":
        more["taken from"] = r.source
    return _source(f.number, f"{r.kind}: {r.name}, {r.subject}", f.path, r.provenance, more)


def _run_source(r: Run) -> Markup:
    more = {k: r.about.get(k, "not recorded") for k in ("arm", "model_type", "seed", "ranks", "steps", "tokens")}
    more["state"] = "finished" if r.finished else "not finished"
    return _source(r.number, f"training: {r.name}", f"train/{r.name}/log.jsonl, speed.jsonl", r.provenance, more)


def _dataset_source(release: Release) -> Markup:
    more = dict(release.dataset or {})
    return _source(
        release.dataset_number, "data: corpus and n-gram models", "data/dataset.json", release.dataset_provenance, more
    )
