"""`specdec lab plan-tree` plans on a recording what replay confirms, and refuses what it cannot."""

import shutil

import pandas as pd
import pytest

from research.plan_tree import __main__ as plan_tree
from research.plan_tree.comparison import GRID, PLANNED, compare_trees
from specdec_core.config import Configuration, Sampling, load_yaml
from specdec_core.cost import Profile
from specdec_core.engine import Engine, Request
from specdec_core.recordings.replay import Replay
from specdec_core.recordings.schema import Recording
from specdec_core.search.plan import load_plan
from specdec_core.tokens.statistics import Counts
from tests.commands import ROOT, assert_refused, assert_shown, far_profile, prompts_file
from tests.jobs.conftest import record_prompts
from tests.registered import runs_in

TEXTS = [f"x{i} = {i} + " for i in range(6)]
SAMPLINGS = {"greedy": Sampling(), "coupled": Sampling(temperature=1.0, coupling="gumbel")}


@pytest.fixture(scope="module")
def home(empty_store, tiny_pair, tmp_path_factory):
    """A workspace with a greedy recording, one of sampling, and another machine's profile."""
    home = tmp_path_factory.mktemp("home")
    shutil.copy(empty_store, home / "mlflow.db")
    far_profile(home, 0.1, 0.01)
    prompts = prompts_file(home, TEXTS, "texts")
    for name, sampling in SAMPLINGS.items():
        record_prompts(tiny_pair, prompts, home / "traces" / name, 24, sampling)
    return home


@pytest.fixture(scope="module")
def comparison(home):
    replay = Replay(Recording.open(home / "traces" / "greedy"), hidden=False)
    profile = Profile.load(home / "far.yaml").of(["draft"])
    return compare_trees(replay, profile, nodes=12, depth=4)


def test_nothing_in_the_grid_beats_the_grids_best(comparison):
    assert comparison.best(GRID)["speedup"] == comparison.grid["speedup"].max()
    for budget, rows in comparison.budgets.groupby("budget"):
        assert (rows["nodes"] <= budget).all()
    assert (comparison.grid["nodes"] <= 12).all()
    assert (comparison.grid["depth"] <= 4).all()
    assert comparison.acceptance.sum() <= 1


def test_the_proposal_is_the_fastest_planned_tree(comparison):
    planned = comparison.budgets[comparison.budgets["kind"] == PLANNED]
    assert comparison.proposed["speedup"] >= planned["speedup"].max()
    drafter = comparison.configuration.drafter
    assert drafter.nodes == comparison.proposed["nodes"] <= 12


def test_the_proposed_tree_decodes_as_it_was_replayed(home, comparison, tiny_pair):
    recording = Recording.open(home / "traces" / "greedy")
    requests = [
        Request(f"{i}", tuple(tokens.tolist()), 24)
        for i, tokens in enumerate(recording.prompts.tokens)
    ]
    live = Engine(tiny_pair, comparison.configuration, slots=3).generate(requests)
    assert Counts.of(live).metrics()["mat"] == comparison.proposed["mat"]


def test_a_command_leaves_tables_figures_and_a_run(command, home):
    arguments = ("--budget", 10, "--depth", 4, "--profile", home / "far.yaml", "--name", "own")
    done = command(plan_tree.main, home, "--traces", "greedy", *arguments)
    assert_shown(done, "planned", "k-configurations", "far away")
    folder = home / "trees" / "own"
    budgets, grid = (pd.read_csv(folder / f"{name}.csv") for name in ("budgets", "grid"))
    assert budgets["nodes"].max() <= 10
    assert grid["speedup"].max() == budgets[budgets["kind"] == GRID]["speedup"].max()
    assert "<svg" in (folder / "trees.html").read_text()
    assert (folder / "budgets-draft.svg").exists()
    assert "over the grid's best" in (folder / "trees.md").read_text()
    proposed = Configuration.model_validate(load_yaml(folder / "draft.yaml"))
    assert proposed.drafter.kind == "tree"

    _, [run], _ = runs_in(home)
    assert run.info.status == "FINISHED"
    assert run.data.metrics["draft.grid.speedup"] == pytest.approx(grid["speedup"].max())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--traces", "coupled"], "greedy decoding only"),
        (["--traces", "greedy", "--draft", "none"], "no draft 'none' was recorded"),
        (["--traces", "greedy", "--budget", "500"], "--budget 500: expected 1 … 128"),
        (["--traces", "greedy", "--depth", "0"], "--depth 0: expected 1 … 16"),
    ],
)
def test_bad_input_is_one_line_with_exit_code_2(command, home, arguments, message):
    done = command(plan_tree.main, home, *arguments)
    assert_refused(done, message)


def test_the_sweep_over_trees_stays_within_its_budget():
    plan = load_plan(ROOT / "jobs" / "sweeps" / "trees.yaml")
    drafters = [c.drafter for c in plan.space.draw(60, seed=0)]
    trees = [drafter for drafter in drafters if drafter.kind == "tree"]
    assert trees
    assert all(drafter.nodes <= 44 for drafter in trees)  # 4·2·2·1 is named by itself
    assert {drafter.draft for drafter in drafters} == set(plan.pair.drafts)
