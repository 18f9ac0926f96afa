"""A server of this library's table that runs :mod:`tests.external_program`."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from specdec_core.config import DrafterSettings
from specdec_core.drafting.tree.settings import TreeSettings
from specdec_core.models.pair import Pair
from specdec_core.servers.server import Counterpart, Mode, Models, ServedMode, Server, WrittenFiles
from tests import external_program


class WordServer(Server):
    """The program, which has a counterpart of all drafters but trees."""

    name = "words"
    title = "words"
    version = "1"
    stages = frozenset({"serve"})

    def settings_for(self, drafter: DrafterSettings, models: Models) -> Counterpart | None:
        if isinstance(drafter, TreeSettings):
            return None
        return Counterpart(drafter.model_dump(mode="json"))

    def written(self, counterpart: Counterpart, models: Models) -> WrittenFiles:
        raise NotImplementedError

    def served(self, pair: Pair, mode: Mode, cores: Sequence[int], folder: Path) -> ServedMode:
        program = [sys.executable, external_program.__file__]
        return ServedMode("words 1", {}, lambda slots, port: [*program, str(port)], os.environ)
