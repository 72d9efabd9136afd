"""The report as a browser shows it: on a phone, in the dark, and in the order in which one wants to know."""

import json
import re
import shutil
import subprocess

import pytest
from support.grids import WINDOW, grid, losses

from rope_patch.eval import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]

# runs in the page, of a window as wide as a phone, and leaves what it found where --dump-dom prints it
MEASURED = """
<iframe width="390" height="800" style="border: 0"></iframe><pre></pre><script>
const frame = document.querySelector("iframe"), page = () => frame.contentDocument;
frame.onload = () => {
  const style = (e) => frame.contentWindow.getComputedStyle(e);
  page().querySelectorAll("details").forEach((e) => (e.open = true));
  const wide = [...page().querySelectorAll("body *")].filter((e) => !e.closest(".wide *") &&
    e.getBoundingClientRect().right > 390);
  document.querySelector("pre").textContent = `${page().documentElement.scrollWidth} wide; outside: ` +
    `${wide.map((e) => e.tagName)}; paper ${style(page().body).backgroundColor}; ink ${style(page().body).color}`;
};
frame.srcdoc = PAGE;
</script>
"""


def in_chromium(file, *options):
    """The page as it stands after loading, and what its console says."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    command += [*options, "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, re.findall(r"CONSOLE.*", done.stderr)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    results = {
        "cliff": {"before": losses(6.0), "after": losses(2.0, within=2.1)},
        "passkey": {
            "before": grid([[1.0] * 10, [0.0] * 10], reply="x" * 300),
            "after": grid([[1.0] * 10, [1.0] * 10], reply="7"),
        },
    }
    settings = {"data": "/a/folder/with/a/long/name/" * 6, "seed": 0}
    title = "an-organisation/a-model-with-a-name-as-long-as-some-have-Instruct, extended to 4,096 positions"
    return write_report(results, tmp_path_factory.mktemp("report"), title=title, settings=settings, window=WINDOW)


def test_what_was_won_comes_first_and_statistics_last(page):
    html, console = in_chromium(page)
    assert console == []
    assert re.findall(r"<h2>(.*?)</h2>", html) == [
        "What was won and what was lost",
        "Before and after",
        "One question, before and after",
        "Pictures",
        "Methods and statistics",
    ]
    targets = re.findall(r'(?:href|src)="(?!data:)#?([^"]*)"', html)
    assert all(f'id="{target}"' in html for target in targets), "a dead link"


@pytest.mark.parametrize(("scheme", "paper", "ink"), [(1, 255, 27), (0, 20, 228)])
def test_a_phone_shows_it_in_light_and_dark_and_only_tables_scroll(page, tmp_path, scheme, paper, ink):
    frame = tmp_path / "frame.html"
    frame.write_text(MEASURED.replace("PAGE", json.dumps(page.read_text()).replace("</", "<\\/")))
    html, console = in_chromium(frame, f"--blink-settings=preferredColorScheme={scheme}")
    found = re.search(r"<pre>(.*?)</pre>", html)[1]
    assert found.startswith("390 wide; outside: ; ") and console == [], found
    assert f"paper rgb({paper}, " in found and f"ink rgb({ink}, " in found
