"""Which windows of a text make up each batch: any, or each once in a pass over the text.

A batch depends only on the seed and its number, not on which batches were drawn before it, so a
resumed run continues with the batches that it would have drawn anyway.
"""

import dataclasses
import math

import numpy as np

from smallmind.randomness import hash64, hash_words, permuted
from smallmind.settings.config import TrainingConfig
from smallmind.text.dataset import Batch, Dataset, random_starts

MAX_SHUFFLED = 1 << 20  # windows whose order is held in memory
BLUR_SHARE = 0.2  # share of their weight by which windows change places from epoch to epoch


class Sampler:
    """Chooses the windows of every batch; an update uses `batches` consecutive batches."""

    def __init__(self, dataset: Dataset, batches: int = 1, stride: int = 1) -> None:
        self.dataset = dataset
        self.batches = batches
        self.stride = stride

    @property
    def max_batch_size(self) -> int:
        """Windows of the largest batch."""
        return self.dataset.batch_size

    def starts(self, number: int) -> np.ndarray:
        """Batch number, from 0 -> where its windows begin, (b,); b may be 0."""
        raise NotImplementedError

    def windows_in_batch(self, number: int) -> int:
        """Batch number, from 0 -> the number of its windows."""
        return self.dataset.batch_size

    def windows_in_step(self, step: int) -> int:
        """Update, from 1 -> the number of windows in all its batches together."""
        return sum(map(self.windows_in_batch, self.batches_in_step(step)))

    def batches_in_step(self, step: int) -> range:
        """Update, from 1 -> the numbers of its batches."""
        return range((step - 1) * self.batches, step * self.batches)


class RandomWindows(Sampler):
    """Full batches of windows that begin anywhere, or at multiples of stride."""

    def starts(self, number: int) -> np.ndarray:
        data = self.dataset
        limit = len(data.train) - data.block_size
        return random_starts((data.seed, 0, number), data.batch_size, limit, self.stride)


class ShuffledWindows(Sampler):
    """Full batches of windows, each drawn once in a pass over the training part.

    Every pass has its own order, and its own offset, a multiple of stride. A batch may span passes.
    """

    def __init__(self, dataset: Dataset, batches: int = 1, stride: int = 1) -> None:
        super().__init__(dataset, batches, stride)
        T = dataset.block_size
        tokens = len(dataset.train) - 1  # that have a target
        self.windows = max(1, (tokens - (T - stride)) // T)  # of a pass, at any offset below T
        self._offsets = (tokens - self.windows * T) // stride + 1
        self._shuffled = -1, np.empty(0, np.int64)  # a pass and its windows' starts, in order

    def starts(self, number: int) -> np.ndarray:
        first, B = number * self.dataset.batch_size, self.dataset.batch_size
        found: list[np.ndarray] = []
        while B:
            epoch, place = divmod(first, self.windows)
            count = min(B, self.windows - place)
            found.append(self._of_epoch(epoch, place, count))
            first, B = first + count, B - count
        return np.concatenate(found)

    def _of_epoch(self, epoch: int, place: int, count: int) -> np.ndarray:
        """Returns where `count` windows of a pass begin, from the one at `place` in its order."""
        data, W = self.dataset, self.windows
        key = hash64(data.seed, 7, epoch)
        offset = hash64(data.seed, 8, epoch) % self._offsets * self.stride
        if W > MAX_SHUFFLED:
            return permuted(np.arange(place, place + count), W, key) * data.block_size + offset
        shuffled = self._shuffled  # another thread may draw from another pass
        if shuffled[0] != epoch:
            order = np.argsort(hash_words(np.arange(W), key))
            self._shuffled = shuffled = epoch, order * data.block_size + offset
        return shuffled[1][place : place + count]


class Epochs(Sampler):
    """The training part cut into windows, each used once per epoch.

    Every epoch has its own order, and its own offset, a multiple of stride. An update never spans
    two epochs, so the last batches of an epoch may have fewer windows, or none. Where windows count
    differently, batches have nearly the same number of them instead, which count about as much.
    """

    def __init__(self, dataset: Dataset, batches: int = 1, stride: int = 1) -> None:
        super().__init__(dataset, batches, stride)
        self.windows = (len(dataset.train) - 1) // dataset.block_size
        self.steps = math.ceil(self.windows / (batches * dataset.batch_size))  # updates per epoch
        self._weights = dataset.window_weights
        self._shuffled = -1, np.empty(0, np.int64)  # an epoch and its windows' starts, in order

    @property
    def max_batch_size(self) -> int:
        if self._weights is not None:
            return math.ceil(self.windows / (self.steps * self.batches))
        return min(self.dataset.batch_size, self.windows)

    @property
    def smaller_batch_size(self) -> int:
        """Windows of the other batches, if not all have max_batch_size; 0 if they have none."""
        if self._weights is not None:
            least, more = divmod(self.windows, self.steps * self.batches)
            return least if more else 0
        return self.windows % self.dataset.batch_size

    def starts(self, number: int) -> np.ndarray:
        epoch = number // (self.steps * self.batches)
        first, last = self._first(number), self._first(number, 1)
        if self.windows > MAX_SHUFFLED:
            key, T = hash64(self.dataset.seed, 3, epoch), self.dataset.block_size
            return permuted(np.arange(first, last), self.windows, key) * T + self._offset(epoch)
        shuffled = self._shuffled  # another thread may draw from another epoch
        if shuffled[0] != epoch:
            self._shuffled = shuffled = epoch, self._shuffle(epoch)
        return shuffled[1][first:last]

    def windows_in_batch(self, number: int) -> int:
        return self._first(number, 1) - self._first(number)

    def _first(self, number: int, following: int = 0) -> int:
        """-> the place in its epoch of the first window of a batch, or of one `following` it."""
        count = self.steps * self.batches
        index = number % count + following
        if self._weights is not None:
            return -(-self.windows * index // count)  # the first one has the most
        return min(index * self.dataset.batch_size, self.windows)

    def _shuffle(self, epoch: int) -> np.ndarray:
        data = self.dataset
        hashes = hash_words(np.arange(self.windows), hash64(data.seed, 3, epoch))
        order = np.argsort(hashes)
        if self._weights is not None:
            ends = [self._first(number, 1) for number in range(self.steps * self.batches)]
            random = (hashes >> np.uint64(11)) / 2.0**53  # from 0 to 1
            order = _balanced(self._weights, np.diff(ends, prepend=0), random, order)
        return order * data.block_size + self._offset(epoch)

    def _offset(self, epoch: int) -> int:
        """Returns where the first window of an epoch begins."""
        data = self.dataset
        # The windows do not fill the text: which tokens are unused changes from epoch to epoch.
        unused = len(data.train) - 1 - self.windows * data.block_size
        return hash64(data.seed, 4, epoch) % (unused // self.stride + 1) * self.stride


def _balanced(
    weights: np.ndarray, sizes: np.ndarray, random: np.ndarray, order: np.ndarray
) -> np.ndarray:
    """weights (n,) -> the order of n windows in which batches of these sizes weigh about the same.

    The heaviest windows first, one for each batch: always the heaviest one to the batch that weighs
    least so far. `random` (n,) and `order` (n,) make that another order in each epoch.
    """
    count, least = len(sizes), int(sizes.min())
    if sizes.max() <= 1:
        return order
    heaviest_first = np.argsort(-weights * (1 + BLUR_SHARE * random), kind="stable")
    weighed, batch_of = np.zeros(count), np.empty(len(weights), np.int64)
    shuffled = order[order < count]  # the batches: of those that weigh the same, any may be first
    batches = [np.arange(count)] * least + [np.flatnonzero(sizes > least)]
    first = 0
    for receiving in batches:
        dealt = heaviest_first[first : first + len(receiving)]
        first += len(receiving)
        among = shuffled[np.isin(shuffled, receiving)]
        lightest_first = among[np.argsort(weighed[among], kind="stable")]
        batch_of[dealt] = lightest_first
        weighed[lightest_first] += weights[dealt]
    return np.argsort(batch_of, kind="stable")


def make_sampler(dataset: Dataset, config: TrainingConfig, stride: int = 1) -> Sampler:
    """Returns the sampler of a run: Epochs if its length is in epochs, else as `sampling` says."""
    kinds = {"random": RandomWindows, "shuffled": ShuffledWindows}
    kind = Epochs if config.epochs else kinds[config.sampling]
    return kind(dataset, config.grad_accum_steps, stride)


def count_steps(config: TrainingConfig, data: Dataset) -> TrainingConfig:
    """-> the config with its length and its warmup in steps, whichever of them is set in epochs."""
    if not config.epochs and config.warmup_epochs is None:
        return config.with_warmup(0)
    per_epoch = Epochs(data, config.grad_accum_steps).steps
    if config.epochs:
        config = dataclasses.replace(config, steps=config.epochs * per_epoch)
    return config.with_warmup(per_epoch)


def draw(sampler: Sampler, number: int, out: Batch | None = None) -> Batch:
    """-> batch `number`, from 0, in the first rows of `out` if there is one."""
    return sampler.dataset.windows(sampler.starts(number), out)
