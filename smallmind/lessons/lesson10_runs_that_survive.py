# %% [markdown]
# # Runs that survive
#
# Batteries run out, systems restart for updates, clusters kill jobs after an hour: a long run has
# to survive all of that. After this lesson you will be able to
#
# - write a file that is never half written, whatever happens in the meantime;
# - list everything that a checkpoint of a training run must hold, and show what goes wrong without
#   each part;
# - explain why the same program may give different bits on two threads than on one, and write sums
#   that do not;
# - kill a run in the middle of a save, resume it, and prove that nothing was lost or changed.
#
# The goal is strict: a run that was interrupted ends with **the same bits** as one that was not.
# With "about the same loss", a mistake in resuming would look like noise.
#
# **Before:** lesson 1; lesson 8 for how sums are rounded. **Time:** 70 minutes; the code runs for 5
# seconds.

# %%
import json
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

import smallmind
from smallmind.kernels.codegen.threads import max_threads
from smallmind.lessons import judge
from smallmind.lessons.pictures import draw
from smallmind.parallel.environment import python
from smallmind.randomness import hash64
from smallmind.text.stories import built_in_text

smallmind.set_threads(1)
FOLDER = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
HERE = Path(FOLDER.name)

# %% [markdown]
# ## 1. How a file is lost
#
# The obvious way to save, `open(path, "wb").write(data)`, first empties the old file, then writes
# the new contents piece by piece. If the program dies in between, the new file is incomplete and
# the old one is gone: the moment of saving is the most dangerous one.
#
# This program saves a state, saves a second one over it, and says so when half of that is written.
# At that moment we kill it, without a chance to clean up: `Popen.kill` sends SIGKILL, or on Windows
# calls TerminateProcess.

# %%
CARELESS = """
import sys, time
path, old, new = sys.argv[1], b"1" * 1000, b"2" * 1000
open(path, "wb").write(old)
with open(path, "wb") as file:
    file.write(new[:500])
    file.flush()
    print("half written", flush=True)
    time.sleep(60)
    file.write(new[500:])
"""


def kill_when_it_speaks(program, *arguments):
    """Starts a Python program and kills it as soon as it has printed a line -> that line."""
    command = python(program, *map(str, arguments))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.kill()
    assert line, "the program ended before it could be killed"
    return line.strip()


print(kill_when_it_speaks(CARELESS, HERE / "careless"))
content = (HERE / "careless").read_bytes()
print(f"{len(content)} bytes are left, of 1000; {content.count(b'1')} of them from the first state")

# %% [markdown]
# ## 2. Complete or absent
#
# The remedy is never to touch the old file. Write a second one next to it, under another name. When
# it is complete, rename it to the final name. Renaming is **atomic**: at every moment, the name
# refers either to the old file or to the new one. (POSIX demands this of `rename`. In Python, use
# `os.replace`: on Windows, `os.rename` refuses to replace a file.)
#
# That is enough for a program that is killed. It is not enough for a power failure, because the
# operating system keeps what was written in memory for a while. It may write the new *name* to the
# disk before the new *contents*. After a power failure the name then refers to an empty file. So:
#
# 1. create a temporary file in the same directory, and write everything to it;
# 2. `fsync` the file: wait until its contents are on the disk;
# 3. rename it over the target;
# 4. `fsync` the directory, which holds the names: only then is the new file certain to survive.
#
# `smallmind.files.durable.write` does exactly this, for every file that matters. You can write it
# yourself in exercise 1, on a simulated disk that fails at every possible moment.
#
# ## 3. What must be in it
#
# Training is a function that is applied again and again: state after step n + 1 = f(state after
# step n). If we save *everything* that f reads, a resumed run cannot notice that it was
# interrupted. So what does f read? Take a training loop of our own:
#
# - the weights, of course;
# - the optimizer: AdamW keeps two running means per weight, m and v, and the number of updates so
#   far, with which it corrects both means for having started at zero;
# - the place in the data: which batch comes next;
# - the random state: dropout turns off random activations, and should not repeat itself.
#
# We train 20 steps, keep a copy of all of these, and train 20 more. Then we resume from step 20
# several times, each time without one part of the state, and compare the weights after step 40 bit
# by bit.

# %%
TEXT = built_in_text()[:100_000]
TOKENIZER = smallmind.Tokenizer(TEXT)
TOKENS = TOKENIZER.encode(TEXT)
T = 32


def batch(number, B=8):
    """Returns batch `number`, a pure function of its number: ids and targets, (B, T)."""
    starts = np.array([hash64(1337, number, row) % (len(TOKENS) - T) for row in range(B)])
    windows = TOKENS[starts[:, None] + np.arange(T + 1)]
    return windows[:, :-1], windows[:, 1:]


def new_model():
    return smallmind.TransformerModel(TOKENIZER.vocab_size, T, 32, 2, 2, dropout=0.1, seed=1)


def train(model, optimizer, first, last):
    for number in range(first, last):
        model.loss_and_gradients(*batch(number))
        optimizer.step(max_grad_norm=1.0)


model = new_model()
optimizer = smallmind.AdamW(model, learning_rate=1e-3)
train(model, optimizer, 0, 20)
saved = {
    "weights": model.flat.data.copy(),
    "means": {name: array.copy() for name, array in optimizer.tensors().items()},
    "updates": optimizer.state(),
    "passes": model.passes,  # through the model so far: dropout masks follow from this number
    "next batch": 20,
}
train(model, optimizer, 20, 40)
expected = model.flat.data.copy()


def resumed(parts):
    """Returns the weights after step 40 of a run resumed at step 20 with parts of its state."""
    model = new_model()
    optimizer = smallmind.AdamW(model, learning_rate=1e-3)
    if "weights" in parts:
        model.flat.data[:] = saved["weights"]
    if "means" in parts:
        for name, array in optimizer.tensors().items():
            array[...] = saved["means"][name]
    if "updates" in parts:
        optimizer.load_state(saved["updates"])
    if "passes" in parts:
        model.passes = saved["passes"]
    first = saved["next batch"] if "next batch" in parts else 0
    train(model, optimizer, first, first + 20)
    return model.flat.data


print("resumed at step 20 with everything but -> weights that differ after step 40")
for left_out in (*saved, "nothing"):
    found = resumed(saved.keys() - {left_out})
    different, largest = np.mean(found != expected), np.abs(found - expected).max()
    print(f"  {left_out:10} -> {different:6.1%}, by up to {largest:.1e}")
assert np.array_equal(found, expected)

# %% [markdown]
# Only the last line has no differences. None of the others raised an error, and their losses would
# look plausible. That is why bits are worth comparing.
#
# A run has a little more state than our loop: the loss scale (in float16), the learning-rate
# schedule if it reacts to the loss, the best evaluation so far. In this package all of it is one
# value, `training.state.RunState`: arrays by name, and the rest as JSON. Saving, resuming and
# rolling back after a loss spike use the same value, so none of them can forget a part that the
# others know.
#
# ## 4. Randomness without a state
#
# Where is the generator of random numbers in that list? There is none. The usual generator has an
# inner state that changes with each number drawn. That state must be saved, and it depends on
# whatever has drawn from it before: another thread, an evaluation, a sample of text.
#
# This package *computes* random numbers instead, by hashing what they are for: the seed, the number
# of the step, the position. The batch above is made that way, and dropout masks are as well. The
# random state in a checkpoint is then just a counter, and any number can be computed again at any
# time, in any order, on any thread.

# %%
for number in (0, 1, 20):
    print(f"hash64(seed=1337, batch={number}, row=0) = {hash64(1337, number, 0):#018x}")


# %% [markdown]
# ## 5. The order of a sum
#
# We have quietly assumed that f itself gives the same bits every time. It often does not. Addition
# of floating-point numbers is rounded, so it is not associative:

# %%
big, one = np.float32(1e8), np.float32(1)
print("(1e8 + 1) - 1e8 =", (big + one) - big)
print("(1e8 - 1e8) + 1 =", (big - big) + one)

# %% [markdown]
# A gradient is a sum over all tokens. The natural way to compute it on several threads is to give
# each thread an equal share and add up what they return. But then the number of threads decides
# where the shares begin and end, which decides which numbers are added first:


# %%
@njit
def in_order(x):
    total = np.float32(0)
    for value in x:
        total += value
    return total


def bits(x):
    """Returns the bits of a float32, as hexadecimal digits."""
    return struct.pack(">f", x).hex()


def sum_of_shares(x, threads):
    """Sums in shares, one for each of `threads` threads, then adds up the shares."""
    return in_order(np.array([in_order(part) for part in np.array_split(x, threads)]))


CHUNK = 1024


def sum_of_chunks(x, threads):
    """Sums of chunks of a fixed size, whichever thread computes them, added up in their order."""
    chunks = [x[start : start + CHUNK] for start in range(0, len(x), CHUNK)]
    sums = np.empty(len(chunks), np.float32)
    for thread in range(threads):
        for i in range(thread, len(chunks), threads):  # this thread's chunks
            sums[i] = in_order(chunks[i])
    return in_order(sums)


X = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
print("threads   shares     chunks")
for threads in (1, 2, 3, 4):
    print(f"{threads:7}   {bits(sum_of_shares(X, threads))}   {bits(sum_of_chunks(X, threads))}")
assert len({bits(sum_of_chunks(X, threads)) for threads in range(1, 9)}) == 1

# %% [markdown]
# The last digits of the shares differ. Training amplifies such a difference: sooner or later two
# runs have visibly different losses, and "was that my change, or the other machine?" has no answer.
#
# So the rule in this package: **each iteration of a parallel loop owns what it writes, and sums run
# in chunks that depend on the shapes only.** How many threads there are decides which of them
# computes a chunk, never what is in it. The matrix product follows the same rule: a thread owns
# whole tiles of the result and runs through all of K itself.


# %%
def gradient_on(threads):
    """Returns the gradient of a new model, computed on this many threads."""
    smallmind.set_threads(threads)
    model = new_model()
    model.loss_and_gradients(*batch(0, B=64))
    smallmind.set_threads(1)
    return model.flat.grad


THREADS = min(2, max_threads())
gradients = [gradient_on(threads) for threads in (1, THREADS)]
same = np.array_equal(*gradients)
assert same
print(f"{gradients[0].size:,} gradients, on 1 thread and on {THREADS}: the same bits: {same}")

# %% [markdown]
# What still matters is the instruction set. Sums in vectors of 16 numbers are added up in another
# order than sums in vectors of 8, so a run that moves to another kind of processor continues with
# different bits. smallmind says so when that happens.
#
# ## 6. The proof
#
# Now for everything together, with a real run. First, one that is not disturbed:

# %%
SETTINGS: dict[str, Any] = {
    "recipe": "gpt2",
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 2,
    "block_size": 32,
    "batch_size": 8,
    "dropout": 0.1,
    "steps": 60,
    "save_every": 20,
    "log_every": 1,
    "val_every": 0,
    "precision": "float32",
}
whole = smallmind.Run.create(out=HERE / "whole", threads=1, **SETTINGS)
whole.train()
print(whole)

# %% [markdown]
# Then the same in a process of its own, on two threads if there are two, which we kill in the
# middle of a save. To hit that moment, the program replaces `durable.files`, the few disk
# operations through which all files are written (this is also how the tests of this package make
# each of them fail). When the checkpoint of step 40 is half written, it says so and waits to be
# killed.

# %%
VICTIM = """
import json, sys, time
import smallmind
from smallmind.files import durable
from smallmind.kernels.codegen.threads import max_threads

class Slow(durable.Files):
    writes, checkpoint = 0, None

    def create(self, path):
        file = super().create(path)
        if "step-00000040" in path.name:
            self.checkpoint = file
        return file

    def write(self, file, data):
        if file == self.checkpoint:
            self.writes += 1
        if self.writes == 12:  # the header comes first, then a write for each array
            super().write(file, data[: len(data) // 2])
            print(f"writing array {self.writes - 1} of the checkpoint of step 40", flush=True)
            time.sleep(60)
        return super().write(file, data)

durable.files = Slow()
threads = min(int(sys.argv[2]), max_threads())  # of this process, which may have fewer cores
smallmind.Run.create(out=sys.argv[1], threads=threads, **json.loads(sys.argv[3])).train()
"""
print(kill_when_it_speaks(VICTIM, HERE / "killed", THREADS, json.dumps(SETTINGS)))
for path in sorted((HERE / "killed" / "checkpoints").iterdir()):
    print(f"  {path.stat().st_size:9,} bytes  {path.name}")

# %% [markdown]
# There is a complete checkpoint of step 20, and an incomplete file under a temporary name, which
# nothing will ever mistake for a checkpoint. We resume, on one thread this time.

# %%
killed = smallmind.Run.open(HERE / "killed")
print(killed)
killed.resume(threads=1)
print(killed)
for path in sorted((HERE / "killed" / "checkpoints").iterdir()):
    print(f"  {path.stat().st_size:9,} bytes  {path.name}")

ours, theirs = ((HERE / name / "model.safetensors").read_bytes() for name in ("whole", "killed"))
assert ours == theirs
print(f"model.safetensors of both runs: {len(ours):,} bytes, identical: {ours == theirs}")
draw("lesson10_loss", killed.metrics().losses_svg())

# %% [markdown]
# In the picture of its losses nothing shows where it was killed.
#
# Twenty steps had to be repeated, and that is all the damage: `save_every` decides how much work a
# crash may cost. The temporary file is gone too: a run locks its directory while it trains, and the
# next process that gets the lock removes what a dead one left behind.
#
# ## 7. Complete, and wrong
#
# One danger is left: a file that was written completely and damaged later, by a failing disk or an
# incomplete copy. A number with one wrong bit is still a number. So each checkpoint holds a SHA-256
# of itself, and `verify` goes one step further: it trains again from each checkpoint and compares
# the result with the next one.

# %%
for verdict in killed.verify():
    print(f"  {verdict.name}: {verdict.fault or 'intact'}")

newest = HERE / "killed" / "checkpoints" / "step-00000060.safetensors"
damaged = bytearray(newest.read_bytes())
damaged[len(damaged) // 2] ^= 1  # a single bit
newest.write_bytes(damaged)
print("after one bit of the newest checkpoint was flipped:")
for verdict in killed.verify(digests_only=True):
    fault = "intact" if verdict.fault is None else verdict.fault.partition(": ")[2]
    print(f"  {verdict.name}: {fault}")
state = smallmind.Run.open(HERE / "killed").newest()
print(f"a run that resumes now would do so from step {state.step if state else 0}")

# %% [markdown]
# ## Exercises
#
# ### Exercise 1: an atomic write
#
# Here is a simulated disk. What has not been synced may or may not be lost when the power fails.
# Write `save(disk, name, data)` with `create`, `write`, `sync`, `rename` and `sync_directory`, so
# that at every moment the file `name` is either the old one or the new one, and after `save` has
# returned it is certain to be the new one.


# %%
class PowerFailure(Exception):
    pass


class File:
    def __init__(self, content=b""):
        self.content = content  # as programs see it
        self.synced = content  # as it is on the disk for certain


class Disk:
    """A directory whose power fails after a number of operations."""

    def __init__(self, files, fails_after):
        self.names = {name: File(content) for name, content in files.items()}
        self.synced_names = dict(self.names)
        self.log = []
        self._left = fails_after

    def _operation(self, shown):
        if self._left == 0:
            raise PowerFailure
        self._left -= 1
        self.log.append(shown)

    def create(self, name):
        """Creates an empty file. An existing one is emptied, as by open(name, "wb")."""
        self._operation(f"create {name}")
        if name in self.names:
            self.names[name].content = self.names[name].synced = b""
        else:
            self.names[name] = File()

    def write(self, name, data):
        """Appends data to a file."""
        half = len(data) // 2
        self._operation(f"write half of {name}")
        self.names[name].content += data[:half]
        self._operation(f"write the rest of {name}")
        self.names[name].content += data[half:]

    def sync(self, name):
        """Waits until the contents of a file are on the disk."""
        self._operation(f"sync {name}")
        self.names[name].synced = self.names[name].content

    def rename(self, old, new):
        """Gives a file another name, atomically; whatever had that name is gone."""
        self._operation(f"rename {old} to {new}")
        self.names[new] = self.names.pop(old)

    def sync_directory(self):
        """Waits until all names are on the disk."""
        self._operation("sync the directory")
        self.synced_names = dict(self.names)

    def possible(self, name) -> Iterator[bytes | None]:
        """Returns what the file may hold after a power failure or a kill; None: no such file."""
        for names in (self.names, self.synced_names):
            yield names[name].synced if name in names else None
        yield self.names[name].content if name in self.names else None


def save(disk, name, data):
    raise NotImplementedError


def check_save(candidate):
    old, new = b"old state", b"new state, longer"
    for operations in range(20):
        disk = Disk({"state": old}, operations)
        try:
            candidate(disk, "state", new)
        except PowerFailure:
            has_returned = False
        else:
            has_returned = True
        so_far = ", ".join(disk.log) or "nothing"
        for content in disk.possible("state"):
            assert content is not None, f"after {so_far}, there may be no file 'state' at all"
            assert content in (old, new), f"after {so_far}, the file may hold {content!r}"
            assert content == new or not has_returned, (
                f"after {so_far}, your function returns, but a power failure may still bring back "
                "the old file"
            )
        if has_returned:
            return
    raise AssertionError("it takes 20 operations and more; six are enough")


print("Exercise 1:", judge(lambda: check_save(save)))

# %% [markdown]
# ### Exercise 2: a sum that does not depend on the number of threads
#
# Write `parallel_sum(x, threads, add)`. `add(thread, part)` has a thread add up an array, one
# number after the other, and returns the sum as float32; threads are numbered from 0. Add up what
# it returns yourself. No thread may have much more to do than another, but the bits must not depend
# on `threads`.


# %%
def parallel_sum(x, threads, add):
    raise NotImplementedError


def check_parallel_sum(candidate):
    x = np.random.default_rng(1).standard_normal(20_011).astype(np.float32)
    exact, found = float(x.sum(dtype=np.float64)), {}
    for threads in (1, 2, 3, 4, 7):
        load = [0] * threads

        def add(thread, part, load=load):
            assert 0 <= thread < len(load), f"there is no thread {thread} of {len(load)}"
            load[thread] += len(part)
            return in_order(np.asarray(part))

        total = np.float32(candidate(x, threads, add))
        assert sum(load) >= len(x) - 1, f"the threads added up {sum(load):,} of {len(x):,} numbers"
        assert abs(total - exact) < 0.01, (
            f"with threads={threads} the sum is {total}, not {exact:.4f}"
        )
        most = max(load)
        assert most <= len(x) / threads + 2048, (
            f"one of {threads} threads adds up {most:,} of {len(x):,} numbers: divide them evenly"
        )
        found[threads] = bits(total)
    shown = ", ".join(f"{threads}: {value}" for threads, value in found.items())
    assert len(set(found.values())) == 1, (
        f"the bits depend on the number of threads ({shown}): the parts that are added up, and the "
        "order in which their sums are, must not"
    )


print("Exercise 2:", judge(lambda: check_parallel_sum(parallel_sum)))

# %% [markdown]
# ### Exercise 3: a checkpoint
#
# `Trainer` fits a linear function by gradient descent with momentum. In every epoch it visits the
# examples in a new random order. Write `save_state(trainer)`, which returns a JSON text, and
# `load_state(text)`, which returns a trainer that continues bit for bit.
# (`trainer.random.bit_generator.state` is the whole state of a NumPy generator, in integers. It can
# be read and assigned. JSON keeps a Python float exactly.)

# %%
EXAMPLES = np.random.default_rng(2).standard_normal((20, 3))
ANSWERS = EXAMPLES @ np.array([1.0, -2.0, 0.5])


class Trainer:
    def __init__(self, seed=0):
        self.random = np.random.default_rng(seed)
        self.weights = np.zeros(3)
        self.velocity = np.zeros(3)
        self.steps = 0
        self.order = self.random.permutation(len(EXAMPLES))
        self.place = 0  # in the order

    def step(self):
        if self.place == len(EXAMPLES):
            self.order, self.place = self.random.permutation(len(EXAMPLES)), 0
        x, answer = EXAMPLES[self.order[self.place]], ANSWERS[self.order[self.place]]
        self.place += 1
        self.steps += 1
        rate = 0.02 / (1 + self.steps / 100)  # decays
        gradient = 2 * (x @ self.weights - answer) * x
        self.velocity = 0.9 * self.velocity + gradient
        self.weights = self.weights - rate * self.velocity


def save_state(trainer):
    raise NotImplementedError


def load_state(text):
    raise NotImplementedError


def check_state(candidate_save, candidate_load):
    for killed_after in (0, 1, 7, 20, 33):
        trainer = Trainer()
        for _ in range(killed_after):
            trainer.step()
        text = candidate_save(trainer)
        assert isinstance(text, str), (
            f"save_state must return a JSON text, not {type(text).__name__}"
        )
        json.loads(text)
        found = candidate_load(text)
        assert isinstance(found, Trainer), "load_state must return a Trainer"
        after = f"resumed after step {killed_after}, "
        for name in ("weights", "velocity", "steps", "order", "place"):
            was, now = getattr(trainer, name), getattr(found, name)
            assert np.array_equal(was, now), f"{after}it has another {name}: {now}, not {was}"
            assert type(was) is type(now), f"{after}{name} is a {type(now)}, not a {type(was)}"
        random = trainer.random.bit_generator.state, found.random.bit_generator.state
        assert random[0] == random[1], f"{after}its generator will draw other orders"
        for _ in range(50):
            trainer.step()
            found.step()
        assert np.array_equal(trainer.weights, found.weights), f"{after}its weights come to differ"


print("Exercise 3:", judge(lambda: check_state(save_state, load_state)))

# %%
FOLDER.cleanup()

# %% [markdown]
# ## Where to read on
#
# - Pillai et al. (2014), *All File Systems Are Not Created Equal: On the Complexity of Crafting
#   Crash-Consistent Applications*, OSDI: what file systems promise, and what programs assume.
# - Salmon et al. (2011), *Parallel Random Numbers: As Easy as 1, 2, 3*, SC11: random numbers from
#   counters.
# - Higham (2002), *Accuracy and Stability of Numerical Algorithms*, chapter 4: summation.
# - Demmel, Nguyen (2013), *Fast Reproducible Floating-Point Summation*, ARITH: sums that do not
#   depend on the order at all.
# - POSIX, `rename` and `fsync`; Python, `os.replace`.
# - In this package: `durable.py` (two pages), `training/live_state.py` (what a state is),
#   `kernels/reduce.py` (sums in chunks), and `tests/faults/` in the repository, which kills runs at
#   every operation of the disk.
#
# ## What you can do now
#
# You can pull the plug in the middle of a run and lose minutes, and show that the result is the
# same to the bit. Next: lesson 11, *Export and import*, on taking it to other programs.
