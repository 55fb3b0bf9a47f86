"""Conversations in windows: each once, whole, apart from the others; resumed to the bit."""

import numpy as np
import pytest

from smallmind import InputError, Tokenizer
from smallmind.text import samplers
from smallmind.text.chat import MARK_KINDS, TEXT, Turn, encode_each
from smallmind.text.conversations import PackedDataset, PackedRows, find_pieces
from smallmind.text.samplers import Epochs, RandomWindows, draw
from smallmind.text.templates import fit_template

TOKENIZER, TEMPLATE = fit_template(Tokenizer(kind="byte"), "chatml")


def conversation(random, turns=1, longest=30):
    def words():
        return "".join(random.choice(list("abc de"), random.integers(1, longest)))

    pairs = [(Turn("user", words()), Turn("assistant", words())) for _ in range(turns)]
    return [turn for pair in pairs for turn in pair]


def marked(conversations):
    return np.concatenate(list(encode_each(TOKENIZER, TEMPLATE, conversations)))


def made(conversations, T=128, B=3, held_out=2, **settings):
    parts = marked(conversations[:-held_out]), marked(conversations[-held_out:])
    return PackedDataset(*parts, T, B, 7, TOKENIZER, **settings)


@pytest.fixture(scope="module")
def conversations():
    random = np.random.default_rng(5)
    return [conversation(random) for _ in range(40)]


def documents(batch):
    """The inputs and targets of each document of a batch that has something to learn."""
    for ids, targets, weights, firsts in zip(
        batch.ids, batch.targets, batch.weights, batch.firsts, strict=True
    ):
        for first in np.unique(firsts):
            own = firsts == first
            if weights[own].any():
                yield ids[own], targets[own], weights[own]


def test_an_epoch_has_each_conversation_once_and_whole(conversations):
    data = made(conversations)
    sampler = Epochs(data, 2)
    batches = [draw(sampler, number) for number in range(2 * sampler.steps)]
    wanted = sorted(
        tuple(tokens.tolist()) for tokens in encode_each(TOKENIZER, TEMPLATE, conversations[:-2])
    )
    found = []
    for batch in batches:
        for ids, targets, _ in documents(batch):
            np.testing.assert_array_equal(ids[1:], targets[:-1])
            found.append((*ids.tolist(), int(targets[-1])))
    assert sorted(found) == sorted(tuple(t // MARK_KINDS for t in tokens) for tokens in wanted)


def learned_of_updates(data, batches):
    """The rows and the learned tokens of each update, for two epochs."""
    sampler = Epochs(data, batches)
    found = []
    for epoch in range(2):
        rows, learned = [], []
        for step in range(epoch * sampler.steps + 1, (epoch + 1) * sampler.steps + 1):
            numbers = [n for n in sampler.batches_in_step(step) if sampler.windows_in_batch(n)]
            drawn = [draw(sampler, number).copy() for number in numbers]
            assert all(len(batch.ids) <= sampler.max_batch_size for batch in drawn)
            assert sampler.windows_in_step(step) == sum(len(batch.ids) for batch in drawn)
            rows += [int(start) // data.block_size for batch in drawn for start in batch.starts]
            learned.append(sum(int(batch.weights.sum()) for batch in drawn))
        found.append((rows, learned))
    return found


@pytest.mark.parametrize(
    ("batch_size", "batches"), [(1, 1), (2, 1), (4, 1), (8, 1), (3, 2), (1, 4)]
)
def test_updates_learn_about_the_same_number_of_tokens(batch_size, batches):
    """There are many short conversations and a few long ones."""
    random = np.random.default_rng(2)
    some = [conversation(random) for _ in range(500)]
    some += [conversation(random, turns=6) for _ in range(12)]
    random.shuffle(some)
    data = made(some, T=512, B=batch_size)
    (first, learned), (second, others) = learned_of_updates(data, batches)
    assert sorted(first) == sorted(second) == list(range(data.train.count))
    assert first != second
    assert sum(learned) == sum(others) == data.train.learned
    for found in (learned, others):
        assert max(found) < 1.3 * np.mean(found) and min(found) > 0.7 * np.mean(found)


def test_rows_that_cannot_be_even_are_dealt_to_batches_that_are():
    """Long conversations have a row each, with a few or with hundreds of learned tokens."""
    weights = np.array([5, 900, 10, 850, 400, 420, 30, 700, 650, 200, 220, 810])
    random, order = np.random.default_rng(0).random(12), np.random.default_rng(1).permutation(12)
    for sizes in ([4, 4, 4], [3, 3, 3, 3], [2] * 6):
        dealt = samplers._balanced(weights, np.array(sizes), random, order)
        assert sorted(dealt) == list(range(12))
        sums = [weights[part].sum() for part in np.split(dealt, np.cumsum(sizes)[:-1])]
        assert max(sums) < 1.4 * np.mean(sums) and min(sums) > 0.6 * np.mean(sums)


def test_the_weights_are_those_of_answers_or_of_all(conversations):
    for learn in ("answers", "all"):
        data = made(conversations, learn=learn)
        batch = draw(RandomWindows(data, stride=data.stride), 0)
        for ids, targets, weights in documents(batch):
            text = TOKENIZER.decode(targets)
            answer = text[text.index("assistant\n") + len("assistant\n") : -1]
            learned = TOKENIZER.decode(targets[weights > 0])
            assert learned == (answer if learn == "answers" else text)
            assert ids[0] == TOKENIZER.special["<|im_start|>"]


def test_places_without_a_conversation_are_documents_of_their_own(conversations):
    data = made(conversations)
    batch = data.windows(np.arange(data.train.count) * data.block_size)
    places = np.arange(data.block_size)
    assert (batch.firsts <= places).all()
    empty = (batch.firsts == places) & (batch.ids == 0) & (batch.weights == 0)
    assert empty.sum() == round(data.train.padding * empty.size)


def test_a_batch_does_not_depend_on_those_before_it(conversations):
    data = made(conversations)
    for sampler in (Epochs(data), RandomWindows(data, stride=data.stride)):
        drawn = [draw(sampler, number).copy() for number in range(9)]
        for number in (8, 3, 5):
            for a, b in zip(draw(sampler, number), drawn[number], strict=True):
                np.testing.assert_array_equal(a, b)


def test_evaluations_see_each_row_once(conversations):
    data = made(conversations, held_out=15)
    for part, rows in (("train", data.train), ("held_out", data.held_out)):
        batches = [data.evaluation_batch(part, i) for i in range(data.batches_of(part))]
        seen = np.sort(np.concatenate([batch.starts for batch in batches]))
        np.testing.assert_array_equal(seen, np.arange(rows.count))
        assert sum(batch.weights.sum() for batch in batches) == rows.learned


def test_a_long_conversation_is_cut_before_a_turn_that_follows_an_answer():
    random = np.random.default_rng(1)
    long = conversation(random, turns=12, longest=20)
    tokens = marked([long])
    pieces = find_pieces(tokens, 200)
    assert pieces.divided == 1 and pieces.cut_short == pieces.left_out == 0
    assert len(pieces.begins) > 1 and (pieces.lengths <= 201).all()
    np.testing.assert_array_equal(pieces.begins[1:], (pieces.begins + pieces.lengths)[:-1])
    for begin in pieces.begins:
        text = TOKENIZER.decode(tokens[begin : begin + 20] // MARK_KINDS)
        assert text.startswith("<|im_start|>user\n")


def test_turns_that_are_longer_than_a_window():
    answer = [Turn("user", "a"), Turn("assistant", "b" * 300)]
    question = [Turn("user", "a" * 300), Turn("assistant", "b")]
    pieces = find_pieces(marked([answer, question]), 100)
    assert (pieces.divided, pieces.cut_short, pieces.left_out) == (0, 2, 1)
    assert pieces.lengths.tolist() == [101]
    with pytest.raises(InputError, match="there is no answer to train on"):
        made([question] * 3, T=100, held_out=1)


def test_a_plain_document_is_learned_whole_in_pieces():
    text = "abcdefghij" * 30
    tokens = marked([[Turn(TEXT, text)], [Turn("user", "a"), Turn("assistant", "b")]])
    pieces = find_pieces(tokens, 100)
    assert pieces.lengths[:3].tolist() == [101, 101, 100]
    assert pieces.learned[:3].sum() == 299


def test_questions_are_what_was_asked_before_each_answer(conversations):
    random = np.random.default_rng(2)
    several = [conversation(random, turns=3, longest=6) for _ in range(4)]
    data = made(several, T=400)
    questions = data.questions(100, 40)
    assert len(questions) == 6
    for question, (asked, answer) in zip(
        questions,
        [pair for c in several[-2:] for pair in zip(c[::2], c[1::2], strict=True)],
        strict=True,
    ):
        assert TOKENIZER.decode(question.answer) == answer.text + "<|im_end|>"
        assert TEMPLATE.last_said(TOKENIZER.decode(question.asked)) == asked.text
        assert TOKENIZER.decode(question.ids).endswith("<|im_start|>assistant\n")


def learns_the_answers_alone(conversations):
    """True if the learned targets of a run are its answers, each with the token that ends it."""
    data = made(conversations)
    batch = data.windows(np.arange(data.train.count) * data.block_size)
    wanted = sorted(turns[1].text + "<|im_end|>" for turns in conversations[:-2])
    found = [TOKENIZER.decode(targets[w > 0]) for _, targets, w in documents(batch)]
    return sorted(found) == wanted


def test_a_planted_error_in_the_mask_is_noticed(conversations, monkeypatch):
    assert learns_the_answers_alone(conversations)
    right = PackedRows.batch

    def early(rows, *arguments):  # the token before each answer instead of the one that ends it
        batch = right(rows, *arguments)
        return batch._replace(weights=np.roll(batch.weights, -1, axis=1))

    with monkeypatch.context() as patch:
        patch.setattr(PackedRows, "batch", early)
        assert not learns_the_answers_alone(conversations)
    render = type(TEMPLATE).render
    changes = {
        "no end": (0, -len("<|im_end|>")),
        "the header too": (-5, 0),
        "not the first character": (1, 0),
        "the line break after it": (0, 1),
    }
    for name, (first, last) in changes.items():

        def wrong(self, *arguments, first=first, last=last):
            rendered = render(self, *arguments)
            learned = tuple((a + first, b + last) for a, b in rendered.learned)
            return rendered._replace(learned=learned)

        with monkeypatch.context() as patch:
            patch.setattr(type(TEMPLATE), "render", wrong)
            assert not learns_the_answers_alone(conversations), name
