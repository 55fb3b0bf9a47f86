"""The keywords of `Run.create`, so that an editor completes them and a type checker checks them.

A test compares them with the fields of the settings, and says what to write here.
"""

from os import PathLike
from typing import Any, Literal, TypedDict

RecipeName = Literal["gpt2", "modern", "chat"]


class RunFields(TypedDict, total=False):
    """The settings of a run by name, and the names that set several of them at once."""

    size: Literal["nano", "tiny", "small", "medium", "large"] | None
    arch: Literal["gpt2", "llama", "modern"] | None
    preset: Literal["test", "production", "long"] | None

    # model
    vocab_size: int
    block_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    tie_weights: bool
    bias: bool
    norm: str
    norm_epsilon: float
    mlp: str
    mlp_width: int | None
    position: str
    rope_theta: float
    head_size: int | None
    n_kv_head: int | None
    qk_norm: bool
    value_residual: bool
    x0_scalars: bool
    bigram_rows: int
    bigram_vocab: int | None
    zero_init: bool
    logit_softcap: float
    document_token: int | None
    part_settings: tuple[tuple[str, Any], ...]

    # training
    steps: int
    epochs: int
    sampling: str
    lengths: str | None
    learning_rate: float
    min_lr: float | None
    warmup_steps: int
    warmup_share: float | None
    warmup_epochs: float | None
    schedule: str
    lr_decay_factor: float
    lr_decay_every: int
    lr_decay_share: float
    plateau_patience: int
    optimizer: str
    matrix_learning_rate: float
    momentum: float
    momentum_warmup_steps: int
    freeze: str | None
    lora_rank: int
    lora_alpha: float | None
    lora_dropout: float
    lora_on: str
    weight_decay: float
    beta1: float
    beta2: float
    max_grad_norm: float
    max_grad_value: float
    grad_accum_steps: int
    data_shards: int | None
    reduce_precision: str
    shard_optimizer: bool
    allow_mixed_cpus: bool
    rank_timeout: float
    val_every: int
    val_batches: int
    sample_every: int
    save_every: int
    keep: int
    compress: bool
    early_stopping_patience: int
    early_stopping_min_delta: float
    target_loss: float | None
    max_rollbacks: int
    log_every: int
    use_mixed_precision: bool
    precision: str | None
    products: str | None
    micro_batch_size: int | None
    prefetch: int | None
    enable_diagnostics: bool
    check_gradient_health: bool
    diagnostic_interval: int
    detect_anomaly: bool
    use_gradient_checkpointing: bool
    checkpoint_strategy: str | None
    checkpoint_interval: int

    # run
    exclude: str | tuple[str, ...] | None
    include: str | tuple[str, ...] | None
    gitignore: bool
    text_field: str | None
    text_encoding: str | None
    text_separator: str | None
    chat: bool | None
    assistant: str | None
    chat_template: str | None
    template_args: str | None
    learn: str
    init_from: str | PathLike[str] | None
    tokenizer: str | PathLike[str]
    bpe_vocab_size: int
    bpe_split: str
    mask_documents: bool
    batch_size: int
    seed: int
    minutes: float | None
    threads: int | None
    adapt_threads: bool
    backend: str
    tensorboard: bool

    # distillation
    teacher: str | PathLike[str] | None
    temperature: float
    alpha: float
    learn_temperature: bool
    teacher_cache: str | PathLike[str] | None
    teacher_top_k: int

    # preferences
    loss: str | None
    dpo_beta: float

    # rewards
    reward: str | PathLike[str] | None
    reward_answers: int
    reward_tokens: int | None
    reward_updates: int
    reward_clip: float
    reward_beta: float
    reward_seconds: float
