"""How many candidates to wait for behind a rejection.

While the target verifies, the draft drafts, so behind an accepted round the next candidates are
there at once: n of them, about t_target / t_draft. Behind a rejection there are none, and waiting
for w of them costs w · t_draft. A round that feeds k candidates judges k + 1: the one that comes
meanwhile by the last of its distributions. It brings those that are accepted and, at a rejection,
the target's own token; with a chance α that a candidate is accepted that is, on average,
E(k) = Σ α^i for i = 0 … k = (1 − α^(k+1)) / (1 − α). A round is followed by another that need not
wait with probability α^(k+1). So of the rounds the share that
begins behind a rejection, π, and the others, 1 − π, are in balance at π α^(w+1) = (1 − π)(1 −
α^(n+1)), and the w to choose brings the most tokens a second:

    (π E(w) + (1 − π) E(n)) / (π (w t_draft + t_notice) + t_target)

where t_notice is what passes until the draft has heard of the rejection and ended the forward that
it was in. PEARL's pre-verification is w = 0, without t_notice.
"""

from __future__ import annotations

_FORWARDS, _CANDIDATES = 50, 200  # of the last that were seen, about so many count
_HOLDS = 16  # rounds for which an answer holds


class _Mean:
    """The mean of the last values, of about `memory`; of all while there are fewer. It begins at
    `start`, as if that had been seen `times`."""

    def __init__(self, memory: int, start: float = 0.0, times: int = 0) -> None:
        self.value, self.count, self._memory = start, times, memory

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, self._memory)
        self.value += (value - self.value) / self.count


class Pace:
    """What forwards take and how often candidates are accepted, as seen lately; `most` candidates
    can be waited for."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._draft, self._target, self._notice = (_Mean(_FORWARDS) for _ in range(3))
        self._acceptance = _Mean(_CANDIDATES, 0.7, 8)
        self._wait, self._holds = most, 0

    @property
    def t_draft(self) -> float:
        """Seconds that the draft takes for a candidate."""
        return self._draft.value

    @property
    def t_target(self) -> float:
        """Seconds of a forward of the target."""
        return self._target.value

    @property
    def t_notice(self) -> float:
        """Seconds that pass behind a rejection beside drafting."""
        return self._notice.value

    @property
    def acceptance(self) -> float:
        """The chance that a candidate is accepted."""
        return self._acceptance.value

    def drafted(self, seconds: float) -> None:
        """A candidate took the draft so long."""
        self._draft.add(seconds)

    def verified(self, seconds: float) -> None:
        """A forward of the target took so long."""
        self._target.add(seconds)

    def waited(self, candidates: int, seconds: float) -> None:
        """So many candidates came behind a rejection after so long."""
        self._notice.add(max(seconds - candidates * self.t_draft, 0.0))

    def judged(self, accepted: int, rejected: bool) -> None:
        """So many candidates of a round were accepted before one was rejected, or none was."""
        for value in [1.0] * accepted + [0.0] * rejected:
            self._acceptance.add(value)

    def wait(self) -> int:
        """Candidates to wait for."""
        if not self.t_draft or not self.t_target:
            return self.most
        if not self._holds:
            self._wait, self._holds = max(range(self.most + 1), key=self.rate), _HOLDS
        self._holds -= 1
        return self._wait

    def rate(self, w: int) -> float:
        """Tokens a second when `w` candidates are waited for."""
        alpha = min(self.acceptance, 0.999)
        n = min(int(self.t_target / self.t_draft), self.most)
        on, stays = alpha ** (w + 1), alpha ** (n + 1)
        behind = (1 - stays) / (1 - stays + on)
        tokens = behind * _tokens(alpha, w) + (1 - behind) * _tokens(alpha, n)
        waiting = w * self.t_draft + self.t_notice if w else 0.0
        return tokens / (behind * waiting + self.t_target)


def _tokens(alpha: float, fed: int) -> float:
    """E(fed)."""
    return (1 - alpha ** (fed + 1)) / (1 - alpha)
