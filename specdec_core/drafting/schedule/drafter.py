"""Drafts by a table of load."""

from __future__ import annotations

from specdec_core.base.errors import UserError
from specdec_core.drafting.arms import ArmsDrafter
from specdec_core.drafting.drafter import Resources, SlotState
from specdec_core.drafting.schedule.settings import ScheduleSettings


class ScheduleDrafter(ArmsDrafter):
    """The drafter of a round follows the number of requests that share it. A request's drafts then
    depend on the load, but neither its greedy output does, nor the distribution of a sampled
    one."""

    def __init__(self, settings: ScheduleSettings, resources: Resources) -> None:
        super().__init__(settings.kind, settings.parts, resources)
        self.settings = settings
        self._numbers = {arm: number for number, arm in enumerate(settings.parts)}
        if self.target_width and None in settings.ranges.values():
            raise UserError(
                f"{settings.kind}: {settings.parts[0].label} begins its trees with the target's"
                " tokens; then somebody has to draft at any load"
            )

    def choose(self, sequence: SlotState) -> int | None:
        drafter = self.settings.at(sequence.batch)
        return None if drafter is None else self._numbers[drafter]
