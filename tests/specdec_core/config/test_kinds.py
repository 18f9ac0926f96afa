"""Every kind is one place and one line of the table, says all that it has to, and loads without
torch; a kind of one's own is as good."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from specdec_core.base.errors import UserError
from specdec_core.config import Configuration, add_drafter, add_policy, parse, run_time
from specdec_core.config import kinds as table
from specdec_core.config.drafters import ChainSettings, DrafterSettings, LookupSettings
from specdec_core.config.kinds import DRAFTERS, POLICIES, kinds_of
from specdec_core.config.policies import PolicySettings
from specdec_core.drafting.drafter import Drafter, Lookup
from specdec_core.drafting.policies.policy import LengthPolicy
from tests.specdec_core.kinds import drafter, policy

EAGER = """
from typing import ClassVar, Literal
from specdec_core.config.policies import PolicySettings
from specdec_core.drafting.policies.policy import LengthPolicy


class EagerSettings(PolicySettings):
    kind: Literal["eager"] = "eager"
    max_tokens: int = 3

    replayed: ClassVar = True

    @property
    def label(self):
        return f"eager {self.max_tokens}"

    @property
    def sentence(self):
        return f"Drafts {self.max_tokens} tokens eagerly."


class EagerPolicy(LengthPolicy):
    pass
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder to import from; kinds that a test adds are gone behind it."""
    known = dict(DRAFTERS), dict(POLICIES)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for kinds, before in zip((DRAFTERS, POLICIES), known, strict=True):
        for kind in kinds.keys() - before.keys():
            del kinds[kind]
    table._settings.cache_clear()
    for file in tmp_path.glob("*.py"):
        sys.modules.pop(file.stem, None)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_drafter_has_settings_and_a_run_time_of_the_same_name(kind):
    settings = kinds_of(DRAFTERS, DrafterSettings)[kind]
    assert settings.__name__.lower() == kind.replace("_", "") + "settings"
    decodes = run_time(settings)
    assert decodes.__name__ == settings.__name__.removesuffix("Settings") + "Drafter"
    assert issubclass(settings, DrafterSettings)
    assert issubclass(decodes, Drafter)
    assert issubclass(settings, LookupSettings) == issubclass(decodes, Lookup)
    assert isinstance(drafter(kind).label, str)


@pytest.mark.parametrize("kind", POLICIES)
def test_every_policy_has_settings_and_a_run_time_of_the_same_name(kind):
    settings = kinds_of(POLICIES, PolicySettings)[kind]
    decodes = run_time(settings)
    assert decodes.__name__ == settings.__name__.removesuffix("Settings") + "Policy"
    assert issubclass(settings, PolicySettings)
    assert issubclass(decodes, LengthPolicy)
    assert isinstance(settings.replayed, bool)
    assert policy(kind).max_tokens >= 1


def test_all_settings_load_without_torch():
    """So that `specdec --help` is quick, and a bad sweep is refused at once."""
    run("""
        import sys
        from specdec_core.config import Configuration, DrafterSettings, PolicySettings
        from specdec_core.config.kinds import DRAFTERS, POLICIES, kinds_of
        assert not any(name.startswith("specdec_core.drafting") for name in sys.modules)
        assert kinds_of(DRAFTERS, DrafterSettings).keys() == DRAFTERS.keys()
        assert kinds_of(POLICIES, PolicySettings).keys() == POLICIES.keys()
        Configuration.model_json_schema()
        heavy = {"torch", "transformers", "pandas", "ray", "mlflow"} & set(sys.modules)
        assert not heavy, heavy
    """)


def test_a_bad_sweep_is_refused_without_torch(tmp_path):
    """What is wrong lies in a drafter of a drafter, so all kinds were looked at."""
    sweep = {"search": [{"drafter": {"kind": "hybrid", "otherwise": {"kind": "no such"}}}]}
    (tmp_path / "sweep.yaml").write_text(json.dumps(sweep))
    script = f"""
        import sys
        from jobs.cli import main
        sys.argv = ["specdec", "sweep", "--config", {str(tmp_path / "sweep.yaml")!r}]
        try:
            main()
        except SystemExit as ended:
            assert ended.code == 2, ended.code
        heavy = {{"torch", "transformers", "ray"}} & set(sys.modules)
        assert not heavy, heavy
    """
    assert "no such" in run(script).stderr


@pytest.mark.parametrize("kind", DRAFTERS)
def test_pearl_drafts_chains_ahead_and_nothing_else(kind):
    value = {"drafter": {"kind": "pearl", "drafter": drafter(kind).model_dump()}}
    if isinstance(drafter(kind), ChainSettings):
        inner = parse(Configuration, value, "here").drafter.drafter
        assert inner.guesses is None or isinstance(inner.guesses, LookupSettings)
    else:
        refused = rf"^here: drafter\.drafter: drafter '{kind}' cannot be used here; .*, cascade$"
        with pytest.raises(UserError, match=refused):  # one line
            parse(Configuration, value, "here")


def test_the_json_schema_has_every_kind_and_no_reference_to_nowhere():
    for mode in ("validation", "serialization"):
        schema = Configuration.model_json_schema(mode=mode)
        text = json.dumps(schema)
        names = {part.split('"')[0] for part in text.split('"#/$defs/')[1:]}
        assert names <= schema["$defs"].keys()
        for kinds, base in ((DRAFTERS, DrafterSettings), (POLICIES, PolicySettings)):
            assert schema["$defs"][base.__name__]["discriminator"]["mapping"].keys() == kinds.keys()
    assert TypeAdapter(tuple[Configuration, Configuration]).json_schema()


LABEL = '    @property\n    def label(self):\n        return f"eager {self.max_tokens}"\n'


@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [
        ("eager", EAGER.replace("replayed:", "other:"), "EagerSettings does not say its replayed$"),
        ("eager", EAGER.replace(LABEL, ""), "EagerSettings does not say its label$"),
        ("eager", EAGER.replace("EagerPolicy", "Eager"), "no class EagerPolicy"),
        ("other", EAGER, "no settings with kind: Literal\\['other'\\]"),
    ],
)
def test_a_kind_that_says_too_little_is_refused_when_it_is_added(own, kind, code, message):
    (own / "mine.py").write_text(code)
    with pytest.raises(TypeError, match=f"mine: {message}"):
        add_policy(kind, "mine")
    assert kind not in POLICIES


def test_a_drafter_must_say_what_a_recording_knows_of_it(own):
    code = """
        from typing import Literal
        from specdec_core.config.drafters import DrafterSettings

        class NothingSettings(DrafterSettings):
            kind: Literal["nothing"] = "nothing"
    """
    (own / "silent.py").write_text(textwrap.dedent(code))
    unsaid = "NothingSettings does not say its depth, label, unsupported_reason"
    with pytest.raises(TypeError, match=unsaid):
        add_drafter("nothing", "silent")


def test_a_kind_of_ones_own_is_known_everywhere_at_once(own):
    value = {"drafter": {"kind": "fork", "policy": {"kind": "eager", "max_tokens": 2}}}
    with pytest.raises(UserError, match="no length policy 'eager'; there are fixed, "):
        parse(Configuration, value, "here")
    (own / "eager_policy.py").write_text(EAGER)
    add_policy("eager", "eager_policy")
    add_policy("eager", "eager_policy")  # once more is nothing new
    found = parse(Configuration, value, "here")
    assert found.drafter.policy.label == "eager 2"
    assert Configuration.model_validate_json(found.model_dump_json()) == found
    arms = {"drafter": {"kind": "bandit", "arms": [{"kind": "eager"}, 5]}}
    assert parse(Configuration, arms, "here").policies[0][1].kind == "eager"
    schema = Configuration.model_json_schema()["$defs"]
    assert "eager" in schema["PolicySettings"]["discriminator"]["mapping"]
    assert "EagerSettings" in schema
    with pytest.raises(ValueError, match="kind svip is"):
        add_policy("svip", "eager_policy")


def test_kinds_that_the_environment_names_are_there_in_every_process(tmp_path):
    added = "\n\nfrom specdec_core.config import add_policy\nadd_policy('eager', __name__)\n"
    (tmp_path / "eager_policy.py").write_text(EAGER + added)
    script = """
        from specdec_core.config import Configuration
        drafter = {"kind": "draft_model", "policy": {"kind": "eager"}}
        print(Configuration.model_validate({"drafter": drafter}).label)
    """
    environment = {"PYTHONPATH": str(tmp_path), "SPECDEC_KINDS": "eager_policy"}
    assert run(script, **environment).stdout == "draft, eager 3\n"
    done = run(script, check=False, SPECDEC_KINDS="not_there")
    assert "SPECDEC_KINDS: not_there: No module named 'not_there'" in done.stderr


def run(script, check=True, **environment):
    """A script in a separate process."""
    path = os.pathsep.join([str(Path(__file__).parents[3]), environment.pop("PYTHONPATH", "")])
    command = [sys.executable, "-c", textwrap.dedent(script)]
    environment = {**os.environ, **environment, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert not check or done.returncode == 0, done.stderr
    return done


def test_settings_of_a_base_are_those_of_its_kinds():
    assert kinds_of(DRAFTERS, ChainSettings).keys() == {"draft_model", "cascade"}
    lookups = {"prompt_lookup", "suffix", "token_cache"}
    assert kinds_of(DRAFTERS, LookupSettings).keys() == lookups


def test_every_part_without_a_draft_gets_one():
    chain = {"kind": "draft_model", "policy": {"kind": "fixed", "max_tokens": 2}}
    ranges = {1: {"kind": "hybrid", "lookup": {"kind": "suffix"}, "otherwise": chain}, 9: None}
    bandit = {"kind": "bandit", "rule": "ucb", "arms": [chain, {**chain, "draft": "large"}]}
    for own in ({"kind": "schedule", "ranges": ranges}, bandit):
        configuration = parse(Configuration, {"drafter": own}, "drafter")
        named = configuration.with_draft("small")
        assert None in configuration.drafts
        assert set(named.drafts) == {draft or "small" for draft in configuration.drafts}
        assert named.with_draft("other") == named
