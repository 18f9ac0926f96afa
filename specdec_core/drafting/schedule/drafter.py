"""Drafts by a table of load."""

from __future__ import annotations

from specdec_core.drafting.arms import ArmsDrafter
from specdec_core.drafting.drafter import Resources, SlotState
from specdec_core.drafting.schedule.settings import ScheduleSettings


class ScheduleDrafter(ArmsDrafter):
    """The drafter of a round follows the number of requests that share it. A request's drafts then
    depend on the load, but neither its greedy output does, nor the distribution of a sampled
    one."""

    def __init__(self, settings: ScheduleSettings, resources: Resources) -> None:
        super().__init__(settings.parts, resources)
        self.settings = settings
        self._numbers = {arm: number for number, arm in enumerate(settings.parts)}

    def choose(self, sequence: SlotState) -> int | None:
        drafter = self.settings.at(sequence.batch)
        return None if drafter is None else self._numbers[drafter]
