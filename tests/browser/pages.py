"""What users do with the server's page, in Chromium: python pages.py SCENARIO URL [FOLDER].

It runs in the environment of `make conformance`, by Playwright. Each scenario fails with an assertion, or prints "ok".
"""

import contextlib
import json
import re
import shutil
import sys
import threading
import urllib.request
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

KEY = "secret"
SURE = 120_000  # milliseconds: first requests compile
TOOLS = [{"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]
EXPECTED = re.compile(
    r"Failed to load resource: (the server responded with a status of 4|net::ERR_INTERNET_DISCONNECTED)"
    r"|This document requires 'TrustedHTML' assignment"
)
"""What a browser says of answers that are errors, which the page shows, and of HTML that `html` tries to write."""


@contextlib.contextmanager
def opened(url, tab="chat", key=KEY, width=1280, height=800, **options):
    """The page in a new browser; no message in its console may be an error."""
    said = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(SURE)
        expect.set_options(timeout=SURE)
        if key is not None:
            context.add_init_script(
                f"sessionStorage.getItem('jaxinfer.key') ?? sessionStorage.setItem('jaxinfer.key', '{key}')"
            )
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(f"{url}/#/{tab}")
        yield page
        browser.close()
    assert [text for text in said if not EXPECTED.match(text)] == []


def choose(page, model, tab="chat"):
    page.locator(f"#{tab} .model-select").select_option(model)


def ask(page, text, model="assistant"):
    """Send a message, and wait for the end of the answer; returns the last one."""
    choose(page, model)
    page.fill("#message", text)
    page.press("#message", "Enter")
    return wait(page)


def wait(page):
    expect(page.locator("#messages > .growing")).to_have_count(0)
    expect(page.locator("#send")).to_have_attribute("aria-label", "Send")
    return page.locator(".turn.assistant").last


def set_field(page, name, text):
    page.locator(f'#settings [name="{name}"]').fill(text)


def post(url, path, body):
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(url + path, json.dumps(body).encode(), headers), timeout=300)


def chat(url):
    with opened(url) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        answer = ask(page, "How much memory\ndoes a KV cache take?")
        expect(page.locator(".turn.user")).to_contain_text("How much memory")
        expect(answer.locator(".content strong").first).to_have_text("key")
        expect(answer.locator(".content .item")).to_have_count(3)
        expect(answer.locator("figure pre")).to_contain_text("return 2 * layers")
        assert re.search(
            r"assistant · \d+ tokens · (\d+ tokens/s · )?first after [\d.]+ s", answer.locator(".meta").inner_text()
        )

        thoughts = answer.locator(".reasoned")
        expect(thoughts).to_be_hidden()
        answer.locator("summary").click()
        expect(thoughts).to_contain_text("keys and values")

        answer.get_by_role("button", name="Copy").last.click()
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied.startswith("Each token keeps a **key**"), copied
        answer.get_by_role("button", name="Again").click()
        expect(wait(page).locator("figure pre")).to_contain_text("return 2 * layers")
        expect(page.locator(".turn")).to_have_count(2)

        page.locator(".turn.user").hover()
        page.locator(".turn.user").get_by_role("button", name="Edit").click()
        page.get_by_label("Edit the message").fill("And of two models?")
        page.keyboard.press("Enter")
        expect(page.locator(".bubble")).to_have_text("And of two models?")
        wait(page)
        expect(page.locator(".turn")).to_have_count(2)
        page.click("#new-chat")
        expect(page.locator(".turn")).to_have_count(0)
        expect(page.locator("#message")).to_be_focused()


def tools(url):
    with opened(url) as page:
        set_field(page, "tools", "[{")
        page.fill("#message", "Is it raining?")
        page.press("#message", "Enter")
        expect(page.locator("#tools-problem")).to_contain_text("not JSON")
        page.click("#new-chat")
        set_field(page, "tools", json.dumps(TOOLS))
        ask(page, "How much memory?")
        answer = ask(page, "Is it raining in Rome?")
        expect(answer.locator(".call code")).to_have_text("weather")
        assert json.loads(answer.locator(".call pre").inner_text()) == {"city": "Rome"}
        field = page.get_by_label("Result of weather")
        expect(field).to_be_focused()
        field.fill("rain, 14 degrees")
        page.get_by_role("button", name="Send result").click()
        last = wait(page)
        expect(last.locator(".content")).to_have_text("It rains in Rome, at 14 degrees. Take an umbrella.")
        expect(page.locator(".turn.tool pre")).to_have_text("rain, 14 degrees")


def html(url):
    """The model's text and the user's are texts, and never HTML."""
    own = '<img src=x onerror="window.ran=4"><b>bold</b>'
    with opened(url) as page:
        set_field(page, "tools", json.dumps(TOOLS))
        ask(page, "One")
        ask(page, "Two")
        page.get_by_label("Result of weather").fill(own)
        page.get_by_role("button", name="Send result").click()
        wait(page)
        answer = ask(page, own)
        expect(answer.locator(".content")).to_contain_text(
            '<img src=x onerror="window.ran=1"><script>window.ran=2</script>'
        )
        expect(page.locator(".bubble").last).to_have_text(own)
        assert page.evaluate("window.ran") is None
        assert page.locator("#messages :is(img, script, a, b:not(.mark))").count() == 0
        refused = page.evaluate(
            "() => { try { document.body.innerHTML = '<p>'; } catch (error) { return error.name; } }"
        )
        assert refused == "TypeError"


def stop(url):
    with opened(url) as page:
        choose(page, "endless")
        page.fill("#message", "Go on")
        page.press("#message", "Enter")
        expect(page.locator("#send")).to_have_attribute("aria-label", "Stop")
        expect(page.locator(".growing .content")).not_to_be_empty()
        page.keyboard.press("Escape")
        answer = wait(page)
        expect(answer.locator(".meta")).to_contain_text("stopped")
        page.wait_for_function(
            "async () => /jaxinfer_requests_running{model=\"endless\"} 0/.test(await (await fetch('metrics')).text())"
        )


def completion(url):
    begin = "def main():\n"
    with opened(url) as page:
        ask(page, begin.strip(), "demo_model")
        expect(page.locator(".error")).to_contain_text("demo_model has no chat template")
        page.get_by_role("button", name="Open in Completion").click()
        expect(page.locator("#prompt")).to_have_value(begin.strip())
        page.fill("#prompt", begin)
        page.keyboard.press("Control+Enter")
        expect(page.locator("#completion-meta")).to_contain_text(
            re.compile(r"128 tokens · [\d.k]+ tokens/s · first after")
        )
        text = page.input_value("#prompt")
        assert text.startswith(begin)
        assert page.locator(".mirror mark").inner_text() == text[len(begin) :]
        page.click("#continue")
        expect(page.locator("#continue")).to_have_text("Stop")
        expect(page.locator("#continue")).to_have_text("Continue")
        assert page.input_value("#prompt").startswith(text)
        page.click("#undo")
        expect(page.locator("#prompt")).to_have_value(text)
        page.click("#undo")
        expect(page.locator("#prompt")).to_have_value(begin)


def errors(url):
    """The server's own words, in place; a refusal says when to try again."""
    with opened(url) as page:
        set_field(page, "temperature", "-1")
        ask(page, "Hello")
        expect(page.locator("#messages > .error")).to_contain_text("temperature must be")
        set_field(page, "temperature", "")
        page.get_by_role("button", name="Try again").click()
        expect(wait(page).locator(".content strong").first).to_have_text("key")
        expect(page.locator(".error")).to_have_count(0)

        page.evaluate("document.querySelector('#chat .model-select').append(new Option('gone', 'gone'))")
        ask(page, "Hello", "gone")
        expect(page.locator(".error")).to_contain_text("gone")

        body = {"model": "endless", "prompt": "a", "max_tokens": 4000, "n": 8, "stream": True}
        running = post(url, "/v1/completions", body)
        ask(page, "Hello", "endless")
        expect(page.locator(".error .wait")).to_have_text(re.compile(r"try again in \d+ s"))
        running.close()
        expect(page.locator(".error .wait")).to_have_text("")
        page.get_by_role("button", name="Try again").click()
        expect(page.locator(".growing .content")).not_to_be_empty()
        expect(page.locator(".error")).to_have_count(0)
        page.click("#send")
        wait(page)


def key(url):
    with opened(url, key=None) as page:
        dialog = page.locator("#key-dialog")
        expect(dialog).to_be_visible()
        expect(page.locator("#key")).to_be_focused()
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key-problem")).to_be_visible()
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        expect(page.locator("#chat .model-select")).to_have_value("assistant")
        ask(page, "Hello")
        assert KEY not in page.url
        assert page.evaluate("JSON.stringify(localStorage)").count(KEY) == 0
        page.reload()
        expect(page.locator("#chat .model-select")).to_have_value("assistant")
        expect(dialog).to_be_hidden()
        page.click("#key-button")
        expect(page.locator("#key-problem")).to_be_hidden()
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()


def keyboard(url):
    """All without a mouse; what has the focus can be seen."""
    with opened(url) as page:
        expect(page.locator("#message")).to_be_focused()
        expect(page.locator("#chat .model-select")).to_have_value("assistant")
        page.keyboard.type("One")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        expect(page.locator("#message")).to_have_value("One\ntwo")
        page.keyboard.press("Enter")
        expect(wait(page).locator(".content")).not_to_be_empty()

        page.locator("#tab-chat").focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#tab-completion")).to_be_focused()
        expect(page.locator("#completion")).to_be_visible()
        expect(page.locator("#chat")).to_be_hidden()
        page.keyboard.press("End")
        expect(page.locator("#tab-server")).to_have_attribute("aria-selected", "true")
        page.keyboard.press("Home")
        expect(page.locator("#chat")).to_be_visible()

        names = []
        for _ in range(80):
            page.keyboard.press("Tab")
            name, outline = page.evaluate(
                """() => {
                  const node = document.activeElement;
                  const outlined = getComputedStyle(node).outlineStyle !== "none";
                  const framed = node.closest(".composer") !== null;  // which shows the focus of its field
                  return [node.id || node.name || node.tagName, outlined || framed];
                }"""
            )
            if name == "BODY":
                break
            assert outline, name
            names.append(name)
        order = ["key-button", "theme-button", "new-chat", "message", "system", "set-temperature", "tools"]
        places = [names.index(name) for name in order]
        assert places == sorted(places), names


def phone(url):
    options = {"width": 360, "height": 700, "is_mobile": True, "has_touch": True}
    with opened(url, **options) as page:

        def fits():
            wide = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
            assert wide == [360, 360], wide

        fits()
        answer = ask(page, "x" * 200)
        fits()
        expect(answer.locator("figure pre")).to_be_visible()
        page.locator("#chat .settings-button").tap()
        expect(page.locator("#settings .close")).to_be_focused()
        fits()
        page.locator("#settings .close").tap()
        expect(page.locator("#settings form")).to_be_hidden()
        for tab in ("completion", "server"):
            page.tap(f"#tab-{tab}")
            expect(page.locator(f"#{tab}")).to_be_visible()
            page.wait_for_timeout(1500)
            fits()


CONTRAST = """() => {
  const probe = document.body.appendChild(document.createElement("i"));
  const channel = (value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const luminance = (name) => {
    probe.style.color = `var(--${name})`;
    const [r, g, b] = getComputedStyle(probe).color.match(/[\\d.]+/g).map((part) => channel(part / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const pairs = {};
  const compare = (ink, ground) => {
    const [a, b] = [luminance(ink), luminance(ground)].sort((a, b) => b - a);
    pairs[`${ink} on ${ground}`] = (a + 0.05) / (b + 0.05);
  };
  for (const ink of ["ink", "muted"]) {
    for (const ground of ["ground", "surface", "raised", "tint"]) compare(ink, ground);
  }
  for (const ground of ["ground", "surface", "tint"]) compare("accent", ground);
  compare("on-accent", "accent");
  compare("bad", "bad-tint");
  compare("bad", "surface");
  for (const line of ["c0", "c1", "c2", "c3", "c4", "c5", "field-edge"]) compare(line, "surface");
  probe.remove();
  return pairs;
}"""


def themes(url):
    """Light, dark, and the user's choice; contrasts of WCAG's AA: 4.5 for text, 3 for lines."""

    def check(page, dark):
        ground = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert (int(re.search(r"\d+", ground)[0]) < 60) == dark, ground
        low = {
            pair: contrast
            for pair, contrast in page.evaluate(CONTRAST).items()
            if contrast < (3 if re.match(r"c\d|field", pair) else 4.5)
        }
        assert low == {}

    for dark in (False, True):
        with opened(url, color_scheme="dark" if dark else "light", reduced_motion="reduce") as page:
            check(page, dark)
            page.click("#theme-button")
            check(page, not dark)
            page.reload()
            check(page, not dark)
            choose(page, "endless")
            page.fill("#message", "Go on")
            page.press("#message", "Enter")
            page.wait_for_selector(".growing")
            assert page.evaluate("document.getAnimations().length") == 0
            page.keyboard.press("Escape")
            wait(page)


def charts(url):
    with opened(url, tab="server") as page:
        card = page.locator(".chart", has_text="Tokens per second")
        expect(card.locator("polyline")).to_have_count(2)
        before = card.locator("polyline").first.get_attribute("points")
        writing = threading.Thread(
            target=lambda: post(url, "/v1/completions", {"model": "endless", "prompt": "a", "max_tokens": 3000}).read()
        )
        writing.start()
        generated = card.locator("li", has_text="generated").locator("b")
        expect(generated).to_have_text(re.compile(r"[1-9]"))
        writing.join()
        points = card.locator("polyline").first.get_attribute("points")
        assert len(points.split()) > len(before.split())
        heights = {float(point.split(",")[1]) for point in points.split()}
        assert len(heights) > 1
        assert "generated" in card.locator("svg").get_attribute("aria-label")
        expect(page.locator(".models li")).to_have_count(3)
        expect(page.locator(".models .tag").first).to_have_text("loaded")
        page.click("#tab-chat")
        page.wait_for_timeout(300)
        count = page.evaluate("performance.getEntriesByName(new URL('metrics', location).href).length")
        page.wait_for_timeout(2500)
        assert count == page.evaluate("performance.getEntriesByName(new URL('metrics', location).href).length")


def offline(url):
    with opened(url) as page:
        expect(page.locator("#chat .model-select")).to_have_value("assistant")
        page.context.set_offline(True)
        ask(page, "Hello")
        expect(page.locator("#notice")).to_contain_text("cannot be reached")
        expect(page.locator("#messages > .error")).to_contain_text("cannot be reached")
        page.context.set_offline(False)
        expect(page.locator("#notice")).to_be_hidden()
        page.get_by_role("button", name="Try again").click()
        expect(wait(page).locator(".content")).not_to_be_empty()


def images(url, board):
    """Images for experts, by the button and by a drop, where the server has experts."""
    with opened(url, tab="images") as page:
        expect(page.locator("#image-target")).to_contain_text("board")
        page.set_input_files("#image-file", board)
        expect(page.locator(".verdict b")).not_to_be_empty()
        expect(page.locator(".stages > li").first).to_contain_text("computed")
        expect(page.locator(".stages .fill").first).to_be_visible()
        assert page.evaluate("document.querySelector('canvas').width") > 0
        page.evaluate("document.querySelector('.results').replaceChildren()")
        page.get_by_role("button", name="Run again").click()
        expect(page.locator(".verdict b")).not_to_be_empty()
        page.set_input_files("#image-file", {"name": "a.png", "mimeType": "image/png", "buffer": b"none"})
        expect(page.locator(".results .error")).to_contain_text("no image")
        page.evaluate(DROP)
        expect(page.locator(".verdict b")).not_to_be_empty()


DROP = """async () => {
  const blob = await new Promise((resolve) => document.querySelector("canvas").toBlob(resolve));
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([blob], "dropped.png", { type: "image/png" }));
  document.querySelector("#images").dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true }));
}"""


def pictures(url, folder):
    """The pictures of the documentation."""
    question = "How much memory does a KV cache take?"
    prompt = "    def test_read(self):\n        with open(self.path) as f:\n"
    load = {"model": "demo_model", "prompt": prompt, "n": 2}
    with opened(url, height=820) as page:
        ask(page, question)  # compiles
        page.get_by_role("button", name="Again").click()
        wait(page)
        page.screenshot(path=folder / "chat.png")
        post(url, "/v1/completions", {**load, "max_tokens": 900}).read()
        page.click("#tab-server")
        for size in (100, 400, 900) * 4:
            post(url, "/v1/completions", {**load, "max_tokens": size}).read()
            page.wait_for_timeout(700)
        page.screenshot(path=folder / "server.png")
    phone = {"width": 390, "height": 780, "is_mobile": True, "has_touch": True, "device_scale_factor": 1.5}
    with opened(url, color_scheme="dark", **phone) as page:
        page.locator("#chat .settings-button").tap()
        set_field(page, "tools", json.dumps(TOOLS))
        page.locator("#settings .close").tap()
        ask(page, question)
        ask(page, "Is it raining in Rome?")
        page.screenshot(path=folder / "phone.png")


if __name__ == "__main__":
    scenario, address, *rest = sys.argv[1:]
    globals()[scenario](address, *map(Path, rest))
    print("ok")
