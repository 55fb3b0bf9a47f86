"""Likelihoods of texts packed into windows equal those of each text by itself."""

import numpy as np
import pytest

from smallmind import Tokenizer, TransformerModel
from smallmind.tasks.likelihood import Scored, Scorer, distinct
from tests.exchange.models import TEXT, model_of, tokenizer_of

LENGTHS = 2, 3, 5, 2, 64, 17, 30, 9, 9, 41


@pytest.fixture(scope="module")
def scorer():
    tokenizer = tokenizer_of("bpe")
    return Scorer(model_of("GPT-2", tokenizer), tokenizer)  # its positions are learned


def plain(model, ids, first):
    """The log-likelihood of ids from `first` on, and whether it is greedy, without packing."""
    logits = model.forward(ids[None, :-1])[0].astype(np.float64)
    logits -= logits.max(1, keepdims=True)
    found = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    targets = ids[1:]
    values = found[np.arange(len(targets)), targets]
    right = found.argmax(1) == targets
    return values[first - 1 :].sum(), bool(right[first - 1 :].all())


def drawn(scorer, lengths=LENGTHS):
    random = np.random.default_rng(3)
    vocab_size = scorer.model.config.vocab_size
    return [random.integers(0, vocab_size, n).astype(np.int32) for n in lengths]


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_packed_texts_are_as_likely_as_alone(name):
    tokenizer = tokenizer_of("bpe")
    scorer = Scorer(model_of(name, tokenizer), tokenizer)
    texts = [Scored(ids, 1 + i % (len(ids) - 1)) for i, ids in enumerate(drawn(scorer))]
    for text, found in zip(texts, scorer.score(texts), strict=True):
        value, is_greedy = plain(scorer.model, text.ids, text.first)
        assert found.value == pytest.approx(value, abs=1e-4)
        assert found.is_greedy == is_greedy and not found.is_cut


def test_a_greedy_text_is_found(scorer):
    ids = [5]
    for _ in range(6):
        ids.append(int(scorer.model.forward(np.array([ids]))[0, -1].argmax()))
    wrong = [*ids[:-1], (ids[-1] + 1) % scorer.model.config.vocab_size]
    texts = [Scored(np.array(x, np.int32), 1) for x in (ids, wrong)]
    assert [found.is_greedy for found in scorer.score(texts)] == [True, False]


def test_a_long_text_is_cut_on_the_left_and_says_so(scorer):
    T = scorer.context
    (ids,) = drawn(scorer, [T + 30])
    fits, cut = scorer.score([Scored(ids[: T + 1], T - 3), Scored(ids, T + 26)])
    assert not fits.is_cut and cut.is_cut
    assert fits.value == pytest.approx(plain(scorer.model, ids[: T + 1], T - 3)[0], abs=1e-4)
    assert cut.value == pytest.approx(plain(scorer.model, ids[-T - 1 :], T - 3)[0], abs=1e-4)


def test_a_long_continuation_is_predicted_whole_in_windows(scorer):
    T = scorer.context
    (ids,) = drawn(scorer, [2 * T + 11])
    (found,) = scorer.score([Scored(ids, 1)])
    first = plain(scorer.model, ids[: T + 1], 1)[0]
    second = plain(scorer.model, ids[T : 2 * T + 1], 1)[0]
    last = plain(scorer.model, ids[-T - 1 :], T - 9)[0]
    assert found.value == pytest.approx(first + second + last, abs=1e-3) and found.is_cut


def test_a_text_is_predicted_from_the_token_that_begins_texts(scorer):
    tokenizer = scorer.tokenizer
    assert scorer.beginning == tokenizer.end_of_text
    ids = tokenizer.encode("The cat")
    assert scorer.alone(ids).ids.tolist() == [scorer.beginning, *ids]
    said = np.insert(ids, 0, scorer.beginning)
    assert scorer.alone(said).ids.tolist() == said.tolist()  # not a second time


def test_characters_begin_with_the_default_prompt():
    tokenizer = Tokenizer(TEXT)
    scorer = Scorer(model_of("Llama", tokenizer), tokenizer)
    assert tokenizer.decode([scorer.beginning]) == "\n"


def test_spaces_after_a_context_belong_to_what_follows(scorer):
    spaced, plain_ = scorer.encode_pairs([("The cat ", "sat"), ("The cat", " sat")])
    assert spaced.ids.tolist() == plain_.ids.tolist() and spaced.first == plain_.first
    before = len(scorer.tokenizer.encode("The cat"))
    assert plain_.first == before


def test_a_continuation_that_merges_with_its_context_keeps_a_token(scorer):
    context, continuation = "T", "he"
    assert len(scorer.tokenizer.encode("The")) <= 2
    (found,) = scorer.encode_pairs([(context, continuation)])
    assert found.first <= max(1, len(found.ids) - 1)


def test_what_repeats_is_listed_once():
    assert distinct(["a", "b", "a"]) == (["a", "b"], [0, 1, 0])


def test_nothing_has_no_likelihoods(scorer):
    assert scorer.score([]) == []


def test_a_tokenizer_of_another_model_is_refused(scorer):
    other = Tokenizer(TEXT, "byte")
    model = TransformerModel(vocab_size=20, block_size=8, n_embd=8, n_layer=1, n_head=2)
    with pytest.raises(ValueError, match="vocab_size=20"):
        Scorer(model, other)
