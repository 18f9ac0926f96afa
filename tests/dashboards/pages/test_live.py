"""The page that follows a sweep shows what the sweep has found so far."""

from __future__ import annotations

import socket

import httpx
import pytest

from cluster.page_server import page_server
from cluster.serving.http.pages import Page
from cluster.serving.server_process import free_port
from dashboards.live import LiveSweep
from dashboards.pages import LIVE
from specdec_core.base.errors import UserError
from specdec_core.search.results import METRIC
from tests.dashboards import browser
from tests.dashboards.conftest import Swept

PAGE = """
    const texts = selector => [...document.querySelectorAll(selector)].map(e => e.textContent);
    return {
        stage: texts("#stage")[0],
        count: Number(texts("#count")[0]),
        dots: document.querySelectorAll("#plot circle:not(.fastest)").length,
        best: texts("#best td:first-child")[0],
        timings: texts("#timings span:first-child, #timings .bar + span"),
        champion: texts("#timings .champion")[0],
        warnings: texts("#warnings li"),
        value: document.querySelector("#progress").value,
    };
"""


def test_a_page_follows_a_sweep(swept: Swept) -> None:
    result, folder = swept
    first, *others = result.trials
    running = result.model_copy(update={"trials": [first], "timings": [], "champion": None})
    sweep = LiveSweep()
    with (
        page_server(Page(*LIVE), sweep.state, free_port()) as url,
        browser.Browser(900, 1200) as window,
    ):
        sweep.begun(running, [], folder)  # continues from one trial
        sweep.stage("counting", len(result.trials), done=1)
        window.open(f"{url}/")
        assert window.wait("return document.querySelector('#count').textContent === '1'")
        for trial in others[:3]:
            sweep.trial_finished(trial)
            sweep.step()
        sweep.warned("one is left out")
        assert window.wait("return document.querySelector('#count').textContent === '4'")
        shown = window.run(PAGE)
        assert shown["stage"] == f"counting · 4 of {len(result.trials)}"
        assert shown["dots"] == shown["value"] == 4
        assert shown["warnings"] == ["one is left out"]
        assert shown["timings"] == []
        fastest = max(result.trials[:4], key=lambda trial: trial.metrics[METRIC])
        assert shown["best"] == fastest.configuration.label
        for trial in others[3:]:
            sweep.trial_finished(trial)
        running.timings, running.champion = result.timings, result.champion
        assert window.wait("return document.querySelector('#timings .champion') !== null")
        shown = window.run(PAGE)
        assert shown["dots"] == len(result.trials)
        assert shown["champion"] == result.champion_trial.configuration.label
        assert window.log("browser") == []
    assert [t["id"] for t in sweep.state(2)["trials"]] == [t.id for t in result.trials[2:]]


def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}"):
            page_server(Page(*LIVE), LiveSweep().state, port).__enter__()


def test_other_sites_do_not_see_the_page() -> None:
    with page_server(Page(*LIVE), LiveSweep().state, free_port()) as url:
        for headers, status in (
            ({}, 200),
            ({"host": "localhost"}, 200),
            ({"host": "rebound.example"}, 403),
            ({"origin": "http://other.example"}, 403),
        ):
            for path in ("/", "/state"):
                answer = httpx.get(f"{url}{path}", headers=headers, trust_env=False)
                assert answer.status_code == status
