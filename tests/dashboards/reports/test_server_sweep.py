"""The report of a sweep of a server says what won at each load, and what failed."""

from dashboards.outputs.markdown import document
from dashboards.reports.contestants import contestants
from dashboards.reports.server_sweep import report
from jobs import report as job
from specdec_core.config import AUTOREGRESSIVE
from specdec_core.evidence.server_choice import ServerRace, ServerSweep
from specdec_core.measure.comparison import folds
from tests.load_result import CHAIN, load_result, load_row

SHARED = {"name", "started", "command", "pair", "prompts", "max_new_tokens", "repeats", "loads"}


def race(*rows):
    shared = load_result()
    values = {name: getattr(shared, name) for name in SHARED}
    return ServerRace(**values, rows=list(rows), environment={"cpu": "a processor"})


def sweep():
    """A table of lengths is the fastest, a chain second, and a default fails."""
    plain = load_row("vLLM", "vllm", 0.1, 0.01, autoregressive=True)
    failed = load_row("vLLM n-gram K=4", "vllm", 0.1, 0.008)
    failed.runs["4"][0][2].error = "its server ended: no memory"
    chain = load_row("K=3", "vllm", 0.1, 0.005, with_ours=True)
    table = load_row("by load", "vllm", 0.1, 0.004, with_ours=True)
    return ServerSweep(
        server="vllm",
        title="vLLM",
        race=race(plain, failed, chain, table),
        configurations={"vLLM": AUTOREGRESSIVE, "K=3": CHAIN, "by load": CHAIN},
        expected={"K=3": {"1": 190.0, "4": 380.0}},
        ranked=12,
        left_out=["tree 2-1"],
        recording="traces/mine",
        times="cpu, vllm 0.32",
        best={"1": "by load", "4": "K=3"},
        champion="by load",
        usage="vllm serve org/target",
        command="env OMP_NUM_THREADS=2 python -m vllm --dtype bfloat16",
    )


def test_it_names_the_champion_its_speeds_and_what_failed():
    shown = report(sweep())
    champion, alone, together, *rest = shown.findings
    assert champion == "champion of vLLM: by load"
    assert alone.startswith("1 client: 7")
    assert " tokens/s, 1.4" in alone
    assert alone.endswith("over vLLM n-gram K=4, the server's best default")
    assert together.startswith("4 clients: ")
    assert rest == [
        "4 clients: K=3 was the fastest",
        "vLLM n-gram K=4: requests failed with 4 clients; it cannot be champion",
    ]
    assert [part.key for part in shown.parts][:2] == ["race", "start"]
    text = document(shown)
    for said in (
        "12 settings were ranked",
        "without settings there: tree 2-1",
        "as it was started here: env OMP_NUM_THREADS=2 python",
        "the race has prompts of the recording",
        "the champion was chosen on all requests",
    ):
        assert said in text
    assert shown.metrics["speedup"].keys() == {1, 4}
    assert (shown.tags["server"], shown.tags["server_version"]) == ("vllm", "vllm 1")
    assert [run.name for run in shown.nested] == [
        f"vllm: {name}, under load" for name in ("vLLM", "vLLM n-gram K=4", "K=3", "by load")
    ]
    requests = shown.frames["requests"]
    assert set(requests[requests["contestant"] == "by load"]["race"]) == {"race"}


def test_the_command_writes_the_report_of_a_servers_sweep(bare_home, capsys):
    folder = bare_home / "sweeps" / "mine"
    folder.mkdir(parents=True)
    sweep().save(folder)
    job.main()
    assert "The race at each load" in (folder / "report.html").read_text()
    assert "The fastest settings of vLLM for" in capsys.readouterr().out


def test_ratios_are_of_requests_that_the_champion_was_not_chosen_on():
    """A mode that is lucky on one part is the champion by it, and gains nothing from it."""
    result, before = sweep(), report(sweep()).metrics["speedup"]
    _, _, chain, table = result.race.rows
    for load, runs in table.runs.items():
        chain.runs[load] = [[each.model_copy() for each in run] for run in runs]
        for run in chain.runs[load]:
            for n, each in enumerate(run):
                factor = 0.5 if n in folds(len(run))[2].time else 1.01
                each.last = each.begun + factor * (each.last - each.begun)
    result.champion = chain.name
    found = report(result)
    for load, speedup in found.metrics["speedup"].items():
        assert before[load] / 1.01 < speedup < before[load]
    assert any(
        each.startswith("by load would be the champion in 1 of 6") for each in found.findings
    )


def test_a_mode_of_the_server_may_win_and_float32_texts_must_be_equal():
    result = sweep()
    result.best = dict.fromkeys(result.best, "vLLM n-gram K=4")
    own, chain = result.race.rows[1:3]
    own.runs["4"][0][2].error = None
    result.champion = own.name
    result.race.pair = result.race.pair.with_runner(target_dtype="float32")
    chain.runs["1"][0][0].text = "unlike the others"
    assert result.race.may_win() == [result.race.autoregressive(), own, result.race.rows[3]]
    *_, other, unregistered = report(result).findings
    assert other == "K=3: float32 texts unequal to those without speculation; it cannot be champion"
    assert unregistered.endswith("stands for: it is not registered")


def test_settings_that_all_of_a_group_share_are_shown_once():
    plain, chain = (load_row(name, "vllm", 0.1, 0.01) for name in ("vLLM", "K=3"))
    plain.settings = {"model": "a", "num_speculative_tokens": None, "eager": True}
    chain.settings = {"model": "a", "num_speculative_tokens": 3}
    shown = contestants([plain, chain]).frame
    assert list(shown["settings"]) == [
        '{"model": "a", "num_speculative_tokens": null, "eager": true}',
        '{"num_speculative_tokens": 3}; without eager',
    ]
