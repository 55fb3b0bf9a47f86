"""The page in a browser: talking, seeing, watching; servers that go; a phone; a screen reader.

Only where playwright and a Chromium are installed.
"""

import contextlib
import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from smallmind.writing.decoder import Decoder
from tests.programs import PATIENCE
from tests.runs.small import create
from tests.serve.conftest import saved_model, serving

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect
expect.set_options(timeout=1000 * PATIENCE)
LONG = 4000  # tokens of an answer that is still being written when something happens
STEP = 0.005  # seconds more that a token takes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs that have ended, one of them with a name that is HTML."""
    folder = tmp_path_factory.mktemp("page") / "runs"
    for name in ("cats", "<b>dogs"):
        create(folder / name).train(progress=False)
    return folder


@pytest.fixture(scope="module")
def served(models, folder):
    step = Decoder.step
    with pytest.MonkeyPatch.context() as patch:
        # A small model would have written LONG tokens before anything else happens.
        patch.setattr(Decoder, "step", lambda decoder: time.sleep(STEP) or step(decoder))
        with serving(models, folder=folder, slots=4) as (address, _):
            yield address


@pytest.fixture
def shown(browser, served):
    """Pages at an address; nothing may have been said in their console."""
    with contextlib.ExitStack() as stack:
        complaints = []

        def show(address=served, width=1280, **options):
            viewport = {"width": width, "height": 900}
            context = browser.new_context(viewport=viewport, **options)
            stack.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(1000 * PATIENCE)
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("console", lambda said: complaints.append(said.text))
            page.complaints = complaints
            page.goto(address)
            page.wait_for_selector("#model option", state="attached")
            return page

        yield show
        assert complaints == []


def use(page, model, **settings):
    page.select_option("#model", model)
    page.locator("#settings").evaluate("details => details.open = true")
    for name, value in settings.items():
        page.fill(f"#settings [name={name}]", str(value))


def send(page, text):
    page.fill("#input", text)
    page.press("#input", "Enter")


def said(page, index=-1):
    return page.locator(".answer .said").nth(index)


def wait_for_end(page):
    expect(page.locator("#send")).to_be_visible()


def wait_for_text(page):
    expect(said(page)).to_have_text(re.compile(".{5}"))


def test_a_beginning_is_continued_and_an_edited_one_again(shown):
    page = shown()
    use(page, "text", max_tokens=20, seed=3, temperature=1)
    send(page, "The quick")
    wait_for_end(page)
    first = said(page).text_content()
    assert len(first) == 20 and "20 tokens" in page.text_content("#status")
    assert page.text_content("#announced") == first  # screen readers read it when it is complete
    page.get_by_role("button", name="Edit this message").click()
    page.keyboard.press("Escape")
    assert page.locator(".turn").count() == 2 and said(page).text_content() == first
    page.get_by_role("button", name="Edit this message").click()
    page.locator(".turn textarea").fill("The quick")
    page.keyboard.press("Enter")
    wait_for_end(page)
    assert page.locator(".turn").count() == 2 and said(page).text_content() == first


def test_shift_enter_begins_a_line(shown):
    page = shown()
    page.focus("#input")
    page.keyboard.type("a")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("b")
    assert page.input_value("#input") == "a\nb" and page.locator(".turn").count() == 0


ABOVE = """document.querySelector('#composer').getBoundingClientRect().top
    - [...document.querySelectorAll('.answer .actions')].at(-1).getBoundingClientRect().bottom"""


def test_an_answer_is_in_view_when_it_has_ended(shown):
    page = shown()
    page.set_viewport_size({"width": 390, "height": 600})
    use(page, "chat", max_tokens=30, seed=1)
    page.locator("#settings").evaluate("details => details.open = false")
    for _ in range(3):
        send(page, "The fox?")
        wait_for_end(page)
        assert page.evaluate(ABOVE) >= 0
    tops = page.locator("#composer button:visible").evaluate_all("all => all.map(x => x.offsetTop)")
    assert max(tops) - min(tops) < 20  # in one row
    send(page, "/no_think")
    assert "without thinking" in page.text_content("#status")
    assert page.locator(".turn").count() == 6


def test_a_conversation_has_several_answers_of_which_one_is_kept(shown):
    page = shown()
    use(page, "chat", max_tokens=10, n=2, temperature=1, system="QA")
    send(page, "fox")
    wait_for_end(page)
    texts = page.locator(".answer .said").all_text_contents()
    assert len(texts) == 2 and texts[0] != texts[1]
    page.get_by_role("button", name="Continue the conversation from answer 2").click()
    with page.expect_request("**/v1/chat/completions") as request:
        send(page, "dog")
    assert request.value.post_data_json["messages"] == [
        {"role": "system", "content": "QA"},
        {"role": "user", "content": "fox"},
        {"role": "assistant", "content": texts[1]},
        {"role": "user", "content": "dog"},
    ]
    wait_for_end(page)


@pytest.mark.parametrize("how", ["the button", "Escape"])
def test_an_answer_is_stopped_and_goes_on(shown, how):
    page = shown()
    use(page, "text", max_tokens=LONG)
    send(page, "The quick")
    wait_for_text(page)
    if how == "Escape":
        page.keyboard.press("Escape")
    else:
        page.click("#stop")
    wait_for_end(page)
    assert page.text_content("#status") == "Stopped."
    before = said(page).text_content()
    assert 0 < len(before) < LONG
    page.fill("#settings [name=max_tokens]", "5")
    page.get_by_role("button", name="Continue this answer").click()
    wait_for_end(page)
    assert said(page).text_content().startswith(before) and len(said(page).text_content()) > len(
        before
    )


def test_a_refresh_in_mid_answer_keeps_what_was_there(shown):
    page = shown()
    use(page, "text", max_tokens=LONG)
    send(page, "The quick")
    wait_for_text(page)
    page.fill("#input", "a draft")
    page.reload()
    wait_for_text(page)
    before = said(page).text_content()
    assert page.text_content(".turn.user .said") == "The quick"
    assert page.input_value("#input") == "a draft"
    assert page.input_value("#model") == "text"
    assert page.input_value("#settings [name=max_tokens]") == str(LONG)
    page.locator("#settings").evaluate("details => details.open = true")
    page.fill("#settings [name=max_tokens]", "5")
    page.get_by_role("button", name="Continue this answer").click()
    wait_for_end(page)
    assert said(page).text_content().startswith(before) and len(said(page).text_content()) > len(
        before
    )


def test_a_conversation_is_saved_and_loaded(shown, tmp_path):
    page = shown()
    use(page, "chat", max_tokens=8, system="QA")
    send(page, "fox")
    wait_for_end(page)
    with page.expect_download() as download:
        page.click("#save")
    path = tmp_path / "conversation.json"
    download.value.save_as(path)
    text = said(page).text_content()
    assert json.loads(path.read_text())["messages"][1] == {"role": "assistant", "content": text}
    page.click("#new")
    page.fill("#settings [name=system]", "")
    assert page.locator(".turn").count() == 0
    page.set_input_files("#file", path)
    expect(page.locator(".turn")).to_have_count(2)
    assert said(page).text_content() == text and page.input_value("[name=system]") == "QA"
    assert page.locator(".who").first.text_content() == "You"


TURN = {"role": "user", "text": "kept"}


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("{", "it is not JSON"),
        ("null", "it has no list of turns"),
        ("3", "it has no list of turns"),
        ('{"turns": {}}', "it has no list of turns"),
        (json.dumps([TURN, None]), "turn 2 has neither the role user nor assistant"),
        (json.dumps([{"role": "user", "text": 3}]), "turn 1 has no text"),
        (json.dumps([TURN, {"role": "assistant", "answers": []}]), "turn 2 has no answers"),
        (json.dumps([TURN, {"role": "assistant", "answers": [None]}]), "turn 2 has no text"),
    ],
)
def test_a_file_that_is_no_conversation_is_refused_in_a_line(shown, tmp_path, content, line):
    page = shown()
    path = tmp_path / "bad.json"
    path.write_text(content)
    page.set_input_files("#file", path)
    expect(page.locator("#status")).to_have_text(f"bad.json cannot be loaded: {line}.")
    assert page.locator(".turn").count() == 0


def test_tokens_that_are_none_are_left_out_of_a_loaded_conversation(shown, tmp_path):
    page = shown()
    bad = [{"id": 1, "text": "x", "logprob": "?", "entropy": 0, "top": []}, 7, {"id": 1}]
    answer = {"text": "<img src=x onerror=alert(1)>", "tokens": bad}
    path = tmp_path / "odd.json"
    path.write_text(json.dumps({"turns": [TURN, {"role": "assistant", "answers": [answer]}]}))
    page.set_input_files("#file", path)
    expect(said(page)).to_have_text(answer["text"])  # as text
    assert page.get_by_role("button", name="See the probabilities").count() == 0


@pytest.mark.parametrize("model", ["text", "chat"])
def test_a_text_continues_from_another_token(shown, model):
    page = shown()
    use(page, model, max_tokens=12, temperature=1, seed=1)
    send(page, "fox")
    wait_for_end(page)
    before = said(page).text_content()
    page.get_by_role("button", name="See the probabilities").click()
    page.wait_for_selector(".token.given")  # what the answer was written after
    own = page.locator(".token:not(.given)")
    assert "".join(own.all_text_contents()).replace("↵\n", "\n") == before
    own.nth(4).focus()
    page.keyboard.press("Enter")
    rows = page.locator("#chosen .others li")
    assert rows.count() in (10, 11)  # its own token, if that is not among them
    shares = [float(x.strip(" %<")) for x in page.locator("#chosen .amount").all_text_contents()]
    assert shares == sorted(shares, reverse=True) and sum(shares) < 101
    other = page.locator("#chosen .others li:not(.mine)").first
    text = other.locator("code").text_content().replace("␣", " ").replace("↵", "\n")
    other.get_by_role("button").click()
    wait_for_end(page)
    assert page.get_attribute("#tab-talk", "aria-selected") == "true"
    after = said(page).text_content()
    assert after.startswith(before[:4] + text) and len(after) > 4


def test_a_text_is_measured_and_a_head_shows_where_it_looks(shown):
    page = shown()
    use(page, "text")
    page.click("#tab-see")
    page.fill("#text", "The quick\nfox")
    page.click("#measure button")
    expect(page.locator("#measured")).to_contain_text("nats per token")
    tokens = page.locator(".token")
    assert "".join(tokens.all_text_contents()).startswith("The quick↵\n")
    assert re.search(r"h, [<\d.]+%", tokens.nth(1).get_attribute("aria-label"))
    assert page.locator("#entropies rect").count() == tokens.count()
    titles = tokens.evaluate_all("tokens => tokens.slice(1).map(t => t.title)")
    losses = [float(title.rpartition(" ")[2]) for title in titles]
    (chosen,) = tokens.evaluate_all(
        "all => all.flatMap((t, i) => t.ariaSelected === 'true' ? i : [])"
    )
    assert losses[chosen - 1] == max(losses) and page.locator("#chosen li.mine").count() == 1
    page.check("#attends")
    page.select_option("#layer", "1")
    page.select_option("#head", "3")
    with page.expect_response("**/api/attention") as response:
        tokens.nth(5).hover()
    weights = response.value.json()["weights"][5]
    expect(page.locator(".token.attended")).to_have_count(6)
    colours = tokens.evaluate_all("tokens => tokens.map(t => t.style.getPropertyValue('--weight'))")
    assert colours[:6] == [f"{int(80 * weight + 0.5)}%" for weight in weights]
    page.hover("h1")
    expect(page.locator(".token.attended")).to_have_count(0)


def test_a_text_longer_than_the_model_sees_is_refused_in_a_line(shown):
    page = shown()
    use(page, "text")
    page.click("#tab-see")
    page.fill("#text", "fox " * 40)
    page.click("#measure button")
    expect(page.locator("#measured")).to_contain_text("give 1 to 64")
    assert "400" in page.complaints.pop()  # Chromium notes the status of the answer


def test_runs_are_watched_and_talked_to(shown, folder):
    page = shown()
    page.click("#tab-watch")
    page.locator("#runs button", has_text="cats").click()
    expect(page.locator("#course h3").first).to_have_text("cats")
    chart = page.locator("#course svg.chart.wide")
    expect(chart).to_be_visible()
    labels = chart.locator("text").all_text_contents()
    assert "loss (nats per token)" in labels and {"0", "steps"} <= set(labels)
    page.locator("#course summary").click()
    report = page.frame_locator("#course iframe")
    expect(report.locator("h1")).to_contain_text("cats")
    button = page.locator("#runs button", has_text="cats")
    button.focus()
    # A run that goes on is shown as it is now; the report and the focus stay.
    with (folder / "cats" / "samples.txt").open("a") as file:
        file.write("--- step 999\n<i>a new sample</i>\n")
    expect(page.locator("#course pre").first).to_have_text("<i>a new sample</i>")
    expect(button).to_be_focused()
    expect(report.locator("h1")).to_contain_text("cats")
    page.get_by_role("button", name="Talk to cats").click()
    assert page.input_value("#model") == "cats"
    assert page.locator("#talk").is_visible()


def test_a_phone_begins_with_the_run_that_was_chosen_and_has_a_list_of_the_others(shown, folder):
    page = shown(width=390)
    page.click("#tab-watch")
    expect(page.locator("#run option")).to_have_count(len(list(folder.iterdir())))
    assert page.locator("#runs").is_hidden()
    page.select_option("#run", "cats")
    expect(page.locator("#course h3").first).to_have_text("cats")
    assert page.locator("#course h3").first.bounding_box()["y"] < 300
    expect(page.locator("#course svg.chart.narrow")).to_be_visible()


def test_the_composer_is_at_the_bottom_with_and_without_a_conversation(shown):
    page = shown()
    use(page, "chat", max_tokens=30, seed=1)
    page.locator("#settings").evaluate("details => details.open = false")
    below = "innerHeight - document.querySelector('#composer').getBoundingClientRect().bottom"
    assert 0 <= page.evaluate(below) < 60
    for _ in range(8):
        send(page, "The fox?")
        wait_for_end(page)
    page.evaluate("scrollTo(0, 0)")
    assert 0 <= page.evaluate(below) < 60


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextlib.contextmanager
def program(port, *words):
    command = [sys.executable, "-m", "smallmind", "serve", *map(str, words), "--no-browser"]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*command, "--port", str(port)], **silent) as process:
        try:
            while True:
                assert process.poll() is None
                with contextlib.suppress(urllib.error.URLError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).close()
                    break
                time.sleep(0.05)
            yield process
        finally:
            process.kill()


def test_a_server_dies_in_mid_answer_and_comes_back(shown, tmp_path):
    model, port = saved_model(tmp_path / "text.safetensors"), free_port()
    with program(port, model) as process:
        page = shown(f"http://127.0.0.1:{port}/")
        use(page, "text", max_tokens=LONG)
        send(page, "The quick")
        wait_for_text(page)
        process.kill()
        wait_for_end(page)
    banner = page.locator("#banner")
    expect(banner).to_have_text(re.compile("The server .*Trying again"))
    before = said(page).text_content()
    with program(port, model):
        expect(banner).to_be_hidden()
        page.fill("#settings [name=max_tokens]", "5")
        page.get_by_role("button", name="Continue this answer").click()
        wait_for_end(page)
        assert said(page).text_content().startswith(before)
        assert len(said(page).text_content()) > len(before)
    # Chromium itself notes requests that were not answered.
    assert all("net::ERR" in line for line in page.complaints)
    page.complaints.clear()


def test_a_token_is_asked_for_and_taken_from_the_address(shown, models, folder):
    with serving(models, folder=folder, token="a/c") as (address, _):
        page = shown(f"{address}/#token=a%2Fc")
        assert "token" not in page.url and page.locator("#token-form").is_hidden()
        page.reload()
        page.wait_for_selector("#model option", state="attached")
        page.click("#tab-watch")
        page.locator("#course summary").click()
        expect(page.frame_locator("#course iframe").locator("h1")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_every_part_fits_and_is_accessible(shown, scheme, width):
    page = shown(width=width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    use(page, "text", max_tokens=60, n=2, temperature=1)
    send(page, "x" * 60)
    wait_for_end(page)
    check(page)
    page.get_by_role("button", name="See the probabilities").first.click()
    page.wait_for_selector(".token.given")
    for kind in (":not(.given)", ".given"):
        page.locator(f".token{kind}").nth(3).press("Enter")
        check(page)
    page.keyboard.press("Escape")  # closes what covers a part of a phone's screen
    assert page.locator("#chosen.open").count() == 0
    page.click("#tab-watch")
    page.wait_for_selector("#course dl")
    check(page)
    other = {"light": "dark", "dark": "light"}[scheme]
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == other
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == other
    check(page)


def check(page):
    """Nothing is wider than the page, and a checker of accessibility finds nothing."""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    axe = pytest.importorskip("axe_playwright_python")
    if not page.evaluate("'axe' in window"):
        page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    found = page.evaluate("axe.run()")["violations"]
    seen = [(each["id"], [node["html"][:120] for node in each["nodes"]][:3]) for each in found]
    assert seen == []
