"""This project's engine behind its HTTP application, as a server that a sweep starts.

`python -m tests.own_server FILE SLOTS PORT` serves the pair and the configuration in a file.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec_core.config import Configuration, DrafterSettings, PairConfiguration
from specdec_core.cost import Profile
from specdec_core.drafting.draft_model.settings import DraftModelSettings
from specdec_core.drafting.policies.fixed import FixedSettings
from specdec_core.drafting.prompt_lookup import PromptLookupSettings
from specdec_core.models.pair import Pair
from specdec_core.servers.chains import fixed_chain
from specdec_core.servers.server import Counterpart, Mode, Models, ServedMode, Server, WrittenFiles

ROOT = Path(__file__).parents[1]


class OwnServer(Server):
    """It drafts chains of a fixed length, chains of a length by load, and lookups."""

    name = "own"
    title = "our server"
    version = "1"
    stages = frozenset({"serve", "profile"})

    def settings_for(self, drafter: DrafterSettings, models: Models) -> Counterpart | None:
        if isinstance(drafter, PromptLookupSettings) or fixed_chain(drafter) is not None:
            return Counterpart(drafter.model_dump(mode="json"))
        return None

    def written(self, counterpart: Counterpart, models: Models) -> WrittenFiles:
        return WrittenFiles({"drafter.yaml": str(counterpart.settings)}, "own-server drafter.yaml")

    def modes(self, pair: Pair, served: bool = False) -> list[Mode]:
        [draft] = pair.spec.drafts
        chain = DraftModelSettings(draft=draft, policy=FixedSettings(max_tokens=2))
        drafters: dict[str, DrafterSettings | None] = {"own": None, "own K=2": chain}
        return self.compared(drafters, Models(pair.spec.target, {}))

    def served(self, pair: Pair, mode: Mode, cores: Sequence[int], folder: Path) -> ServedMode:
        drafter = dict(mode.settings) or None
        configuration = Configuration.model_validate({"drafter": drafter})
        chosen = PairConfiguration(pair=pair.spec, configuration=configuration)
        file = str(chosen.save(folder / "config.yaml"))

        variables = {**os.environ, "PYTHONPATH": str(ROOT)}

        def command(requests: int, port: int) -> list[str]:
            return [sys.executable, "-m", "tests.own_server", file, str(requests), str(port)]

        return ServedMode("own 1", {"drafter": drafter}, command, variables)

    def profile(self, pair: Pair, **sizes: Any) -> Profile:
        from specdec_core.measure.profiling import profile_pair
        from specdec_core.models.pair import load_pair

        small = {"widths": (1, 2, 3), "contexts": (16,), "repeats": 1}
        found = profile_pair(load_pair(pair.spec), **{**sizes, **small})
        return found.model_copy(update={"device": "cpu, own 1"})


def main() -> None:
    import uvicorn

    from cluster.serving.http.app import build_app
    from specdec_core.engine import Engine
    from specdec_core.models.pair import load_pair
    from tests.local_server import service_of

    file, slots, port = sys.argv[1:]
    chosen = PairConfiguration.load(file)
    engine = Engine(load_pair(chosen.pair), chosen.configuration, int(slots))
    uvicorn.run(build_app(service_of(engine)), port=int(port), log_level="error")


if __name__ == "__main__":
    main()
