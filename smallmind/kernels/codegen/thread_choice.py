"""The number of threads on which something that is repeated is fastest, found by timing it."""

import math
from collections import deque
from collections.abc import Collection

TRIAL_REPETITIONS = 4  # repetitions on another number of threads
# Repetitions or more between trials: few at first, when little is known.
FIRST_TRIAL, MAX_PATIENCE = 4 * TRIAL_REPETITIONS, 64
SHORT_TRIAL_NS = 250_000_000  # nanoseconds of a trial that is made without a reason
# Shares of the time that trials of fewer threads, and of more, may take.
FEWER_COST, MORE_COST = 0.004, 0.016
# Nanoseconds between trials of more threads: another program may end at any time.
SHORT_PAUSE_NS, LONG_PAUSE_NS = 5_000_000_000, 60_000_000_000
CHANGED_RATIO = 1.5  # times faster than at the last trial: another program seems to have ended
MIN_SPEEDUP = 1.15  # times faster that several threads must be: they have to find all cores free
LASTING_NS = 5_000_000_000  # nanoseconds for which a number is the fastest before that is news
MIN_REPETITIONS = 16  # repetitions, or
MIN_MEASURED_NS = 1_000_000_000  # nanoseconds, from which a mean is known


class _Cost:
    """The time of repetitions on some number of threads, in nanoseconds."""

    def __init__(self) -> None:
        self._last = deque[int](maxlen=2 * TRIAL_REPETITIONS)
        self._spent, self.count = 0.0, 0.0  # of those that count for the mean
        self.mean = self.usual = math.inf

    def add(self, nanoseconds: int) -> None:
        self._last.append(nanoseconds)
        self.usual = sorted(self._last)[(len(self._last) - 1) // 3]
        self._spent += nanoseconds
        self.count += 1
        if self.usual * self.count > MIN_SPEEDUP * self._spent:  # it takes longer than before
            self._spent, self.count = float(sum(self._last)), len(self._last)
        self.mean = self._spent / self.count
        if self._spent > 2 * MIN_MEASURED_NS and self.count > 2 * MIN_REPETITIONS:
            self._spent, self.count = self._spent / 2, self.count / 2


class ThreadChoice:
    """Chooses among some numbers of threads for each repetition.

    Usually the fastest is all of them. For short repetitions it is one, and where other programs
    use some of the cores it is a smaller number: threads wait for each other at the end of every
    kernel, so that all are as slow as the one that shares its core.

    Means decide: threads may wait seldom, but then long. Where these do not differ much, what a
    repetition usually takes decides: some may have been interrupted by something else.

    A number that is not known to be slower is tried. What becomes slower meanwhile shows without a
    trial; that more threads have become faster does not, and these are tried from time to time.
    """

    def __init__(self, counts: Collection[int]) -> None:
        self._counts = sorted(counts, reverse=True)
        self._most = self.best = self._count = self._counts[0]
        self._in_turn = 0  # repetitions on the same number, one after another
        self._spent = 0  # nanoseconds that these took, without the first
        self._elapsed = 0  # nanoseconds of all repetitions
        self._costs = {self._most: _Cost()}  # by number, of those that have been tried
        self._fastest = math.inf  # what a repetition on all threads took at best
        # By number: when it was last tried, and what a repetition took on the best one then.
        self._tried: dict[int, tuple[int, float]] = {}
        # By number: doubles with every trial, for all threads until these have been the fastest.
        self._patience = dict.fromkeys(self._counts, 1)
        self._reported, self._best_since, self._lasting = self._most, 0, LASTING_NS

    def next(self) -> int:
        """Returns the number of threads for the next repetition."""
        if self._count != self.best:  # on trial
            limit = TRIAL_REPETITIONS * self._costs[self.best].mean
            if self._in_turn >= TRIAL_REPETITIONS or (self._in_turn > 2 and self._spent >= limit):
                self._switch(self.best)
        elif self._in_turn >= TRIAL_REPETITIONS:
            for count in self._counts:
                if count != self.best and self._is_due(count):
                    self._tried[count] = self._elapsed, self._costs[self.best].mean
                    self._costs[count] = _Cost()
                    self._patience[count] *= 2
                    self._switch(count)
                    break
        self._in_turn += 1
        return self._count

    def took(self, nanoseconds: int) -> None:
        """Notes how long the repetition has taken."""
        self._elapsed += nanoseconds
        if self._in_turn == 1:  # other threads were asleep, or data in the caches of other cores
            return
        self._spent += nanoseconds
        cost = self._costs[self._count]
        cost.add(nanoseconds)
        if self._count == self._most:
            self._fastest = min(self._fastest, cost.usual)
        for count in self._costs:
            if count != self.best and self._is_faster(count, self.best):
                self._tried[self.best] = self._elapsed, self._costs[count].mean
                self.best, self._best_since = count, self._elapsed
        if self.best == self._most and self._elapsed - self._best_since > LASTING_NS:
            self._patience[self._most] = 1

    def has_news(self) -> bool:
        """-> True if another number has become the fastest and stays it, once for each such
        change.
        """
        lasts = self._elapsed - self._best_since >= self._lasting
        if self.best == self._reported or not lasts:
            return False
        self._reported = self.best
        if self.best == self._most:  # the next time it is no longer new
            self._lasting *= 2
        return True

    def _switch(self, count: int) -> None:
        self._count, self._in_turn, self._spent = count, 0, 0

    def _is_faster(self, count: int, other: int) -> bool:
        mine, others = self._costs[count], self._costs[other]
        if others.count >= MIN_REPETITIONS and MIN_SPEEDUP * mine.mean < others.mean:
            return True
        if mine.count >= MIN_REPETITIONS and MIN_SPEEDUP * others.mean < mine.mean:
            return False
        weights = [1.0 if n == 1 else MIN_SPEEDUP for n in (count, other)]
        return weights[0] * mine.usual < weights[1] * others.usual

    def _is_due(self, count: int) -> bool:
        """Returns True if a number of threads should be tried now."""
        best, known = self._costs[self.best].mean, self._costs.get(count)
        # Unless it is known, as if threads did not wait for each other.
        expected = known.mean if known else self._fastest * self._most / count
        tried, best_then = self._tried.get(count, (0, 0.0))
        if count == 1 and not known and TRIAL_REPETITIONS * expected < SHORT_TRIAL_NS:
            return True
        if 1 < count < self.best and MIN_SPEEDUP * expected > best:
            return False
        loss, patience = TRIAL_REPETITIONS * (expected - best), self._patience[count]
        pause = FIRST_TRIAL * min(patience, MAX_PATIENCE) * best
        if count < self.best:
            pause = max(pause, loss / FEWER_COST)
        else:
            longest = SHORT_PAUSE_NS if CHANGED_RATIO * best < best_then else LONG_PAUSE_NS
            pause = min(max(pause, patience * loss / MORE_COST), longest)
        return self._elapsed - tried >= pause
