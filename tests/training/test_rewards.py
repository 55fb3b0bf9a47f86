"""Rewards: the loss of GRPO and its gradient, what is sampled, and rewards that earn nothing."""

import json
import time

import numpy as np
import pytest

from smallmind import InputError, Tokenizer, Training, TrainingConfig, TransformerModel
from smallmind.losses.judge import Attempt, Judge
from smallmind.losses.question_data import QuestionsDataset, encode_questions
from smallmind.losses.rewards import Rewards, advantages_of, grpo
from smallmind.nn.workspace import Pass
from smallmind.settings.config import Adapter
from smallmind.settings.presets import ARCHITECTURES
from smallmind.text.chat import Turn, with_tools
from smallmind.text.templates import fit_template
from smallmind.text.tools import described_tools, messages_calls
from smallmind.training.records import LossRecord, RollbackRecord
from tests.training.test_resume import assert_resumes_whole

LETTERS = "abcdefgh"
TEXTS = [(a + b, b + a) for b in LETTERS for a in LETTERS]
G, MOST, CLIP = 4, 3, 0.2


def earned(_question, answer, wanted):
    return answer.count(wanted[0]) - 0.5 * answer.count("a") + 0.1 * len(answer)


def make(seed=1, arch="gpt2", **settings):
    """A model away from its initial values, so that answers differ in their probability."""
    model = TransformerModel(len(LETTERS), 8, 16, 2, 2, **ARCHITECTURES[arch], **settings)
    random = np.random.default_rng(seed)
    for name, value in model.parameters.items():
        model.flat.write({name: value + 0.3 * random.standard_normal(value.shape)})
    return model


def questions(batch_size=3, seed=5):
    return QuestionsDataset.of_texts(Tokenizer(LETTERS), TEXTS, G, batch_size, seed, MOST)


def prepared(model, reward=earned, **settings):
    """A loss whose round has been sampled by the model, and the batch of the second step."""
    loss, data = Rewards(reward, G, clip=CLIP, **settings), questions()
    loss.prepare(model, data)
    loss.begin(TrainingConfig(steps=4))
    starts = [np.arange(3 * step, 3 * step + 3) * data.block_size for step in range(5)]
    loss.begin_step(model, 1, starts.__getitem__, lambda: None)
    return loss, data.windows(starts[1])


def log_probabilities(model, ids, targets):
    """ids, targets (R, T) -> the log-probability of each target (R, T), plainly."""
    logits = model.forward(ids)
    top = logits.max(axis=-1, keepdims=True)
    logarithms = logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))
    return np.take_along_axis(logarithms, targets[..., None].astype(np.int64), -1)[..., 0]


def formula(loss, batch, model, reference, beta):
    """The loss as the paper writes it, answer by answer and token by token."""
    total, found = 0.0, loss._round
    for start in batch.starts.tolist():
        row = loss._rows[1, start]
        rewards = found.rewards[row]
        prompt = loss.data.asked(start // loss.data.block_size).ids
        for g in range(G):
            advantage = (rewards[g] - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
            answer = found.tokens[row, g, : found.counts[row, g]]
            whole = np.concatenate([prompt, answer])[None]
            p, q = (
                log_probabilities(m, whole[:, :-1], whole[:, 1:])[0, len(prompt) - 1 :]
                for m in (model, reference)
            )
            ratio = np.exp(p - found.old[row, g, : len(answer)])
            clipped = np.clip(ratio, 1 - CLIP, 1 + CLIP)
            terms = -np.minimum(ratio * advantage, clipped * advantage)
            terms += beta * (np.exp(q - p) - (q - p) - 1)
            total += terms.mean() / G
    return total / len(batch.starts)


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_loss_and_gradients_are_those_of_the_formula(arch, beta):
    model, reference = (make(1, arch, backend="numpy", dtype=np.float64) for _ in range(2))
    loss, batch = prepared(model, beta=beta, updates=2)
    random = np.random.default_rng(3)
    model.flat.data += 0.03 * random.standard_normal(model.flat.data.shape)  # an update
    loss._sampled_at = -1
    ratios = np.exp(
        -model.losses(*loss._windows(loss._round, np.arange(3))[0][:2])[
            loss._windows(loss._round, np.arange(3))[1]
        ]
        - loss._round.old[:3][np.arange(MOST) < loss._round.counts[:3, :, None]]
    )
    assert (np.abs(ratios - 1) > CLIP).any() and (np.abs(ratios - 1) < CLIP).any()
    value = loss.loss_and_gradients(model, batch, scale=2.0)
    assert value == pytest.approx(formula(loss, batch, model, reference, beta), abs=1e-6)
    gradient, flat = model.flat.grad.copy(), model.flat.data
    for place in random.integers(0, flat.size, 30):
        kept, sides = flat[place], []
        for step in (1e-6, -1e-6):
            flat[place] = kept + step
            sides.append(2.0 * formula(loss, batch, model, reference, beta))
        flat[place] = kept
        assert gradient[place] == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-4, abs=1e-7)


def test_an_unlikely_token_does_not_outweigh_all_others():
    logp, reference = np.array([-25.0, -1.0]), np.array([-0.5, -1.5])

    def terms(logp):
        return grpo(logp, logp, reference, np.zeros(2), CLIP, 0.005)

    found, h = terms(logp), 1e-6
    assert found.dlogp == pytest.approx([0.005 * (1 - 100), 0.005 * (1 - np.exp(-0.5))])
    slopes = (terms(logp + h).losses - terms(logp - h).losses) / (2 * h)
    assert slopes == pytest.approx(found.dlogp, rel=1e-5)
    assert found.losses[0] < 0.005 * 100 * 24.5


def test_the_first_update_of_a_round_is_that_of_a_policy_gradient():
    model = make(backend="numpy", dtype=np.float64)
    losses = [prepared(model, updates=updates) for updates in (1, 2)]
    gradients = []
    for loss, batch in losses:
        assert loss.loss_and_gradients(model, batch) == pytest.approx(0, abs=1e-12)
        gradients.append(model.flat.grad.copy())
        model.zero_gradients()
    assert np.array_equal(*gradients)


def test_groups_that_earn_the_same_give_no_gradient():
    rewards = np.array([[0.1, 0.1, 0.1], [0.0, 1.0, 0.0]])
    advantages = advantages_of(rewards)
    assert (advantages[0] == 0).all() and advantages[1] == pytest.approx(
        [-0.577, 1.154, -0.577], abs=1e-3
    )
    model = make()
    loss, batch = prepared(model, lambda *_: 0.3)
    assert loss.loss_and_gradients(model, batch) == 0 and not model.flat.grad.any()
    assert loss.sampled()[1] == {"sampled_reward": pytest.approx(0.3), "teaching": 0.0}
    assert "nothing to learn" in loss.sampled()[2]


def test_samples_depend_on_seed_step_question_and_answer_alone():
    model, data = make(backend="numpy", dtype=np.float64), questions()

    def sampled(places, data=data):
        loss = Rewards(earned, G)
        loss.prepare(model, data)
        found = loss._sampled(model, [(s, q * data.block_size) for s, q in places], lambda: None)
        return {place: found.tokens[row].tolist() for row, place in enumerate(places)}

    places = [(step, question) for step in (1, 2) for question in range(8)]
    together, others = sampled(places), sampled(places, questions(seed=6))
    for some in (places[3:4], places[9:12]):
        assert sampled(some) == {place: together[place] for place in some}
    assert len({str(tokens) for tokens in together.values()}) == len(places)
    assert sum(together[place] == others[place] for place in places) == 0


@pytest.mark.parametrize("settings", [{}, {"updates": 3}, {"updates": 2, "beta": 0.1}], ids=str)
@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_a_resumed_training_equals_an_uninterrupted_one(tmp_path, settings, precision):
    def build():
        model = make(adapter=Adapter(2, 4.0)) if settings.get("beta") else make()
        return Training(model, data=questions(), loss=Rewards(earned, G, **settings))

    config = TrainingConfig(
        steps=7, val_every=3, log_every=1, precision=precision, grad_accum_steps=2, data_shards=2
    )
    _, _, records = assert_resumes_whole(build, config, [2, 4], tmp_path)
    said = [record for record in records if isinstance(record, LossRecord)]
    assert sum("sampled_reward" in record.numbers for record in said) == 7
    assert [record.step for record in said if "reward" in record.numbers] == [3, 6, 7]


def test_a_checkpoint_of_another_reward_is_refused(tmp_path):
    config, path = TrainingConfig(steps=4), tmp_path / "mine.py"
    path.write_text("def reward(question, answer): return len(answer)")
    first = Training(make(), data=questions(), loss=Rewards(str(path), G))
    list(first.steps(config, until=2))
    state = first.state()
    path.write_text("def reward(question, answer): return -len(answer)")
    changed = Training(make(), data=questions(), loss=Rewards(str(path), G))
    with pytest.raises(InputError, match="was saved with another reward, or other questions"):
        list(changed.steps(config, state))


def test_a_spike_of_the_loss_is_undone():
    loss, planted = Rewards(earned, G, updates=2), []
    compute = loss.loss_and_gradients

    def plant(*arguments, **named):
        value = compute(*arguments, **named)
        if loss._step == 6 and not planted:
            planted.append(6)
            return float("nan")
        return value

    loss.loss_and_gradients = plant
    training = Training(make(), data=questions(), loss=loss, snapshot_every=1)
    records = list(training.steps(TrainingConfig(steps=8, max_rollbacks=2)))
    (rollback,) = (x for x in records if isinstance(x, RollbackRecord))
    assert (rollback.step, rollback.spike_step) == (5, 6) and training.progress.step == 8


@pytest.mark.parametrize("more", [{"grad_accum_steps": 2}, {"data_shards": 3}], ids=str)
def test_a_step_is_the_same_in_parts(more):
    weights = []
    for fields in ({}, more):
        size = 4 // fields.get("grad_accum_steps", 1)
        model = make()
        training = Training(model, data=questions(size), loss=Rewards(earned, G))
        list(training.steps(TrainingConfig(steps=1, epochs=0, learning_rate=0.01, **fields)))
        weights.append(model.flat.data.copy())
    # The windows of several batches are others than those of one.
    assert ("data_shards" in more) == np.allclose(*weights, atol=1e-5)
    assert np.isfinite(weights[1]).all()


def test_a_model_learns_what_earns_more():
    loss = Rewards(lambda question, answer, _wanted: float(answer[:1] == question[:1]), 8)
    data = QuestionsDataset.of_texts(Tokenizer(LETTERS), TEXTS, 8, 32, most=1)
    model = TransformerModel(len(LETTERS), 8, 32, 1, 2, **ARCHITECTURES["modern"])
    training = Training(model, data=data, loss=loss)
    before = training.evaluate_held_out().loss
    config = TrainingConfig(steps=80, learning_rate=0.01, optimizer="adamw", max_rollbacks=0)
    list(training.steps(config))
    after = training.evaluate_held_out()
    assert -after.loss > 0.8 > -before and after.accuracy == -after.loss


def test_answers_that_did_not_end_are_counted():
    loss, _ = prepared(make())
    words = "of the last answers did not end within 3 tokens and were rewarded as they were"
    assert loss.last_words()[1:] == [f"100% {words}: --reward-tokens sets the limit"]
    loss.data.tokenizer.end_of_text = 0
    loss._round.tokens[..., -1] = [0, 0, 1, 1]
    assert loss.last_words()[1:] == [f"50% {words}: --reward-tokens sets the limit"]
    loss._round.tokens[..., -1] = 0
    assert loss.last_words()[1:] == []


def test_a_wanted_call_is_in_the_words_of_the_template():
    pytest.importorskip("jinja2")
    tokenizer, template = fit_template(Tokenizer("", "byte"), "hermes")
    call = json.dumps({"tool_calls": messages_calls([{"name": "f", "arguments": {"a": 1}}])})
    turns = with_tools([Turn("user", "Call f.")], described_tools([{"name": "f"}]))
    turns.append(Turn("assistant", "", more=call))
    ((asked,), _), *_ = encode_questions(tokenizer, template, [turns])
    assert asked.wanted == '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert asked.said == "Call f."


ASKED = [Attempt("2+2", "4", "4"), Attempt("3+3", "7", "6")]


@pytest.mark.parametrize(
    ("name", "answer", "wanted", "score"),
    [
        ("exact", " 4\n", "4", 1),
        ("exact", "44", "4", 0),
        ("contains", "it is 4.", "4", 1),
        ("contains", "five", "4", 0),
        ("json", '{"a": [1, null]}', None, 1),
        ("json", '{"a": 1', None, 0),
        ("json", "7", None, 0),
        ("json", "[" * 10_000, None, 0),
        ("length", "abcd", "ab", 0.5),
        ("length", "", "", 1),
    ],
)
def test_rewards_by_name(name, answer, wanted, score):
    assert Judge(name, 1).scores([Attempt("?", answer, wanted)]) == [score]


def judge(path, body, head="", seconds=5):
    path.write_text(f"{head}\ndef reward(question, answer, wanted):\n    {body}\n")
    return Judge(str(path), seconds)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return 1 / (len(answer) - len(question))", None),
        ("return [1 / (wanted == answer)][0]", "line 3 raised ZeroDivisionError: division by zero"),
        ("return None if wanted == '6' else 1", "returned None, not a number"),
        ("return '1'", "returned '1', not a number"),
        ("return float('nan')", "returned nan, not a finite number"),
        ("return 10 ** 400", "int too large to convert to float"),
        ("return -1e300", "returned -1e+300, which is farther from 0 than 1e+30"),
        ("return [1.0]", "returned [1.0], not a number"),
        ("import sys; sys.exit(2)", "raised SystemExit: 2"),
        ("import os; os._exit(3)", "ended its process, with status 3"),
        ("return reward(question, answer, wanted)", "raised RecursionError"),
    ],
)
def test_a_reward_that_earns_nothing_is_a_line_that_names_the_question(tmp_path, body, words):
    judged = judge(tmp_path / "mine.py", body)
    if words is None:
        assert judged.scores(ASKED) == [-0.5, -0.5]
        return
    with pytest.raises(InputError) as raised:
        judged.scores(ASKED)
    line = str(raised.value)
    assert words in line and "\n" not in line and "mine.py" in line
    assert "the question '2+2'" in line or "the question '3+3'" in line


@pytest.mark.parametrize(
    "body",
    ["while True: pass", "import time; time.sleep(99)", "import re; re.match('(a+)+b', 'a' * 99)"],
)
def test_a_reward_that_hangs_has_a_limit(tmp_path, body):
    begun = time.monotonic()
    judged = judge(tmp_path / "mine.py", body, seconds=0.3)
    with pytest.raises(InputError, match=r"took more than 0\.3 seconds for the question"):
        judged.scores(ASKED)
    assert time.monotonic() - begun < 60 and judged._process is None


def test_what_a_reward_prints_and_reads_harms_nothing(tmp_path):
    judged = judge(tmp_path / "mine.py", "print('{}'); return len(input() if 0 else answer)")
    assert judged.scores(ASKED) == judged.scores(ASKED) == [1, 1]
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    judged = judge(tmp_path / "mine.py", "return beside.VALUE", head="import beside")
    assert judged.scores(ASKED) == [7, 7]
    (tmp_path / "mine.py").write_text("def reward(question, answer): return len(question)")
    assert Judge(str(tmp_path / "mine.py"), 5).scores(ASKED) == [3, 3]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("def reward(:", "line 1 raised SyntaxError"),
        ("x = 1\ny = x.z", "line 2 raised AttributeError"),
        ("def score(answer): return 1", "it has no function reward(question, answer, wanted)"),
        ("def reward(answers): return 1", "its function must be reward(question, answer, wanted)"),
    ],
)
def test_files_without_a_reward_are_refused(tmp_path, content, words):
    path = tmp_path / "mine.py"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError) as raised:
        Judge(str(path), 5).scores(ASKED)
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_a_name_that_is_no_reward_is_refused():
    with pytest.raises(
        InputError, match="neither one of exact, contains, json, length nor a Python file"
    ):
        Judge("exakt", 5)


def test_an_error_of_a_function_names_the_question():
    with pytest.raises(InputError, match="raised KeyError: 'x', for the question"):
        Judge(lambda *_: {}["x"], 5).scores(ASKED)


def test_outside_a_run_answers_are_sampled_at_once():
    model, data = make(), questions()
    loss = Rewards(earned, G)
    loss.prepare(model, data)
    batch = data.windows(np.array([0, 2 * data.block_size]))
    assert loss.loss_and_gradients(model, batch, at=Pass(0)) == pytest.approx(0, abs=1e-6)
    assert model.flat.grad.any()
