"""The playground in a real browser: it asks a real server and shows what that says."""

import httpx
import pytest

from jobs.generate import ORIGINS
from specdec_core.engine import Engine, Request
from specdec_core.servers.process import running
from tests.configurations import drafting
from tests.dashboards import browser
from tests.local_server import engine_server

CONFIGURATION = drafting("tree", branching=[3, 2, 1])
TOKENS = 40
PROMPT = "def main("

ANSWERS = """
    return [...document.querySelectorAll(".pane")].map(pane => ({
        text: [...pane.querySelectorAll(".answer .token")].map(t => t.textContent).join(""),
        origins: [...pane.querySelectorAll(".answer .token")].map(t => t.classList[1]),
        branches: pane.querySelectorAll(".answer .branch").length,
        colours: Object.fromEntries([...pane.querySelectorAll(".answer .token")].map(
            t => [t.classList[1], getComputedStyle(t).backgroundColor])),
        columns: [...pane.querySelectorAll(".strip button")].map(c => [
            c.querySelectorAll(":not(.lost)").length,
            Number(c.querySelector(".lost")?.dataset.count ?? 0)]),
        labels: [...pane.querySelectorAll(".strip button")].map(c => c.ariaLabel),
        speed: pane.querySelector(".speed b").textContent,
        counts: pane.querySelector(".counts").textContent,
    }));
"""
READY = "return document.querySelector('#served code') !== null"
IDLE = "return document.querySelector('#run').disabled === false"
MESSAGE = "return document.querySelector('#message').textContent"


@pytest.fixture(scope="module")
def url(chat_pair):
    with running(engine_server(chat_pair, CONFIGURATION, slots=2)) as url:
        yield url


@pytest.fixture(scope="module", params=["light", "dark"])
def opened(url, request):
    """The page in a headless Chromium: wide and light, or narrow and dark."""
    flags = ["--blink-settings=preferredColorScheme=0"] if request.param == "dark" else []
    with browser.Browser(500 if flags else 1280, 1000, *flags) as window:
        window.open(f"{url}/")
        assert window.wait(READY)
        yield request.param, window


def ask(window, prompt=PROMPT, **fields):
    """Fill in the form, send it with the keyboard, and wait for both answers."""
    window.run(
        """
        const form = document.querySelector("#ask");
        for (const [name, value] of Object.entries(arguments[0])) form.elements[name].value = value;
        document.querySelector("#prompt").dispatchEvent(
            new KeyboardEvent("keydown", {key: "Enter", ctrlKey: true, bubbles: true}));
        """,
        {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, **fields},
    )
    assert window.wait(IDLE), window.run(MESSAGE)
    return window.run(ANSWERS)


def test_two_answers_race_to_the_engines_text(opened, chat_pair):
    kind, window = opened
    engine = Engine(chat_pair)
    expected = engine.generate([Request("", engine.encode(PROMPT), TOKENS)])[0]
    fast, plain = ask(window)
    assert fast["text"] == plain["text"] == expected.text
    assert window.run(MESSAGE).endswith("the tokens a second, the same text")
    # Each round is a column: its tokens, and what was thrown away.
    assert sum(tokens for tokens, _ in fast["columns"]) == len(fast["origins"])
    assert plain["columns"] == [[1, 0]] * len(expected.tokens)
    assert len(fast["columns"]) < len(plain["columns"])
    tokens, lost = fast["columns"][1]
    assert f"Round 2: {tokens + lost - 1} drafted, {tokens - 1} accepted" in fast["labels"][1]
    assert f"{len(fast['columns'])} rounds" in fast["counts"]
    assert float(fast["speed"]) > 0
    # Origins are told by colour.
    assert {"draft", "correction"} <= set(fast["origins"])
    assert set(plain["origins"]) == {"bonus"}
    assert len(set(fast["colours"].values())) == len(fast["colours"])
    assert fast["branches"] > 0
    assert window.log("browser") == []
    assert window.run("return document.documentElement.scrollWidth <= innerWidth")
    ink, ground = window.run(
        "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]"
    )
    assert (brightness(ink) > brightness(ground)) == (kind == "dark")


def brightness(colour):
    return sum(int(part) for part in colour.strip("rgb()").split(","))


@pytest.fixture
def window(opened):
    return opened[1]


# For what is the same in every width and colour scheme.
in_light = pytest.mark.parametrize("opened", ["light"], indirect=True)


@in_light
def test_the_legend_has_the_meanings_that_the_command_prints(window):
    items = window.run(
        "return [...document.querySelectorAll('#legend li')].map(item => item.textContent)"
    )
    assert items[:-1] == [f"{origin} {meaning}" for origin, (_, meaning) in ORIGINS.items()]


@in_light
def test_a_token_tells_its_round_and_probabilities(window):
    ask(window, temperature=1, seed=3, race="none")
    window.run("""
        const token = document.querySelector(".answer .draft");
        token.dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
    """)
    card = window.run("return document.querySelector('#card').innerText")
    assert "thrown away" in card
    assert "proposed by the draft model, accepted" in card
    assert "target " in card
    assert "drafter " in card
    marked = window.run("return document.querySelectorAll('.strip .marked').length")
    assert marked == 1


@in_light
def test_escape_stops_and_a_refusal_is_shown(window):
    window.run("""
        const form = document.querySelector("#ask");
        form.elements.max_tokens.value = 200;
        form.requestSubmit();
        document.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape", bubbles: true}));
    """)
    assert window.wait(IDLE)
    assert window.run(MESSAGE) == "stopped"
    ask(window, max_tokens=100_000)
    assert "context holds" in window.run(MESSAGE)
    # The browser says that the server refused; the page says why.
    assert all("400" in entry["message"] for entry in window.log("browser"))


@pytest.fixture
def spoiled(window):
    """A chat in which second answers fail, and `asked` has the bodies of all requests."""
    window.run("document.querySelector('[value=chat]').click()")
    window.run("""
        window.asked = [];
        window.send = window.fetch;
        window.fetch = (path, options) => {
            const body = JSON.parse(options.body);
            asked.push(body);
            if (!body.speculative.enabled) body.max_tokens = 100000;
            return send(path, {...options, body: JSON.stringify(body)});
        };
    """)
    yield window
    window.run("window.fetch = window.send; document.querySelector('[value=completion]').click()")


@in_light
def test_the_first_answer_stays_when_the_second_fails(spoiled):
    [alone] = ask(spoiled, "hi", race="none")
    spoiled.run("document.querySelector('#clear').click()")
    first, second = ask(spoiled, "hi", race="alone")
    assert len(first["origins"]) > len(first["columns"]) > 1
    assert (first["text"], second["text"]) == (alone["text"], "")
    # The conversation goes on from it, and nothing is shown twice.
    ask(spoiled, "and now?", race="none")
    turns = spoiled.run("return asked.at(-1).messages")
    assert [turn["content"] for turn in turns] == ["hi", alone["text"], "and now?"]
    shown = spoiled.run(
        "return [...document.querySelectorAll('.pane .answer')].map(each => each.textContent)"
    )
    assert shown[:2] == ["", alone["text"]]  # of a new chat, and of its first answer
    assert all("400" in entry["message"] for entry in spoiled.log("browser"))


@in_light
def test_a_model_without_a_chat_template_offers_no_chat(window, url, tiny_pair):
    with running(engine_server(tiny_pair, CONFIGURATION, slots=2)) as plain:
        window.open(f"{plain}/")
        assert window.wait(READY)
        ask(window, race="none")
        fields = "return [...document.querySelectorAll('[name=mode]')].map(each => each.disabled)"
        assert window.run(fields) == [False, True]
    window.open(f"{url}/")
    assert window.wait(READY)


def test_nothing_from_elsewhere_may_be_loaded(url):
    page = httpx.get(f"{url}/")
    assert page.headers["content-security-policy"].startswith("default-src 'none';")
    assert "unsafe" not in page.headers["content-security-policy"]
    assert httpx.get(f"{url}/playground/main.js").headers["content-type"].startswith("text/java")
    assert httpx.get(f"{url}/playground/../access.py").status_code == 404
