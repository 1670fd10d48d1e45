"""Real pages in a real browser: light and dark, on a screen and on a phone."""

import os
import shutil
from dataclasses import replace

import pytest

from lib.contracts.files import RunFiles
from lib.contracts.tables import Provenance
from lib.report import page
from stages import compare, compile, report
from tests.lib.report.test_page import NIGHT, RUN, subgraph
from tests.stages.conftest import PROVENANCE
from tests.stages.test_compile import QUICK

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
SCREEN, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 740}

# In CI it is to be there: without it, these tests would be left out and nobody would see.
if not os.environ.get("CI"):
    pytest.importorskip("playwright", reason="playwright is not installed")
    if not CHROMIUM:
        pytest.skip("there is no Chromium", allow_module_level=True)


@pytest.fixture(scope="module")
def pages(started, cpu, pool, tmp_path_factory):
    """By name: of the tiny model's run, of that run beside itself, of a night, and of a run with many subgraphs."""
    folder = tmp_path_factory.mktemp("pages")
    files = RunFiles(shutil.copytree(started.run.folder, folder / "tiny_cnn" / "runs" / "run"))
    for path in started.model.folder.glob("*.*"):
        shutil.copy(path, folder / "tiny_cnn")
    files.settings.write_text('{"deciding": {"options": {"families": "core-operator", "seed": 0}}, "limits": {}}')
    past = files.rounds(1)
    compile.run(started.model, started.families, past, cpu, QUICK, pool, provenance=PROVENANCE, out=files.compiled)
    report.run(started.model, started.families, past, files.compiled, "tiny_cnn", provenance=Provenance("d"), out=files)
    recalled = files.recalled
    shutil.copytree(files.round(0).folder, recalled.folder)
    compare.run(files.folder, files.folder, out=folder / "comparison.html")
    (folder / "night.html").write_text(page.night_page(NIGHT, folder), encoding="utf-8")
    many = tuple(subgraph(f"fused_with_a_long_name_{n}", 1, 0.001 / (n + 1), f"family{n % 9}") for n in range(90))
    (folder / "many.html").write_text(page.run_page(replace(RUN, subgraphs=many), folder), encoding="utf-8")
    return {"run": files.page, **{path.stem: path for path in folder.glob("*.html")}}


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    assert CHROMIUM, "there is no Chromium: .ci/run installs one"
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def opened(browser, pages):
    """Opens a page, without a network; at the end it must have asked for nothing else, and complained of nothing."""
    contexts, asked, complaints = [], [], []

    def open_page(name, size=SCREEN, scheme="light"):
        context = browser.new_context(viewport=size, color_scheme=scheme, offline=True)
        contexts.append(context)
        found = context.new_page()
        found.on("request", lambda request: asked.append(request.url))
        found.on("console", lambda message: complaints.append(message.text))
        found.on("pageerror", lambda error: complaints.append(str(error)))
        found.goto(pages[name].as_uri())
        return found

    yield open_page
    for context in contexts:
        context.close()
    assert not [url for url in asked if not url.startswith(("file:", "data:"))]
    assert len(asked) == len([url for url in asked if url.endswith(".html")])
    assert not complaints


NAMES = ("run", "comparison", "night", "many")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [SCREEN, PHONE], ids=["screen", "phone"])
def test_a_page_is_as_wide_as_the_screen(opened, name, size):
    found = opened(name, size)

    assert found.evaluate("document.documentElement.scrollWidth") <= size["width"]


# WCAG 2.2: the contrast of two colours, from what the browser computes.
CONTRASTS = """() => {
  const channel = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const luminance = colour => {
    canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = canvas.getImageData(0, 0, 1, 1).data;
    return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  };
  const behind = element => {
    const found = getComputedStyle(element).backgroundColor;
    return found === "rgba(0, 0, 0, 0)" ? behind(element.parentElement) : found;
  };
  const leaves = [...document.querySelectorAll("p, td, th, dt, dd, a, b, h1, h2, summary, pre, .treemap span, text")];
  return leaves.filter(e => e.textContent.trim()).map(e => {
    const style = getComputedStyle(e);
    const ink = e.tagName === "text" && style.fill !== "none" ? style.fill : style.color;
    const [a, b] = [luminance(ink), luminance(behind(e))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), e.textContent.trim().slice(0, 40)];
  });
}"""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_can_be_read(opened, name, scheme):
    contrasts = opened(name, scheme=scheme).evaluate(CONTRASTS)

    assert len(contrasts) > 20
    assert not [told for told in contrasts if told[0] < 4.5]


def test_dark_is_dark_and_light_is_light(opened):
    colours = [
        opened("run", scheme=scheme).evaluate("getComputedStyle(document.body).backgroundColor")
        for scheme in ("light", "dark")
    ]

    assert colours[0] == "rgb(255, 255, 255)"
    assert max(int(value) for value in colours[1].removeprefix("rgb(").rstrip(")").split(",")) < 60


@pytest.mark.parametrize("name", ["run", "many"])
@pytest.mark.parametrize("size", [SCREEN, PHONE], ids=["screen", "phone"])
def test_boxes_fill_the_treemap_and_a_touch_unfolds_their_subgraph(opened, name, size):
    found = opened(name, size)
    frame = found.locator(".treemap").bounding_box()
    boxes = [box.bounding_box() for box in found.locator(".treemap a").all()]
    first = found.locator(".treemap a").first
    details = found.locator(first.get_attribute("href").replace("#", "details#"))
    folded = details.get_attribute("open") is None

    first.click()
    found.wait_for_function("document.querySelector('details[open]')")

    assert sum(box["width"] * box["height"] for box in boxes) == pytest.approx(
        frame["width"] * frame["height"], rel=0.02
    )
    assert folded
    assert details.locator("pre").first.is_visible() or "untuned" in details.inner_text()
    assert abs(details.bounding_box()["y"]) < 100  # at the top of the window


def test_labels_stay_inside_of_their_boxes(opened):
    outside = opened("many").evaluate("""() => [...document.querySelectorAll(".treemap a")].filter(box => {
        const share = box.querySelector(".share"), inner = share.getBoundingClientRect();
        if (getComputedStyle(share).display === "none") return false;
        const range = document.createRange(); range.selectNodeContents(share);
        const [text, outer] = [range.getBoundingClientRect(), box.getBoundingClientRect()];
        return text.right > outer.right + 0.5 || text.bottom > outer.bottom + 0.5;
    }).map(box => box.title)""")

    assert not outside


def test_curves_can_be_read_on_a_phone(opened):
    sizes = opened("run", PHONE).evaluate(
        "[...document.querySelectorAll('.curve text')].map(t => t.getBoundingClientRect().height)"
    )

    assert len(sizes) > 10
    assert min(sizes) >= 8


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_small(pages, name):
    assert 5_000 < pages[name].stat().st_size < 3e6
