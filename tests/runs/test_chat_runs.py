"""Runs on conversations: created, interrupted in mid-epoch, resumed, evaluated, fine-tuned."""

import dataclasses
import datetime
import io
import json
import math

import numpy as np
import pytest

import smallmind
from smallmind import Chat, InputError, ModelConfig, Run, Tokenizer, TransformerModel
from smallmind.cli import main
from smallmind.forecast import pace
from smallmind.runs.source import TOKENS
from smallmind.runs.verification import fingerprint
from smallmind.settings.presets import ARCHITECTURES
from smallmind.settings.rules import Choices, Facts
from smallmind.text.chat import MARK_KINDS, Turn
from smallmind.text.conversations import PackedDataset
from smallmind.text.packing import pack
from smallmind.text.templates import TEMPLATES
from smallmind.training import answers, checkpoint
from smallmind.training.answers import MAX_SHOWN, MIN_QUESTIONS
from smallmind.training.evaluation import SAMPLE_TOKENS
from smallmind.training.records import AnswersRecord, EvaluationRecord, StepRecord
from smallmind.writing.decoder import Decoder
from tests.programs import CATS
from tests.runs.small import left

ANIMALS = ("cat", "dog", "owl", "hen", "pig", "cow", "fox", "bee", "ant", "bat")
FIELDS = {
    "block_size": 96,
    "n_embd": 32,
    "n_layer": 1,
    "n_head": 2,
    "batch_size": 2,
    "epochs": 3,
    "val_every": 4,
    "save_every": 3,
    "log_every": 1,
    "keep": 99,
    "early_stopping_patience": 0,
    "dropout": 0.1,
    "precision": "float32",
}


def pairs(count=20):
    return [{"question": f"Who is {i}?", "answer": f"The {ANIMALS[i % 10]}."} for i in range(count)]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs()))
    return path


def create(file, out, **fields):
    return Run.create(text=file, out=out, **{**FIELDS, **fields})


@pytest.fixture(scope="module")
def whole(file, tmp_path_factory):
    """A run that was never interrupted, and its records."""
    run = create(file, tmp_path_factory.mktemp("runs") / "whole")
    return run, run.train()


def test_it_is_of_conversations_with_a_chat_template(whole):
    run, _ = whole
    assert run.settings.run.chat is True and isinstance(run.data, PackedDataset)
    model, tokenizer = run.load()
    assert {"<|im_start|>", "<|im_end|>"} <= set(tokenizer.special)
    assert model.config.vocab_size == tokenizer.vocab_size
    assert Chat(model, tokenizer, max_tokens=5).say("Who is 1?") is not None
    assert Run.open(run.path).settings == run.settings


def test_questions_are_asked_at_the_end(whole):
    run, records = whole
    assert not any(isinstance(record, AnswersRecord) for record in records)
    assert run.session.ended.asked.asked == 2
    assert [answer[:2] for answer in run.session.ended.asked.answers] == [
        ("Who is 18?", "The ant."),
        ("Who is 19?", "The bat."),
    ]
    kept = [row for row in run.metrics().rows if "exact_match" in row]
    assert [row["step"] for row in kept] == [run.settings.training.steps]
    assert run.sample.startswith("Who is 18?\n> ")


def test_the_loss_is_that_of_the_learned_tokens(whole):
    run, records = whole
    model, _ = run.load()
    total = count = 0.0
    for number in range(run.data.held_out_batches):
        batch = run.data.evaluation_batch("held_out", number)
        losses = model.losses(batch.ids, batch.targets, firsts=batch.firsts)
        total += float((losses * batch.weights).sum())
        count += float(batch.weights.sum())
    assert run.final.loss == pytest.approx(total / count, rel=1e-5)
    assert run.final.tokens == count == len("The ant.") + len("The bat.") + 2
    last = [record for record in records if isinstance(record, EvaluationRecord)][-1]
    assert last.val_loss == pytest.approx(run.final.loss, rel=1e-5)


@pytest.mark.parametrize("step", [1, 4, 5])
def test_a_run_that_is_interrupted_in_mid_epoch_ends_with_the_same_bits(
    file, whole, step, tmp_path
):
    run = left(create(file, tmp_path / "run"), step)
    assert step % run.settings.training.steps
    del run
    again = Run.open(tmp_path / "run")
    again.resume()
    first, second = (each.load()[0].flat.data for each in (whole[0], again))
    np.testing.assert_array_equal(first, second)
    assert again.session.ended == whole[0].session.ended


def test_prepared_conversations_train_alike(file, whole, tmp_path, monkeypatch):
    from smallmind.runs import source

    monkeypatch.setattr(source, "LARGE", 0.0)  # of the memory
    run = create(file, tmp_path / "run")
    assert run.data.is_on_disk and list((tmp_path / TOKENS).iterdir())
    run.train()
    np.testing.assert_array_equal(run.load()[0].flat.data, whole[0].load()[0].flat.data)
    assert Run.open(tmp_path / "run").data.is_on_disk


def test_changed_conversations_are_refused(file, tmp_path):
    copy = tmp_path / "chats.jsonl"
    copy.write_bytes(file.read_bytes())
    run = left(create(copy, tmp_path / "run"), 1)
    run.unlock()
    copy.write_text("".join(json.dumps(pair) + "\n" for pair in reversed(pairs())))
    with pytest.raises(InputError, match="has changed since the run was created"):
        Run.open(tmp_path / "run").resume()


def test_texts_in_records_may_be_mixed_with_conversations(file, tmp_path):
    """The run is on conversations then, and reads both again as it did before."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": "Who is it? The cow."}) + "\n")
    run = create([texts, file], tmp_path / "run")
    assert run.settings.run.chat is True and run.files.source.report.documents == 21
    assert Run.open(tmp_path / "run").files.source.sha256 == run.files.source.sha256
    with pytest.raises(InputError, match=r"texts.jsonl has no conversation in line 1"):
        create([texts, file], tmp_path / "no", chat=True)


def test_all_tokens_can_be_learned(file, whole, tmp_path):
    run = create(file, tmp_path / "run", learn="all", epochs=1)
    run.train()
    assert run.final.tokens > 3 * whole[0].final.tokens


@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_a_model_of_a_text_is_trained_on_conversations(arch, file, tmp_path):
    from smallmind.settings.presets import ARCHITECTURES

    text = CATS + "ABCDEFGHIJKLMNOPQRSTUVWXYZ abcdefghijklmnopqrstuvwxyz 0123456789?.\n"
    shape = {name: FIELDS[name] for name in ("block_size", "n_embd", "n_layer", "n_head")}
    parts = ARCHITECTURES[arch]
    base = Run.create(text=text, out=tmp_path / "base", steps=4, batch_size=2, **shape, **parts)
    base.train()
    model, tokenizer = base.load()
    run = create_from(tmp_path / "base", file, tmp_path / "run")
    grown, chat_tokenizer = run.training.model, run.training.tokenizer
    V = tokenizer.vocab_size
    assert grown.config.vocab_size == V + 2 == chat_tokenizer.vocab_size
    ids = tokenizer.encode(text[:90])[None]
    np.testing.assert_array_equal(chat_tokenizer.encode(text[:90])[None], ids)
    np.testing.assert_allclose(grown.forward(ids)[..., :V], model.forward(ids), atol=2e-6)
    run.train()
    assert Chat(*run.load(), max_tokens=3).say("Who is 3?") is not None
    assert run.settings.training.learning_rate < base.settings.training.learning_rate


@pytest.mark.parametrize("trained", [0.0, 0.3])
@pytest.mark.parametrize("adapter", [{}, {"lora_rank": 2}])
def test_what_a_model_was_trained_with_is_kept_unless_a_person_says_otherwise(
    trained, adapter, file, tmp_path
):
    """With dropout that a model has never seen, its loss in training is not that of the model."""
    base = {name: FIELDS[name] for name in ("block_size", "n_embd", "n_layer", "n_head")}
    base |= {"tokenizer": "byte", "epochs": 1, "dropout": trained}
    Run.create(text=file, out=tmp_path / "base", **base).train()
    fields = {"init_from": str(tmp_path / "base"), **adapter}
    texts = {"chats": file, "text": CATS}
    for name, given in texts.items():
        run = Run.create(text=given, out=tmp_path / name, **fields)
        assert run.settings.model.dropout == run.training.model.config.dropout == trained
        said = Run.create(text=given, out=tmp_path / f"{name} said", dropout=0.2, **fields)
        assert said.settings.model.dropout == 0.2
    if adapter:
        own = Run.create(text=file, out=tmp_path / "own", lora_dropout=0.25, **fields)
        assert own.training.model.adapter.dropout == 0.25
        assert own.settings.model.dropout == trained


def create_from(base, file, out):
    fields = {
        name: value
        for name, value in FIELDS.items()
        if name not in ("block_size", "n_embd", "n_layer", "n_head")
    }
    return Run.create(text=file, out=out, init_from=base, **fields)


def test_the_recipe_follows_from_the_conversations(file, tmp_path):
    run = Run.create(text=file, out=tmp_path / "run", n_layer=1, n_embd=32, n_head=2)
    training = run.settings.training
    assert training.epochs == 20 and training.early_stopping_patience > 0
    assert run.settings.model.dropout > 0 and training.val_every <= training.steps // 8
    plain = Run.create(
        text=file, out=tmp_path / "plain", recipe="modern", n_layer=1, n_embd=32, n_head=2
    )
    assert plain.settings.training.steps == 1500 and plain.settings.run.chat is True


@pytest.mark.parametrize(
    ("channels", "count", "epochs"),
    [(576, 1100, 1), (576, 400, 2), (576, 50, 3), (256, 5000, 1), (128, 1100, 3), (128, 9000, 2)],
)
def test_a_wide_model_reads_conversations_less_often(channels, count, epochs):
    start = ModelConfig(n_embd=channels, n_layer=1, n_head=2, vocab_size=300)
    facts = Facts(
        start=start, start_tokenizer="bpe", limits_context=False, is_chat=True, conversations=count
    )
    chosen = Choices.of(flags={"init_from": "base"}).settings(facts)
    assert chosen.training.epochs == epochs
    kept = Choices.of(flags={"init_from": "base", "epochs": 7}).settings(facts)
    assert kept.training.epochs == 7


def test_plain_text_stays_plain(file, tmp_path):
    run = Run.create(text=file, out=tmp_path / "run", text_field="answer", n_layer=1, n_embd=32)
    assert run.settings.run.chat is False and not run.data.is_packed
    with pytest.raises(InputError, match="no field 'text'"):
        Run.create(text=file, out=tmp_path / "no", chat=False)
    with pytest.raises(InputError, match="no chat template"):
        Chat(run.training.model, run.training.tokenizer)


def test_an_evaluation_on_other_conversations(whole, tmp_path):
    run, _ = whole
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": "Who is 3?", "completion": "The hen."}) + "\n")
    found = run.evaluate(other)
    assert found.tokens == len("The hen.") + 1


def test_a_model_without_a_template_is_not_evaluated_on_conversations(file, tmp_path):
    base = Run.create(
        text=CATS, out=tmp_path / "base", steps=1, n_layer=1, n_embd=16, n_head=2, block_size=16
    )
    base.train()
    base.files.change(chat=None)
    with pytest.raises(InputError, match="was not trained on any"):
        base.evaluate(file)


def test_ranks_train_the_same_bits(file, tmp_path):
    pytest.importorskip("mpi4py")
    from smallmind.parallel.group import ALONE
    from smallmind.settings.config import TrainingConfig
    from tests.parallel import in_process

    run = create(file, tmp_path / "run")
    data, config = (
        run.data,
        TrainingConfig(
            steps=5, val_every=0, log_every=1, data_shards=3, grad_accum_steps=2, optimizer="muon"
        ),
    )

    def trained(group):
        model = smallmind.TransformerModel(run.settings.model, seed=3)
        training = smallmind.Training(model, data=data, group=group)
        losses = [r.loss for r in training.steps(config) if isinstance(r, StepRecord)]
        return losses, training.model.flat.data.tobytes()

    assert in_process.on_ranks(2, trained, trained) == trained(ALONE)


SHAPE = {name: FIELDS[name] for name in ("n_layer", "n_embd", "n_head", "block_size", "precision")}


def paced(monkeypatch, step, reading, answer=0.0):
    """Makes steps, batches of an evaluation and answers seem to take so many seconds."""
    sample = answer * SAMPLE_TOKENS / pace.TIMED_TOKENS
    found = pace.Pace(step=step, evaluation=2 * reading, save=0.0, end=0.0, sample=sample)
    monkeypatch.setattr(pace, "kept_pace", lambda *_: found)


@pytest.mark.parametrize("steps", [60, 100, 459, 5000])
@pytest.mark.parametrize(("reading", "answer"), [(1.0, 0.6), (0.3, 0.1), (0.01, 0.01)])
def test_evaluations_and_questions_take_a_tenth_of_a_run(
    steps, reading, answer, monkeypatch, tmp_path
):
    """With the costs of a real model: steps of 2.2 s, six batches of held-out conversations."""
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs(80)))
    fields = {**SHAPE, "batch_size": 1, "steps": steps}
    run = Run.create(text=path, out=tmp_path / "run", **fields)
    paced(monkeypatch, 2.2, reading, answer)
    config, before = pace.fit_evaluations(run.training, run.settings.training)
    data = run.training.data
    each = sum(min(config.val_batches, data.batches_of(part)) for part in ("train", "held_out"))
    evaluations = math.ceil(steps / config.val_every) if config.val_every else 0
    final = data.held_out_batches
    seconds = (evaluations * each + final) * reading + MIN_QUESTIONS * answer + before
    assert seconds <= (2.2 * steps + seconds) / 10
    assert (steps < 100 and reading == 1) or 1 <= evaluations <= 10
    if steps == 5000:
        assert (evaluations, config.val_batches) == (10, 20)
        assert before == pytest.approx(MIN_QUESTIONS * answer)
    if steps == 60 and reading == 1:
        assert evaluations < 4 and before == 0


def test_a_run_too_short_for_evaluations_has_the_last_alone(monkeypatch, tmp_path, file):
    run = Run.create(text=file, out=tmp_path / "run", **SHAPE, steps=5)
    paced(monkeypatch, 0.01, 3.0, 3.0)
    config, before = pace.fit_evaluations(run.training, run.settings.training)
    assert (config.val_every, config.val_batches, before) == (0, 1, 0)
    watching = dataclasses.replace(run.settings.training, schedule="plateau")
    assert pace.fit_evaluations(run.training, watching)[0].val_every == 5


def test_evaluations_are_timed_once_and_kept_for_a_run_that_resumes(file, tmp_path, monkeypatch):
    paced(monkeypatch, 1.0, 0.1)
    fields = {**SHAPE, "batch_size": 1, "epochs": 4, "save_every": 3}
    whole = Run.create(text=file, out=tmp_path / "whole", **fields)
    assert whole.files.config.limits_evaluations and whole.files.config.awaits_timing
    assert "not timed" not in repr(whole)
    records = whole.train()
    steps, every = whole.settings.training.steps, whole.settings.training.val_every
    assert not whole.files.config.awaits_timing
    evaluated = [record.step for record in records if isinstance(record, EvaluationRecord)]
    assert evaluated == sorted({*range(every, steps, every), steps})
    run = left(Run.create(text=file, out=tmp_path / "cut", **fields), 5)
    del run
    paced(monkeypatch, 1.0, 5.0)  # busier by now
    again = Run.open(tmp_path / "cut")
    again.resume()
    assert again.settings.training.val_every == every
    np.testing.assert_array_equal(*(run.load()[0].flat.data for run in (whole, again)))
    assert all(verdict.fault is None for verdict in again.verify())


@pytest.mark.parametrize("chosen", [{"val_every": 7}, {"val_batches": 3}, {"recipe": "modern"}])
def test_evaluations_that_a_person_has_chosen_stay(chosen, file, tmp_path):
    run = Run.create(text=file, out=tmp_path / "run", **SHAPE, **chosen)
    assert not run.files.config.limits_evaluations and not run.files.config.awaits_timing
    for name, value in chosen.items():
        assert getattr(run.settings.training, name, value) == value


def test_a_model_that_may_know_answers_is_asked_a_few_questions_first(whole, tmp_path, monkeypatch):
    path = tmp_path / "more.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs(300)))
    paced(monkeypatch, 1.0, 0.01, 0.01)
    fields = {"text": path, "epochs": 1, "precision": "float32"}
    run = Run.create(**fields, out=tmp_path / "run", init_from=whole[0].path)
    records = run.train()
    asked = [record for record in records if isinstance(record, AnswersRecord)]
    assert [(record.step, record.asked) for record in asked] == [(0, MIN_QUESTIONS)]
    paced(monkeypatch, 1.0, 0.01, 100.0)  # too slow
    slow = Run.create(**fields, out=tmp_path / "slow", init_from=whole[0].path)
    assert not any(isinstance(record, AnswersRecord) for record in slow.train())
    assert slow.session.ended.asked.asked >= MIN_QUESTIONS


@pytest.mark.parametrize(("seconds", "asked"), [(0, 4), (-5, 4), (20, 20), (33.5, 30), (1e3, 30)])
def test_as_many_questions_are_asked_as_there_is_time_for(
    seconds, asked, whole, tmp_path, monkeypatch
):
    path = tmp_path / "more.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs(300)))
    run = Run.create(text=path, out=tmp_path / "run", init_from=whole[0].path, steps=1)
    times = iter([0.0, float(MIN_QUESTIONS)])  # a second for each
    monkeypatch.setattr(answers, "clock", lambda: next(times))
    found = run.training.evaluations.ask(3, seconds=seconds)
    assert found.asked == asked and found.step == 3
    questions = [question for question, _, _ in found.answers]
    assert len(set(questions)) == len(questions) == min(asked, MAX_SHOWN)


class Yesterday(datetime.datetime):
    """The clock of another day, in another place."""

    @classmethod
    def now(cls):
        return datetime.datetime(2020, 2, 29, 23, 59)


def test_a_template_that_writes_the_date_writes_that_of_the_run(file, tmp_path, monkeypatch):
    pytest.importorskip("jinja2")
    from smallmind.runs import source

    chatml = TEMPLATES["chatml"]
    tokenizer = Tokenizer(kind="byte").with_special(chatml.special)
    dated = "{{ strftime_now('%d %b %Y') }}" + chatml.jinja
    published = {"tokenizer_config.json": {"chat_template": dated}}
    model = TransformerModel(tokenizer.vocab_size, 96, 32, 1, 2, seed=1)
    model.save(
        tmp_path / "dated.safetensors", {"tokenizer": tokenizer.with_published(published).saved}
    )
    start = str(tmp_path / "dated.safetensors")
    fields = {"epochs": 1, "val_every": 4, "save_every": 3, "batch_size": 2, "precision": "float32"}
    with monkeypatch.context() as patched:
        patched.setattr(source, "datetime", Yesterday)
        run = Run.create(text=file, out=tmp_path / "run", init_from=start, **fields)
        run.train()
    again = Run.open(run.path)
    marked = again.files.source.marked(tokenizer.with_published(published))
    assert tokenizer.decode(marked[0] // MARK_KINDS).startswith("29 Feb 2020<|im_start|>")
    assert all(verdict.fault is None for verdict in again.verify())
    config = json.loads((run.path / "config.json").read_text())
    assert config.pop("template_time") == "2020-02-29T23:59:00"
    # Earlier versions did not keep it: another day, other tokens.
    (run.path / "config.json").write_text(json.dumps(config))
    assert any(verdict.fault for verdict in Run.open(run.path).verify())
    # Who talks with it gets the current date.
    model, tokenizer = run.load()
    prompt = Chat(model, tokenizer).template.prompt(tokenizer, [Turn("user", "a")])
    assert not tokenizer.decode(prompt).startswith("29 Feb 2020")


def test_variables_of_the_template_are_kept_with_the_run(file, tmp_path, capsys, monkeypatch):
    pytest.importorskip("jinja2")
    chatml = TEMPLATES["chatml"]
    template = "{% if mood is defined %}{{ mood }}{% endif %}" + chatml.jinja
    tokenizer = Tokenizer(kind="byte").with_special(chatml.special)
    tokenizer = tokenizer.with_published({"tokenizer_config.json": {"chat_template": template}})
    start = tmp_path / "base.safetensors"
    model = TransformerModel(tokenizer.vocab_size, 96, 32, 1, 2, seed=1)
    model.save(start, {"tokenizer": tokenizer.saved})
    fields = {"text": file, "init_from": str(start), "epochs": 1, "precision": "float32"}
    run = Run.create(**fields, out=tmp_path / "run", template_args='{"mood": "glad"}')
    run.train()
    marked = Run.open(run.path).files.source.marked(run.training.tokenizer)
    assert tokenizer.decode(marked[0] // MARK_KINDS).startswith("glad<|im_start|>user")
    chat = Chat(*run.load())
    asked = chat.template.prompt(chat.tokenizer, [Turn("user", "a")])
    assert tokenizer.decode(asked).startswith("glad<|im_start|>user\na<|im_end|>")
    # The command line may give others, for once.
    prompts = []
    monkeypatch.setattr("smallmind.writing.decoder.Decoder.add", spying(prompts))
    words = ["generate", str(run.path), "--prompt", "a", "--max-tokens", "1"]
    assert main([*words, "--template-args", '{"mood": "sad"}']) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
    words = ["chat", str(run.path), "--max-tokens", "1", "--template-args", '{"mood": "calm"}']
    assert main(words) == 0
    found = [tokenizer.decode(ids) for ids in prompts]
    assert [text.partition("<")[0] for text in found] == ["sad", "calm"]
    assert all("<|im_start|>user\na<|im_end|>" in text for text in found)
    capsys.readouterr()
    for args, problem in (
        ("{", "must be a JSON object"),
        ("[1]", "must be a JSON object"),
        ('{"other": 1}', "other is not in the chat template"),
        ('{"messages": []}', "messages is always given"),
    ):
        for words in (
            ["chat", str(run.path)],
            ["generate", str(run.path), "--prompt", "a"],
            ["serve", str(run.path)],
        ):
            assert main([*words, "--template-args", args]) == 2
            assert problem in capsys.readouterr().err
        with pytest.raises(InputError, match=problem):
            Run.create(**fields, out=tmp_path / "no", template_args=args)


def spying(prompts):
    """Decoder.add, which also notes the prompts that it gets."""
    add = Decoder.add

    def spy(decoder, *texts):
        prompts.append(texts[0].ids)
        return add(decoder, *texts)

    return spy


def test_a_run_of_an_earlier_version_keeps_its_windows(file, tmp_path):
    """It resumes with the batches that it began with, and verifies without what it did not save."""
    run = create(file, tmp_path / "run")
    rows, windows = run.data.train, [run.data.windows(np.array([0])).ids]
    config = tmp_path / "run" / "config.json"
    saved = json.loads(config.read_text())
    assert saved.pop("packs_evenly") is True
    run.unlock()
    config.write_text(json.dumps(saved))
    old = Run.open(tmp_path / "run")
    order, ends = pack(rows.pieces.lengths - 1, 96)
    assert old.data.window_weights is None and old.data.train._ends.tolist() == ends.tolist()
    assert old.data.train._begins.tolist() == rows.pieces.begins[order].tolist()
    assert (old.data.windows(np.array([0])).ids != windows[0]).any()
    left(old, 5)
    del old
    path = max((tmp_path / "run" / "checkpoints").glob("step-*.safetensors"))
    state = checkpoint.load(path)
    spikes = state.state["spikes"]
    assert {"variance", "doubtful"} <= spikes.keys()
    parts = {**state.state, "spikes": {"average": spikes["average"]}}
    earlier = dataclasses.replace(state, state=parts)
    assert fingerprint(state, earlier) == fingerprint(earlier)
    assert fingerprint(state) != fingerprint(earlier)
    again = Run.open(tmp_path / "run")
    again.resume()
    assert again.files.config.packs_evenly is False
    assert all(verdict.fault is None for verdict in again.verify())


@pytest.mark.parametrize("last", ["", "{{ '<s>' if loop.last and m.role == 'assistant' }}"])
def test_a_model_ends_its_answers_where_its_template_writes_no_end(tmp_path, last):
    """Or writes one after the last answer only, whatever is learned of earlier ones."""
    pytest.importorskip("jinja2")
    template = (
        "{% for m in messages %}{{ ('<u>' if m.role == 'user' else '<a>') + m.content }}"
        + last
        + "{% endfor %}{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
    )
    tokenizer = Tokenizer(kind="byte").with_special(["<u>", "<a>", "<s>"])
    tokenizer = tokenizer.with_published({"tokenizer_config.json": {"chat_template": template}})
    model = TransformerModel(tokenizer.vocab_size, 64, 32, 2, 1, **ARCHITECTURES["llama"])
    smallmind.export(model, tokenizer, tmp_path / "model")
    pair = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Tim."}]
    rows = [json.dumps({"messages": pair * (i % 2 + 1)}) + "\n" for i in range(20)]
    (tmp_path / "chats.jsonl").write_text("".join(rows))
    fields = {**FIELDS, "block_size": 64, "epochs": 40, "learning_rate": 1e-2, "val_every": 0}
    del fields["n_embd"], fields["n_layer"], fields["n_head"], fields["block_size"]
    fields["init_from"] = str(tmp_path / "model")
    run = Run.create(text=tmp_path / "chats.jsonl", out=tmp_path / "run", **fields)
    run.train()
    chat = Chat(*run.load(), temperature=0, max_tokens=20)
    for _ in range(2):
        assert [chat.say("Who?"), chat.ended] == ["Tim.", "end"]


def test_chats_of_people_are_read_by_the_same_assistant_again(tmp_path):
    messages = [
        {"id": i, "type": "message", "date_unixtime": str(100_000 * (i // 2)), "from": who}
        | {"text": f"{ANIMALS[i // 2 % 10]} {i // 2}"}
        for i, who in enumerate(["Ann", "Me"] * 20)
    ]
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"name": "Ann", "id": 1, "messages": messages}))
    run = create(path, tmp_path / "run", assistant="Me", epochs=1)
    run.train()
    assert json.loads((run.path / "config.json").read_text())["run"]["assistant"] == "Me"
    again = Run.open(run.path)
    assert all(verdict.fault is None for verdict in again.verify())
    again.resume(epochs=2)
    assert again.settings.run.assistant == "Me"
