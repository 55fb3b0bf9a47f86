"""Verdicts on tasks are those of transformers and of lm_eval on the exported model."""

import json
import sys

import numpy as np
import pytest

import smallmind
from smallmind.settings.presets import ARCHITECTURES
from smallmind.tasks.likelihood import Scorer
from tests.programs import finished
from tests.runs import small
from tests.tasks.small import trained

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.interop
NEAR = 1e-4  # nats, by which two programs may differ
WORDS = "the", "cat", "dog", "sat", "on", "mat", "log", "a", "Über", "logs.", "\n", "12"
TASKS = ("sm_pairs", "sm_choices", "sm_rolling", "sm_written")


def sentences(count, seed=1, longest=40):
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, random.integers(1, longest))) for _ in range(count)]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def models(request, tmp_path_factory):
    """A trained run and its export."""
    root = tmp_path_factory.mktemp("elsewhere")
    run = trained(root / "run", **ARCHITECTURES[request.param], block_size=64)
    smallmind.export(*smallmind.load(run.path), root / "hf")
    torch.set_num_threads(1)
    return run.path, root / "hf"


def theirs(model, ids):
    """The log-likelihood of ids (n,) from the second on, by transformers."""
    ids = torch.tensor(ids[-model.config.max_position_embeddings - 1 :][None].astype(np.int64))
    with torch.no_grad():
        found = model(ids[:, :-1]).logits.double().log_softmax(-1)
    return float(found.gather(2, ids[:, 1:, None]).sum())


def test_pair_by_pair_the_verdicts_are_those_of_transformers(models):
    path, exported = models
    model, tokenizer = smallmind.load(path, precision="float32")
    other = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    texts = [text for text in sentences(400) if len(tokenizer.encode(text)) < 64]
    texts = texts[: len(texts) // 2 * 2]
    ours = [found.value for found in Scorer(model, tokenizer).texts(texts)]
    bos = their_tokenizer.bos_token_id
    ids = [their_tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    found = [theirs(other, np.array([bos, *tokens])) for tokens in ids]
    assert len(texts) > 100
    np.testing.assert_allclose(ours, found, rtol=0, atol=NEAR * 10)
    ours, found = np.reshape(ours, (-1, 2)), np.reshape(found, (-1, 2))
    differs = (ours[:, 0] > ours[:, 1]) != (found[:, 0] > found[:, 1])
    assert (np.abs(found[differs, 0] - found[differs, 1]) < NEAR).all()


@pytest.fixture
def tasks(tmp_path):
    """Four tasks of lm_eval with data of their own -> their directory."""
    texts = sentences(60, seed=2, longest=14)  # lm_eval takes no continuation of 65 tokens
    rows = {
        "sm_pairs": [{"good": a, "bad": b} for a, b in zip(texts[:30], texts[30:], strict=True)],
        "sm_choices": [
            {"q": a[:30] + " x", "choices": [b[:20], a[:9] + "e"], "answer": i % 2}
            for i, (a, b) in enumerate(zip(texts[:30], texts[30:], strict=True))
        ],
        "sm_rolling": [{"text": " ".join(texts[i : i + 12])} for i in range(0, 36, 12)],
        "sm_written": [{"q": text[:40] + " the", "a": "cat"} for text in texts[:12]],
    }
    more = {
        "sm_pairs": """output_type: multiple_choice
doc_to_text: ""
doc_to_target: 0
doc_to_choice: "{{[good, bad]}}"
metric_list: [{metric: acc}]""",
        "sm_choices": """output_type: multiple_choice
doc_to_text: q
doc_to_target: answer
doc_to_choice: choices
metric_list: [{metric: acc}, {metric: acc_norm}]""",
        "sm_rolling": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]""",
        "sm_written": """output_type: generate_until
doc_to_text: q
doc_to_target: a
generation_kwargs: {until: ["mat", "."], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]""",
    }
    for name, records in rows.items():
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(record) + "\n" for record in records))
        (tmp_path / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n"
            f"    test: {data}\ntest_split: test\n{more[name]}\n"
        )
    return tmp_path


def responses(model, tasks):
    """Runs the tasks in lm_eval -> their results, and each response of the model by task."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model=model,
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    given = {
        name: [
            sample["filtered_resps"] for sample in sorted(samples, key=lambda one: one["doc_id"])
        ]
        for name, samples in found["samples"].items()
    }
    return found["results"], given


@pytest.mark.filterwarnings("default")  # of lm_eval and what it needs
def test_lm_eval_finds_what_it_finds_with_its_own_model_of_the_export(
    models, tasks, monkeypatch, tmp_path
):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    from lm_eval.models.huggingface import HFLM

    from smallmind.tasks.lm_eval import SmallmindLM

    path, exported = models
    ours, our_responses = responses(SmallmindLM(str(path)), tasks)
    model = HFLM(str(exported), device="cpu", dtype="float32", batch_size=1)
    found, their_responses = responses(model, tasks)

    def numbers(results):
        return {
            (task, name): value
            for task, values in results.items()
            for name, value in values.items()
            if isinstance(value, float)
        }

    assert numbers(ours) == pytest.approx(numbers(found), rel=1e-4)
    assert {task for task, _ in numbers(ours)} >= set(TASKS)
    assert our_responses["sm_written"] == their_responses["sm_written"]
    for task in ("sm_pairs", "sm_choices"):
        for mine, other in zip(our_responses[task], their_responses[task], strict=True):
            assert [greedy for _, greedy in mine] == [greedy for _, greedy in other]
            assert [x for x, _ in mine] == pytest.approx([x for x, _ in other], abs=NEAR * 10)


@pytest.mark.filterwarnings("default")
def test_lm_eval_ends_in_one_line_at_a_character_that_the_model_does_not_know(tasks, tmp_path):
    small.create(tmp_path / "run").train()
    pytest.importorskip("lm_eval")
    rows = [{"good": "the cat", "bad": "the mat \u4e2d"}]
    (tasks / "sm_pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [sys.executable, "-P", "-m", "smallmind.tasks.lm_eval", "run", "--model", "smallmind"]
    words += ["--model_args", f"path={tmp_path / 'run'}", "--tasks", "sm_pairs"]
    home = {"HF_HOME": str(tmp_path / "home"), "HF_DATASETS_OFFLINE": "1"}
    result = finished([*words, "--include_path", str(tasks)], cwd=tmp_path, **home)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("smallmind: the model has never seen the character '\u4e2d'")
    assert "--tokenizer bpe" in last


@pytest.mark.filterwarnings("default")  # of lm_eval and what it needs
def test_lm_eval_finds_the_same_over_http(models, tasks, monkeypatch, tmp_path):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from smallmind.tasks.lm_eval import SmallmindLM
    from tests.serve.conftest import serving

    path, exported = models
    ours, ours_given = responses(SmallmindLM(str(path)), tasks)
    with serving([path], precision="float32") as (address, _):
        model = LocalCompletionsAPI(
            model=path.name,
            base_url=f"{address}/v1/completions",
            tokenizer=str(exported),
            tokenizer_backend="huggingface",
            max_length=66,  # it takes one less: the context and the token after it
            batch_size=7,
        )
        theirs, theirs_given = responses(model, tasks)
    for name in TASKS:
        for metric, value in ours[name].items():
            if isinstance(value, float):
                assert theirs[name][metric] == pytest.approx(value, rel=1e-4), (name, metric)
    assert theirs_given["sm_written"] == ours_given["sm_written"]
    for name in ("sm_pairs", "sm_choices"):
        for one, other in zip(ours_given[name], theirs_given[name], strict=True):
            found = [[float(value) for value, _ in each] for each in (one, other)]
            np.testing.assert_allclose(found[0], found[1], atol=NEAR * 10)
            assert [bool(greedy) for _, greedy in one] == [bool(greedy) for _, greedy in other]
