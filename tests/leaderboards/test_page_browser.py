"""The page in a real browser without a network: no console message, everything visible, nothing wider than a phone."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.leaderboards.support import make_release
from zaya.leaderboards.collect import collect
from zaya.leaderboards.page import SECTIONS, render

PROBE = """<!doctype html><body style="margin:0"><pre id="out">not run</pre>
<iframe id="page" src="%s" width="%d" height="900" style="border:0"></iframe>
<script>
document.getElementById("page").onload = (event) => {
  const doc = event.target.contentDocument, view = event.target.contentWindow, width = doc.documentElement.clientWidth;
  const scrolls = (e) => e && (/auto|scroll/.test(view.getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  const shown = [...doc.body.querySelectorAll("*")].filter((e) => e.getClientRects().length && !scrolls(e));
  const outside = (e) => e.getBoundingClientRect().right > width + 1 || e.getBoundingClientRect().left < -1;
  const wide = shown.filter((e) => !e.classList.contains("skip-link") && outside(e))
    .map((e) => e.outerHTML.slice(0, 90));
  const small = shown.filter((e) => e.tagName === "text")
    .map((e) => parseFloat(view.getComputedStyle(e).fontSize) * e.getScreenCTM().a);
  const charts = shown.filter((e) => e.matches("svg.chart"));
  document.getElementById("out").textContent = JSON.stringify({
    width, scrollWidth: doc.documentElement.scrollWidth, wide, smallest: Math.min(...small), charts: charts.length,
    unnamed: charts.filter((e) => !e.getAttribute("aria-label")).length,
    background: view.getComputedStyle(doc.body).backgroundColor, text: doc.body.innerText,
  });
};
</script>"""


def chromium(url: str, *flags: str) -> tuple[str, list[str]]:
    """The page's DOM after its scripts ran, and what it wrote to the console."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert found, "Chromium is missing: apt-get install -y chromium"
    isolated = ["--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking"]
    common = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=4000"]
    done = subprocess.run(
        [found, *common, *isolated, *flags, "--dump-dom", url], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = make_release(tmp_path_factory.mktemp("release"))
    page = render(collect([folder]), "ZAYA demo: a model trained, scored and served on a CPU", 0.7)
    (folder / "index.html").write_text(page, encoding="utf-8")
    return folder


def probe(page: Path, width: int, *flags: str) -> dict:
    """What the browser lays out of `page` in a frame `width` pixels wide."""
    path = page.with_name(f"probe-{width}.html")
    path.write_text(PROBE % (page.as_uri(), width))
    dom, console = chromium(path.as_uri(), "--allow-file-access-from-files", "--window-size=1400,1000", *flags)
    assert console == []
    return json.loads(html.unescape(re.search(r'<pre id="out">(.*?)</pre>', dom, re.S)[1]))


def test_the_page_opens_without_a_console_message_and_shows_every_section(folder):
    dom, console = chromium((folder / "index.html").as_uri())
    assert console == []
    for anchor, name in SECTIONS.items():
        assert re.search(rf'<section id="{anchor}"[^>]*>\s*<h2>{name}</h2>', dom), anchor
    assert "Ready: all 9 checks passed" in dom


@pytest.mark.parametrize("width", [390, 820, 1280])
def test_nothing_is_wider_than_the_screen_and_charts_can_be_read(folder, width):
    seen = probe(folder / "index.html", width)
    assert seen["width"] in (width, width - 15)  # without and with a scroll bar
    assert seen["scrollWidth"] <= seen["width"]
    assert seen["wide"] == []
    assert seen["smallest"] >= 9
    assert seen["charts"] >= 10
    assert seen["unnamed"] == 0
    for found in collect([folder]).of("quality"):
        metric = found.metric(str(found.result.settings["primary"]))
        assert f"{metric.value:.3f}" in seen["text"], found.result.name
    assert "not measured" not in seen["text"]


def test_dark_is_dark(folder):
    light = probe(folder / "index.html", 390)["background"]
    dark = probe(folder / "index.html", 390, "--blink-settings=preferredColorScheme=0")["background"]
    brightness = lambda c: sum(map(int, re.findall(r"\d+", c)[:3]))
    assert brightness(light) > 600
    assert brightness(dark) < 150


def test_the_probe_sees_what_is_too_wide_and_what_scripts_complain_about(tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text('<!doctype html><body><div style="width:700px">wide</div><svg class="chart"><text>x</text></svg>')
    seen = probe(bad, 390)
    assert seen["scrollWidth"] > 390
    assert any("700px" in e for e in seen["wide"])
    bad.write_text("<!doctype html><script>console.error('complaint')</script>")
    assert any("complaint" in line for line in chromium(bad.as_uri())[1])
