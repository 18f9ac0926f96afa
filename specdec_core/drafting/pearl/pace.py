"""How many candidates to wait for after a rejection.

The draft drafts while the target verifies, so after an accepted round the next candidates are there
at once: n of them, about t_target / t_draft. After a rejection there are none, and waiting for w of
them costs w · t_draft. A round that feeds k candidates verifies k + 1: the one that arrives
meanwhile by the last of its distributions. It adds the accepted candidates and, at a rejection, the
target's own token; with the probability α that a candidate is accepted, this is on average E(k) = Σ
α^i for i = 0 … k = (1 − α^(k+1)) / (1 − α). The next round need not wait with probability α^(k+1).
The share π of rounds that begin after a rejection is in balance with the other rounds, 1 − π, at π
α^(w+1) = (1 − π)(1 − α^(n+1)). The best w yields the most tokens a second:

    (π E(w) + (1 − π) E(n)) / (π (w t_draft + t_notice) + t_target)

where t_notice is the time until the draft has received the rejection and ended its current forward.
PEARL's pre-verification is w = 0, without t_notice.
"""

from __future__ import annotations

_FORWARDS, _CANDIDATES = 50, 200  # about how many of the latest are averaged
_HOLDS = 16  # rounds between two computations of the wait


class RecentMean:
    """The mean of about the last `memory` values. It begins as if `start` had come `times`."""

    def __init__(self, memory: int, start: float = 0.0, times: int = 0) -> None:
        self.value, self.count, self._memory = start, times, memory

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, self._memory)
        self.value += (value - self.value) / self.count


class DraftPace:
    """Recent times of forwards and acceptance of candidates, and the wait of at most `most`
    candidates that follows from them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.t_draft = RecentMean(_FORWARDS)  # seconds of drafting a candidate
        self.t_target = RecentMean(_FORWARDS)  # seconds of a forward of the target
        self.t_notice = RecentMean(_FORWARDS)  # seconds of a wait that are not spent on drafting
        self.acceptance = RecentMean(_CANDIDATES, 0.7, 8)  # α
        self._wait, self._holds = most, 0

    def waited(self, candidates: int, seconds: float) -> None:
        """After a rejection the `candidates` arrived within `seconds`."""
        self.t_notice.add(max(seconds - candidates * self.t_draft.value, 0.0))

    def judged(self, accepted: int, rejected: bool) -> None:
        """A round's verdict: the candidates `accepted`, and whether one was `rejected`."""
        for value in [1.0] * accepted + [0.0] * rejected:
            self.acceptance.add(value)

    def wait(self) -> int:
        """Candidates to wait for."""
        if not self.t_draft.value or not self.t_target.value:
            return self.most
        if not self._holds:
            self._wait, self._holds = max(range(self.most + 1), key=self.rate), _HOLDS
        self._holds -= 1
        return self._wait

    def rate(self, w: int) -> float:
        """Tokens a second when `w` candidates are waited for."""
        alpha = min(self.acceptance.value, 0.999)
        t_draft, t_target = self.t_draft.value, self.t_target.value
        n = min(int(t_target / t_draft), self.most)
        on, stays = alpha ** (w + 1), alpha ** (n + 1)
        share = (1 - stays) / (1 - stays + on)  # π
        tokens = share * _tokens(alpha, w) + (1 - share) * _tokens(alpha, n)
        waiting = w * t_draft + self.t_notice.value if w else 0.0
        return tokens / (share * waiting + t_target)


def _tokens(alpha: float, fed: int) -> float:
    """E(fed)."""
    return (1 - alpha ** (fed + 1)) / (1 - alpha)
