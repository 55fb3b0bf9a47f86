"""The pages of reports in a browser: nothing is cut, letters are large enough and have contrast.

Only where playwright and a Chromium are installed.
"""

import pytest

from smallmind.views.report import report
from smallmind.views.report_of_runs import report_of_runs
from tests.views.written import evaluation, final, finish, step, write

# Elements with text of their own that are seen: their size in pixels and contrast (WCAG 2, 1.4.3).
TEXTS = """() => {
  const light = text => {
    const parts = text.match(/[\\d.]+/g).map(Number);
    const [r, g, b] = parts.slice(0, 3).map(x => x / 255).map(
      x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = element => {
    for (let e = element; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (colour !== 'rgba(0, 0, 0, 0)') return colour;
    }
    return 'rgb(255, 255, 255)';
  };
  return [...document.querySelectorAll('body *')].filter(
    e => e.getClientRects().length
      && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())
  ).map(e => {
    const style = getComputedStyle(e);
    const inside = e instanceof SVGElement;
    const scale = inside ? e.getScreenCTM().a : 1;
    const [a, b] = [light(inside ? style.fill : style.color), light(behind(e))];
    const box = e.getBoundingClientRect();
    return {
      text: e.textContent.slice(0, 40), size: parseFloat(style.fontSize) * scale,
      contrast: (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05),
      left: box.left, right: box.right,
    };
  });
}"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of one run and one of several, with names and values that are long."""
    parent, found = tmp_path_factory.mktemp("pages"), []
    for number, name in enumerate(("cats", "a_name_without_a_place_to_break_" * 4, "dogs")):
        records = [step(1), *(x for n in range(10, 101, 10) for x in (step(n), evaluation(n, 2.0)))]
        fields = {"learning_rate": 1e-3 * 2**number, "text": "/a/" + "long" * 30 + ".txt"}
        run = write(parent / name, *records, final(100, 1.9), **fields)
        found.append(finish(run, 100))
        (run / "samples.txt").write_text(f"--- step 100\n{'the cat sat ' * 30}\n{'x' * 300}\n")
        rows = [{"path": ["Forward", "matmul_transpose_a"], "own": 7 * 10**9}]
        (run / "profile.json").write_text(f'{{"rows": {str(rows).replace(chr(39), chr(34))}}}')
    for name, content in (("one", report(found[1])), ("several", report_of_runs(found))):
        (parent / f"{name}.html").write_text(content, encoding="utf-8")
    return parent


@pytest.mark.parametrize("name", ["one", "several"])
@pytest.mark.parametrize(("scheme", "widths"), [("light", (1280, 800, 600, 360)), ("dark", (390,))])
def test_nothing_is_cut_and_everything_can_be_read(pages, browser, name, scheme, widths):
    page = browser.new_page(color_scheme=scheme)
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto((pages / f"{name}.html").as_uri())
    for width in widths:
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") == width
        texts = page.evaluate(TEXTS)
        assert len(texts) > 50
        for text in texts:
            assert text["size"] >= 11, (width, text)
            assert text["contrast"] >= 4.5, (width, text)
            assert text["left"] >= 0 and text["right"] <= width, (width, text)
    assert len(requests) == 1  # the page itself
    page.close()


def test_the_cards_are_in_one_row_or_three_and_three(pages, browser):
    page = browser.new_page()
    page.goto((pages / "one.html").as_uri())
    places = "[...document.querySelectorAll('.figure')].map(e => e.getBoundingClientRect().top)"
    for width, rows in ((1280, 1), (600, 2), (390, 2)):
        page.set_viewport_size({"width": width, "height": 900})
        tops = page.evaluate(places)
        assert [tops.count(top) for top in sorted(set(tops))] == [6 // rows] * rows
    page.close()
