"""Public functions refuse arguments of a wrong type, shape or value; objects print themselves."""

import numpy as np
import pytest

import smallmind
from smallmind import (
    AdamW,
    Distillation,
    InputError,
    LossScaler,
    Preferences,
    Run,
    Settings,
    TensorPool,
    Tokenizer,
    Training,
    TrainingConfig,
    TransformerModel,
)
from smallmind.text.dataset import Dataset
from tests.programs import refuses
from tests.runs.small import create

TEXT = "the cat sat on the mat. the dog sat on the log.\n" * 20
TOKENIZER = Tokenizer(TEXT)
MODEL = TransformerModel(TOKENIZER.vocab_size, 8, 8, 1, 2, backend="numpy")
IDS = np.zeros((2, 4), np.int32)
MATRIX = np.ones((3, 3), np.float32)
BAD = [None, "word", 1.5, -1, object(), [1], np.zeros(3), b"x", float("nan"), [[1], [1, 2]], True]


def training():
    model = TransformerModel(TOKENIZER.vocab_size, 8, 8, 1, 2, backend="numpy")
    return Training(model, TOKENIZER, TEXT, batch_size=2)


# Function -> arguments that it takes. Each of them is replaced by every BAD value.
CALLS = {
    AdamW: {"model": MODEL, "learning_rate": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8},
    AdamW(MODEL).step: {"max_grad_norm": 1.0, "loss_scale": 1.0, "max_grad_value": 1.0},
    Distillation: {"teacher": MODEL, "temperature": 2.0, "alpha": 0.5, "top_k": 4},
    LossScaler: {"scale": 65536.0},
    Preferences.of_texts: {
        "reference": MODEL,
        "tokenizer": TOKENIZER,
        "pairs": [("the", "cat", "dog")],
        "beta": 0.1,
    },
    Run.open: {"directory": "none"},
    Run.create: {"settings": None, "text": "none", "n_layer": 1},
    Settings: {"model": Settings().model, "run": Settings().run},
    Settings.from_fields: {"fields": {}},
    Settings.from_dict: {"saved": {}},
    TensorPool().rent: {"n": 4},
    TensorPool().return_: {"array": MATRIX},
    Tokenizer: {"text": TEXT, "kind": "char"},
    TOKENIZER.encode: {"text": "the"},
    Tokenizer("", "byte").encode: {"text": "the"},
    TOKENIZER.decode: {"ids": [1]},
    Tokenizer("", "byte").decode: {"ids": [1]},
    Tokenizer.from_state: {"state": TOKENIZER.state()},
    Training: {
        "model": MODEL,
        "tokenizer": TOKENIZER,
        "text": TEXT,
        "block_size": 8,
        "batch_size": 2,
        "seed": 1,
        "distillation": None,
    },
    lambda data: Training(MODEL, data=data): {"data": Dataset.from_text(TEXT, TOKENIZER, 8)},
    lambda config: list(training().steps(config)): {"config": TrainingConfig(steps=0)},
    training().train_optimized: {
        "steps": 0,
        "config": TrainingConfig(steps=0),
        "checkpoint_dir": None,
    },
    TransformerModel: {
        "vocab_size": 5,
        "block_size": 4,
        "n_embd": 4,
        "n_layer": 1,
        "n_head": 1,
        "dropout": 0.0,
        "seed": 1,
        "backend": "numpy",
        "norm": "layernorm",
    },
    MODEL.forward: {"ids": IDS},
    MODEL.inspect: {"ids": IDS, "targets": IDS},
    MODEL.loss: {"ids": IDS, "targets": IDS},
    MODEL.loss_and_gradients: {"ids": IDS, "targets": IDS, "scale": 1.0},
    MODEL.use_precision: {"precision": "float32"},
    TransformerModel.load: {"path": "none", "backend": "numpy"},
    smallmind.gradient_check: {
        "subject": MODEL,
        "config": None,
        "directions": 1,
        "tolerance": 1e-3,
        "seed": 0,
    },
    smallmind.generate: {"model": MODEL, "tokenizer": TOKENIZER, "prompt": "t", "max_tokens": 1},
    smallmind.load: {"path": "none", "checkpoint": None},
    smallmind.matmul: {"a": MATRIX, "b": MATRIX, "out": None},
    smallmind.matmul_transpose_a: {"a": MATRIX, "b": MATRIX},
    smallmind.matmul_transpose_b: {"a": MATRIX, "b": MATRIX},
    Dataset: {"tokens": np.arange(99), "block_size": 8, "batch_size": 2, "seed": 1},
    Dataset.from_text: {"text": TEXT, "tokenizer": TOKENIZER, "block_size": 8},
}


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__qualname__)
def test_a_wrong_argument_is_refused_with_a_sentence(function, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = CALLS[function]
    for name in good:
        for bad in BAD:
            try:
                function(**{**good, name: bad})
            except InputError as error:
                assert "\n" not in str(error)
            except TypeError as error:
                assert f"{name} must be " in str(error), (name, bad)
            except ValueError as error:
                assert "rented" in str(error) or "must be" in str(error), (name, bad)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: MODEL.loss(IDS, [[0, 0, 0, 1001], [0, 0, 0, 0]]),
            r"targets\[0, 3\] = 1001 is outside the vocabulary of 15",
        ),
        (lambda: MODEL.forward(IDS - 1), r"ids\[0, 0\] = -1 is outside the vocabulary of 15"),
        (lambda: MODEL.forward(IDS[0]), r"ids has shape \(4,\); it must be \(B, T\)"),
        (lambda: MODEL.loss(IDS, IDS * 1.0), "targets is of type float64; it must hold whole num"),
        (lambda: MODEL.forward([[1], [1, 2]]), "ids has rows of different lengths"),
        (lambda: TOKENIZER.decode([1, 99]), r"ids\[1\] = 99 is outside the vocabulary of 15"),
        (lambda: Tokenizer("", "byte").decode([256]), r"ids\[0\] = 256 is outside the vocab"),
    ],
)
def test_an_error_names_the_offender(call, message):
    refuses(message, call)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: smallmind.generate(MODEL, TOKENIZER, max_token=5),
            "max_token' of generate.*max_tokens",
        ),
        (
            lambda: smallmind.generate_samples(MODEL, TOKENIZER, temperatur=1),
            "temperatur' of generate_samples.*temperature",
        ),
        (lambda: TransformerModel(5, n_layers=3), "n_layers' of TransformerModel.*n_layer"),
        (lambda: TransformerModel(MODEL.config, sed=3), "sed' of TransformerModel.*seed"),
        (lambda: Tokenizer(TEXT, knd="bpe"), "knd' of CharTokenizer.*kind"),
        (lambda: Tokenizer(TEXT, "bpe", vocabsize=300), "vocabsize' of BPETokenizer.*vocab_size"),
        (lambda: AdamW(MODEL, learning_rte=1), "learning_rte' of AdamW.*learning_rate"),
        (lambda: smallmind.Muon(MODEL, momentm=1), "momentm' of Muon.*momentum"),
        (
            lambda: Training(MODEL, TOKENIZER, TEXT, batchsize=2),
            "batchsize' of Training.*batch_size",
        ),
        (lambda: training().train(2, learnig_rate=1), "learnig_rate' of train.*learning_rate"),
        (lambda: training().train_optimized(step=2), "step' of train_optimized.*steps"),
        (lambda: TrainingConfig(step=2), "step' of TrainingConfig.*steps"),
        (lambda: Distillation(MODEL, alfa=1), "alfa' of Distillation.*alpha"),
        (lambda: smallmind.load("none", checkpont=1), "checkpont' of load.*checkpoint"),
        (lambda: smallmind.gradient_check(MODEL, direction=1), "gradient_check.*directions"),
        (lambda: AdamW(MODEL, lr=1e-3), "lr' of AdamW; did you mean learning_rate"),
        (lambda: AdamW(MODEL, wd=0.1), "wd' of AdamW; did you mean weight_decay"),
        (lambda: smallmind.Muon(MODEL, lr=1e-3), "lr' of Muon; did you mean learning_rate"),
    ],
)
def test_an_unknown_argument_is_refused_with_the_most_similar_one(call, message):
    with pytest.raises(TypeError, match=rf"{message}.*\?$") as caught:
        call()
    assert str(caught.value).startswith("unknown argument '") and "did you mean" in str(
        caught.value
    )


def test_an_error_within_a_function_is_not_taken_for_an_unknown_argument():
    with pytest.raises(TypeError, match="prompt must be "):
        smallmind.generate(MODEL, TOKENIZER, prompt=3, max_tokens=1)
    with pytest.raises(TypeError, match="missing"):
        AdamW()


def test_generate_checks_that_tokenizer_and_model_belong_together():
    trained = training()
    other = Tokenizer(TEXT.upper())  # as many characters
    assert smallmind.generate(trained.model, TOKENIZER, "the", max_tokens=1).startswith("the")
    with pytest.raises(InputError, match="is not the tokenizer that the model was trained with"):
        smallmind.generate(trained.model, other, "THE", max_tokens=1)
    with pytest.raises(InputError, match=r"the tokenizer has 256 tokens, the model vocab_size=15"):
        smallmind.generate(MODEL_UNTRAINED, Tokenizer("", "byte"), max_tokens=1)


MODEL_UNTRAINED = TransformerModel(TOKENIZER.vocab_size, 8, 8, 1, 2, backend="numpy")


def test_a_loaded_model_knows_its_tokenizer(tmp_path):
    run = create(tmp_path / "run", steps=4, val_every=0, save_every=2)
    assert repr(run) == f"<Run {run.path}: no checkpoint yet, 4 steps to train>"
    run.train()
    assert repr(Run.open(run.path)) == f"<Run {run.path}: finished, 4 steps>"
    for checkpoint in (None, 2):
        model, _ = smallmind.load(run.path, "numpy", checkpoint)
        with pytest.raises(InputError, match="is not the tokenizer that the model was trained"):
            smallmind.generate(model, Tokenizer(TEXT.upper()), "THE", max_tokens=1)
    for file in ("model.safetensors", "checkpoints/step-00000002.safetensors"):
        model = TransformerModel.load(run.path / file, "numpy")
        assert smallmind.generate(model, run.load()[1], "the", max_tokens=1).startswith("the")
        for other in (Tokenizer(TEXT.upper()), Tokenizer("the ")):
            with pytest.raises(InputError, match="is not the tokenizer that the model was trained"):
                smallmind.generate(model, other, other.decode([0]), max_tokens=1)
    (run.path / "checkpoints" / "step-00000004.safetensors").unlink()
    assert repr(Run.open(run.path)) == f"<Run {run.path}: saved at step 2 of 4>"


def test_objects_print_what_they_are():
    lines = repr(MODEL).splitlines()
    assert lines[0] == "TransformerModel: GPT-2, float32, backend numpy"
    assert lines[1].split() == ["token", "embedding", "15", "x", "8", "120"]
    total = sum(value.size for value in MODEL.parameters.values())
    assert lines[-1].split() == ["parameters", f"{total:,}"]
    assert repr(TOKENIZER) == "<CharTokenizer: 15 characters>"
    assert repr(Tokenizer("", "byte")) == "<ByteTokenizer: 256 bytes>"
    data = Dataset.from_text(TEXT, TOKENIZER, 8, batch_size=2)
    assert repr(data) == "<Dataset: 864 training and 96 held-out tokens, batches of 2 x 8>"
    assert repr(training()) == f"<Training: step 0 of 2,000 on {data!r}>"
    assert repr(AdamW(MODEL)).startswith("<AdamW: learning_rate=0.001, betas=(0.9, 0.99), ")
    assert repr(LossScaler()) == "<LossScaler: 65536, 0 steps without an overflow>"
    assert "from 1 layer of 8, alpha=0.5, temperature=2" in repr(Distillation(MODEL))
