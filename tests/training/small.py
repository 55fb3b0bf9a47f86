"""A small model on a short text, for tests that plant faults in it."""

import itertools

from smallmind import Tokenizer, Training, TransformerModel
from smallmind.text.samplers import RandomWindows, draw

TEXT = "the cat sat on the mat. the dog sat on the log. " * 40


def small_training(seed=1337, batch_size=4, model_seed=42, **settings):
    tokenizer = Tokenizer(TEXT)
    shape = {"block_size": 16, "n_embd": 32, "n_layer": 2, "n_head": 2, "seed": model_seed}
    model = TransformerModel(tokenizer.vocab_size, **{**shape, **settings})
    return Training(model, tokenizer, TEXT, batch_size=batch_size, seed=seed)


def at_each_pass(model, before=lambda _: None, after=lambda _: None, name="loss_and_gradients"):
    """Calls both with the number of each pass of a model, from 1.

    Unless it is None, what `after` returns is the loss of that pass.
    """
    original, numbers = getattr(model, name), itertools.count(1)

    def passing(*arguments, **named):
        number = next(numbers)
        before(number)
        loss = original(*arguments, **named)
        other = after(number)
        return loss if other is None else other

    setattr(model, name, passing)


def small_model(**settings):
    """A model with the gradients of one batch, and that batch."""
    training = small_training(**settings)
    batch = draw(RandomWindows(training.data), 0)[:2]
    training.model.loss_and_gradients(*batch)
    return training.model, batch
