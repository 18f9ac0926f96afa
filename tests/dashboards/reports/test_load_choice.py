"""The sentences about the choice for each load."""

from dashboards.reports.load_choice import findings, loads
from specdec_core.config import AUTOREGRESSIVE, Configuration
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.search.load.choice import choose_for_load
from specdec_core.search.load.workload import LiveSettings, Slo, Workload
from tests.load_timer import UP_TO_A_DOZEN, Machine, recorded

DRAFT = Configuration(drafter=DraftModelSettings(draft="draft"))


def test_limits_that_no_configuration_meets_are_named_with_the_nearest(tiny_pair, tmp_path):
    replay = recorded(tiny_pair, tmp_path)
    workload = Workload(clients=(1, 8), requests=8, slo=Slo(tpot=0.009))  # a step takes 10 ms
    timer = Machine(replay, workload, UP_TO_A_DOZEN)
    choice, _ = choose_for_load(
        [DRAFT], replay, UP_TO_A_DOZEN, workload, LiveSettings(repeats=2), timer, tmp_path / "live"
    )
    one, eight = (verdict.load for verdict in choice.verdicts)
    assert choice.unkept(one) is None
    nearest = choice.unkept(eight)
    assert nearest.config_id == AUTOREGRESSIVE.id  # candidates beyond a dozen slow a step down
    [line] = [line for line in findings(choice) if line.startswith("8 clients")]
    assert line.startswith("8 clients: no configuration meets tpot ≤ 0.009 s, so draft, K=5 is no")
    assert line.endswith("; nearest comes autoregressive (95th percentile: tpot 10 ms)")
    costs = loads(choice).shown.set_index("load")["the choice costs"]
    assert any(costs["1 client"])
    assert not any(costs["8 clients"])
