"""Against TRL itself, where it is installed: losses, gradients and 50 steps on the same answers."""

import collections
import random
import types

import numpy as np
import pytest

import smallmind
from smallmind.losses.preferences import Preferences, encode_pairs
from smallmind.losses.rewards import advantages_of, grpo
from smallmind.optim.adamw import AdamW
from tests.exchange.models import model_of, tokenizer_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]
STEPS, RATE, BATCH, BETA, COUNT = 50, 1e-4, 4, 0.2, 12
WORDS = ["the", "cat", "sat", "on", "a", "mat", "is", "it", "dog", "logs"]


def rows(seed=3):
    """Prompts with two answers of random words, which begin differently.

    Where both begin with the same word, its gradients cancel: what rounding leaves of them, perhaps
    nothing, is divided by itself in the first updates of AdamW.
    """
    draw = random.Random(seed)

    def said(most, words=WORDS):
        first = draw.choice(words)
        return " ".join([first, *(draw.choice(WORDS) for _ in range(draw.randrange(most)))])

    found = []
    for _ in range(COUNT):
        prompt, better = said(5), said(6)
        worse = said(4, [word for word in WORDS if word != better.split()[0]])
        found.append((prompt, f" {better}", f" {worse}"))
    return found


def trainer_of(method, tmp_path):
    """TRL's trainer on our model, with the rows in their order."""
    shared = {
        "output_dir": str(tmp_path / "out"), "per_device_train_batch_size": BATCH,
        "learning_rate": RATE, "lr_scheduler_type": "constant", "max_steps": STEPS,
        "logging_steps": 1, "report_to": "none", "use_cpu": True, "bf16": False,
        "save_strategy": "no", "train_sampling_strategy": "sequential", "beta": BETA,
        "max_grad_norm": 0.0, "weight_decay": 0.1, "optim": "adamw_torch", "max_length": None,
        "gradient_checkpointing": False, "disable_tqdm": True,
    }  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.pad_token, tokenizer.bos_token = tokenizer.eos_token, None

    def record(i, prompt, better, worse):
        if method == "kto":
            return {"prompt": prompt, "completion": (worse, better)[i % 2], "label": bool(i % 2)}
        return {"prompt": prompt, "chosen": better, "rejected": worse}

    data = datasets.Dataset.from_list([record(i, *row) for i, row in enumerate(rows())])
    if method == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        config, kind = ORPOConfig(**shared), ORPOTrainer
    elif method == "kto":
        config, kind = trl.KTOConfig(**shared), trl.KTOTrainer
    else:
        loss = {"dpo": "sigmoid", "ipo": "ipo"}[method]
        config, kind = trl.DPOConfig(**shared, loss_type=[loss]), trl.DPOTrainer
    return kind(model, args=config, train_dataset=data, processing_class=tokenizer)


@pytest.mark.parametrize("method", ["dpo", "ipo", "orpo", "kto"])
def test_trl_learns_the_same(tmp_path, method):
    """Losses of 50 steps of AdamW on batches in turn, and the weights after them."""
    torch.set_num_threads(1)
    tokenizer = tokenizer_of("bpe")
    model = model_of("Llama", tokenizer, False)
    smallmind.export(model, tokenizer, tmp_path / "model")
    trainer = trainer_of(method, tmp_path)
    for module in trainer.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    trainer.train()
    wanted = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(wanted) == STEPS

    batches = []
    for first in range(0, COUNT, BATCH):  # TRL takes KTO's other answers from the same batch
        part, labels = rows()[first : first + BATCH], None
        if method == "kto":
            labels = np.arange(BATCH) % 2 == 1
            answers = [(worse, better)[i % 2] for i, (_, better, worse) in enumerate(part)]
            others = [answers[-1], *answers[:-1]]
            part = [(row[0], *both) for row, *both in zip(part, answers, others, strict=True)]
        batches.append(Preferences(model, encode_pairs(tokenizer, part), BETA, method, labels))
    optimizer = AdamW(model, RATE, (0.9, 0.999), weight_decay=0.1)
    found = []
    for step in range(STEPS):
        model.zero_gradients()
        found.append(batches[step % len(batches)].loss_and_gradients(model))
        optimizer.step()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert abs(found[-1] - found[len(found) % len(batches)]) > 1e-3  # something was learned


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.2])
def test_rewards_are_learned_as_trl_learns_them(is_old, beta):
    """The loss of the same answers, and its derivatives by their log-probabilities."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    draw, clip = np.random.default_rng(5), 0.2
    groups, answers, most = 3, 4, 6
    rewards = draw.integers(0, 2, (groups, answers)).astype(np.float64)
    rewards[1] = 1.0  # all are equal
    counts = draw.integers(1, most + 1, groups * answers)
    mask = np.arange(most) < counts[:, None]
    logp, old, reference = (draw.normal(-2, spread, mask.shape) for spread in (0.5, 0.5, 0.5))
    old = old if is_old else logp.copy()
    advantages = advantages_of(rewards).reshape(-1)

    theirs = torch.tensor(logp, requires_grad=True)
    settings = {
        "beta": beta, "epsilon_low": clip, "epsilon_high": clip, "loss_type": "grpo",
        "importance_sampling_level": "token", "top_entropy_quantile": 1.0, "tools": None,
        "off_policy_mask_threshold": None, "use_vllm": False, "temperature": 1.0,
        "current_gradient_accumulation_steps": 1, "pad_token_id": 0, "use_liger_kernel": False,
        "aux_loss_enabled": False, "_entropy_bonus_enabled": False, "entropy_coef": 0.0,
        "_metrics": {"train": collections.defaultdict(list)},
        "args": types.SimpleNamespace(
            delta=None, use_bias_correction_kl=False, steps_per_generation=1, report_to=[],
            log_completions=False,
        ),
        "model": types.SimpleNamespace(training=True),
        "accelerator": types.SimpleNamespace(
            gather=lambda x: x, num_processes=1, gather_for_metrics=lambda x: x,
            reduce=lambda x, *_arguments, **_named: x,
        ),
        "_get_per_token_logps_and_entropies": lambda *_arguments, **_named: (
            theirs, torch.zeros_like(theirs), None,
        ),
    }  # fmt: skip
    ids, seen = torch.zeros(mask.shape, dtype=torch.long), torch.from_numpy(mask).int()
    inputs = {
        "prompt_ids": ids[:, :0], "prompt_mask": seen[:, :0], "completion_ids": ids,
        "completion_mask": seen, "advantages": torch.from_numpy(advantages),
        "num_items_in_batch": seen.sum(),
    }  # fmt: skip
    if is_old:
        inputs["old_per_token_logps"] = torch.from_numpy(old)
    if beta:
        inputs["ref_per_token_logps"] = torch.from_numpy(reference)
    wanted = GRPOTrainer._compute_loss(types.SimpleNamespace(**settings), None, inputs)
    wanted.backward()

    each = advantages.repeat(counts)
    terms = grpo(logp[mask], old[mask], reference[mask] if beta else None, each, clip, beta)
    shares = (1 / (len(counts) * counts)).repeat(counts)
    assert (terms.losses * shares).sum() == pytest.approx(float(wanted), abs=1e-9)
    dlogp = np.zeros(mask.shape)
    dlogp[mask] = terms.dlogp * shares
    np.testing.assert_allclose(dlogp, theirs.grad.numpy(), atol=1e-9)
