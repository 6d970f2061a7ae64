"""The checks that the verdict rests on: each passed, failed, undecided or not measured, with its number and bound."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from zaya.leaderboards.collect import CONTROL, Found, Release
from zaya.leaderboards.stats import Difference, compare_accuracy, compare_bits

State = Literal["pass", "fail", "even", "missing"]
LEVEL = 0.05  # two-sided p below which a difference counts


@dataclass(frozen=True)
class Check:
    """One line of the verdict. `notes` are numbers in the list of sources, `section` is where the details are."""

    title: str
    state: State
    says: str
    section: str
    notes: tuple[int, ...] = field(default=())


def run_checks(release: Release, bigram_margin_nats: float) -> list[Check]:
    """Every check of a release, in the page's order."""
    checks = [_stock(release), _vllm(release), _served(release), _bigram(release, bigram_margin_nats)]
    checks.append(_against(release, CONTROL, "Better than the untrained model", even="fail"))
    name = release.baseline
    title = f"Held-out text: no worse than {name}" if name else "Held-out text: no worse than the baseline"
    checks.append(_against(release, name, title, even="even"))
    return [*checks, _experts(release), _speed(release), _same_weights(release)]


def verdict(checks: list[Check]) -> tuple[State, str]:
    """The headline: its state and its words."""
    count = {s: sum(c.state == s for c in checks) for s in ("pass", "fail", "even", "missing")}
    total = len(checks)
    if count["fail"]:
        return "fail", f"Not ready: {count['fail']} of {total} checks failed"
    if count["missing"]:
        return "missing", f"Incomplete: {count['missing']} of {total} checks not measured"
    if count["even"]:
        return "pass", f"Ready: {count['pass']} of {total} checks passed, {count['even']} undecided"
    return "pass", f"Ready: all {total} checks passed"


def compare(release: Release, first: str | None, second: str | None, task: str) -> Difference | None:
    """First minus second on the same items of a task by its primary metric; None when the items are not the same."""
    by = release.scores().get(task, {})
    if first not in by or second not in by:
        return None
    a, b = (release.samples.get(by[name].number) for name in (first, second))
    if not a or not b or a.keys() != b.keys():
        return None
    pairs = [(a[k], b[k]) for k in sorted(a)]
    if "nats" in pairs[0][0]:
        nats = [x["nats"] for x, _ in pairs], [y["nats"] for _, y in pairs]
        return compare_bits(*nats, [x["bytes"] for x, _ in pairs])
    primary = by[first].result.settings.get("primary", "acc")
    clusters = [x["cluster"] for x, _ in pairs] if "cluster" in pairs[0][0] else None
    return compare_accuracy([x[primary] for x, _ in pairs], [y[primary] for _, y in pairs], clusters)


def p_text(p: float) -> str:
    """A p-value as a page shows it."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def signed(value: float) -> str:
    """A difference with its sign, three decimals."""
    return f"{value:+.3f}".replace("-", "−")


def _stock(release: Release) -> Check:
    title, section = "Loads in stock transformers, same numbers", "verification"
    for f in release.of("verify"):
        if f.result.name == "stock-transformers":
            return _agreement(title, f, section, "max_logit_difference", "logits")
    return Check(title, "missing", "not measured", section)


def _vllm(release: Release) -> Check:
    title, section = "vLLM answers as transformers does", "verification"
    for f in _parity(release):
        if f.result.subject == release.ours:
            return _agreement(title, f, section, "max_logprob_difference", "log-probabilities")
    return Check(title, "missing", "not measured", section)


def _parity(release: Release) -> list[Found]:
    return [f for f in release.found if f.metric("max_logprob_difference") and f.metric("equal_tokens")]


def _agreement(title: str, f: Found, section: str, difference: str, what: str) -> Check:
    """Whether a largest difference is within the result's own bound and every greedy token is equal."""
    worst, tokens, bound = f.metric(difference), f.metric("equal_tokens"), f.result.settings.get("atol")
    if worst is None or tokens is None or tokens.n is None or bound is None:
        return Check(title, "missing", "not measured", section, (f.number,))
    good = worst.value <= bound and tokens.value == tokens.n
    says = f"{what} within {worst.value:.1e} (allowed {bound:.0e}), {tokens.value:.0f} of {tokens.n} tokens equal"
    return Check(title, "pass" if good else "fail", says, section, (f.number,))


def _served(release: Release) -> Check:
    title, section = "Serves every request under load", "serving"
    loads = [f for f in release.of("latency") if f.result.subject == release.ours and f.metric("failed_requests")]
    if not loads:
        return Check(title, "missing", "not measured", section)
    failed = sum(f.value("failed_requests") or 0 for f in loads)
    asked = sum(f.metric("failed_requests").n or 0 for f in loads)  # type: ignore[union-attr]
    says = f"{failed:.0f} of {asked} requests failed at {len(loads)} loads"
    return Check(title, "fail" if failed else "pass", says, section, tuple(f.number for f in loads))


def _bigram(release: Release, margin: float) -> Check:
    title, section = f"Held-out loss at least {margin:g} nats below a bigram model", "training"
    run, dataset = release.run(release.ours), release.dataset
    loss = run and run.last("heldout_loss")
    bigram = dataset and dataset.get("bigram_heldout_nats_per_token")
    if run is None or not loss or not bigram:
        return Check(title, "missing", "not measured", section)
    says = f"{loss:.3f} against {bigram:.3f} nats per token: "
    says += f"{abs(bigram - loss):.2f} {'below' if loss < bigram else 'above'}"
    if not run.finished:
        says += "; training has not finished"
    good = bigram - loss >= margin and run.finished
    return Check(title, "pass" if good else "fail", says, section, (run.number, release.dataset_number))


def _against(release: Release, other: str | None, title: str, even: State) -> Check:
    """Bits per byte of held-out text against another model; `even` is the state when neither is better."""
    section = "scores"
    task = next((t for t, by in release.scores().items() if any(f.metric("bits_per_byte") for f in by.values())), None)
    d = compare(release, release.ours, other, task) if task else None
    if task is None or d is None or release.ours is None or other is None:
        return Check(title, "missing", "not measured", section)
    better = d.value < 0
    says = f"{abs(d.value):.3f} bits per byte {'below' if better else 'above'} {other} on the same {d.n} documents"
    says += f" (95 % from {signed(d.low)} to {signed(d.high)}, {p_text(d.p)})"
    state: State = even if d.p >= LEVEL else "pass" if better else "fail"
    by = release.scores()[task]
    return Check(title, state, says, section, (by[release.ours].number, by[other].number))


def _experts(release: Release) -> Check:
    title, section = "Every expert of every layer is in use", "experts"
    run = release.run(release.ours)
    counts = run and run.last("expert_counts")
    if run is None or not counts:
        return Check(title, "missing", "not measured", section)
    idle = list(_idle(counts))
    experts = sum(len(layer) - 1 for layer in counts)
    says = f"{experts - len(idle)} of {experts} experts saw tokens in the last logged step"
    if idle:
        says += "; idle: " + ", ".join(idle[:4]) + (", ..." if len(idle) > 4 else "")
    return Check(title, "fail" if idle else "pass", says, section, (run.number,))


def _idle(counts: list[list[int]]) -> Iterator[str]:
    for layer, row in enumerate(counts):
        yield from (f"layer {layer} expert {e}" for e, n in enumerate(row[:-1]) if n == 0)


def _same_weights(release: Release) -> Check:
    title, section = "Every number is of the same weights", "sources"
    measured = [f for f in release.of("verify", "latency", "quality") if f.result.subject == release.ours]
    digests = {f.result.subject_sha256 for f in measured}
    if len(measured) < 2 or None in digests:
        return Check(title, "missing", "not measured", section)
    many = "one digest" if len(digests) == 1 else f"{len(digests)} digests"
    says = f"{len(measured)} results of {release.ours} name {many}"
    return Check(title, "pass" if len(digests) == 1 else "fail", says, section, tuple(f.number for f in measured))


def _speed(release: Release) -> Check:
    title, section = "Trains no slower than a plain loop over stock's class", "speed"
    for f in release.of("hardware"):
        ratio, ours, rival = f.value("ratio"), f.value("ours_tokens_per_s"), f.value("rival_tokens_per_s")
        if ratio is not None and ours is not None and rival is not None:
            says = f"{ours:,.0f} against {rival:,.0f} tokens/s in one run: {ratio:.2f} times as many"
            return Check(title, "pass" if ratio >= 1 else "fail", says, section, (f.number,))
    return Check(title, "missing", "not measured", section)
