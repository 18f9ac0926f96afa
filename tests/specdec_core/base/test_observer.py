"""Several observers hear as one what each would hear alone."""

from specdec_core.base.observer import Observer, together


class Cooking(Observer):
    def served(self, dish, guests=1):
        """A dish is on the table."""


class Heard(Cooking):
    def __init__(self):
        self.calls: list[tuple] = []

    def stage(self, name, steps=None, done=0):
        self.calls.append(("stage", name, steps, done))

    def warned(self, message):
        self.calls.append(("warned", message))

    def served(self, dish, guests=1):
        self.calls.append(("served", dish, guests))


def test_every_member_hears_every_hook_those_of_the_kind_among_them():
    first, second = Heard(), Heard()
    all_of_them = together(Cooking, [first, second, Cooking()])
    all_of_them.stage("soup", 3, done=1)
    all_of_them.step()
    all_of_them.warned("hot")
    all_of_them.served("soup", guests=2)
    assert isinstance(all_of_them, Cooking)
    assert first.calls == second.calls
    assert first.calls == [("stage", "soup", 3, 1), ("warned", "hot"), ("served", "soup", 2)]


def test_no_observer_is_needed():
    together(Cooking, []).served("soup")
