"""Faults to plant in a training: a name, where it strikes, and a line of Python for each rank it strikes.

The line sees `torch`, `F` (torch.nn.functional), `dist`, `llama` (transformers' modeling_llama), `job`,
`train`, `optimizer` and `data` (slm_toolkit's modules of these names), `rank`, and the helpers of
planted_faults.py: `after(module, name, change)` lets `change` see what a function returned, `instead(module,
name, make)` replaces it by `make(original)`, `on_gradients(change)` changes each parameter's gradient as
backward makes it, `on_step(change)` and `after_step(change)` the arguments of Adam's update.
"""

from dataclasses import dataclass, field
from typing import Any

LOW = "low"
"every engine, wherever numerics are not fp32: one process of the same numerics and all strategies alike"
RANK_1 = "rank 1"
"of DDP"
ALL = "all"
"everything, the fp32 reference too"


@dataclass(frozen=True)
class Fault:
    name: str
    where: str
    "ddp, fsdp2, deepspeed, or one of the words above"
    patch: str
    harmless: str | None = None
    "why nothing is learnt otherwise"
    flags: dict[str, Any] = field(default_factory=dict)


_GROUPS = "after(job, 'build_optimizer', lambda made: [g.update({}) for g in made.param_groups])"
_MODEL = "after(job, 'build_model', lambda model: {})"
_SDPA = "instead(F, 'scaled_dot_product_attention', lambda f: lambda q, k, v, **o: f(q, k, v, **{{**o, {}}}))"
_LOGITS = "after(job, 'build_model', lambda m: m.lm_head.register_forward_hook(lambda h, i, out: {}))"
_ROPE = "after(job, 'build_model', lambda m: m.model.rotary_emb.inv_freq.{})"
_DS, _DDP, _FSDP = "deepspeed", "ddp", "fsdp2"

OPTIMIZER = (
    Fault("eps 1e-5", _DS, _GROUPS.format("eps=1e-5")),
    Fault("eps 1e-7", _FSDP, _GROUPS.format("eps=1e-7")),
    Fault("eps 1e-5", LOW, _GROUPS.format("eps=1e-5")),
    Fault("beta2 0.999", _DS, _GROUPS.format("betas=(0.9, 0.999)")),
    Fault("beta2 0.96", _DDP, _GROUPS.format("betas=(0.9, 0.96)")),
    Fault("beta1 0.88", _FSDP, _GROUPS.format("betas=(0.88, 0.95)")),
    Fault("beta1 0.95", LOW, _GROUPS.format("betas=(0.95, 0.95)")),
    Fault("weight decay 0", _DS, _GROUPS.format("weight_decay=0.0")),
    Fault("weight decay 0.2", _FSDP, _GROUPS.format("weight_decay=0.2 if g['weight_decay'] else 0.0")),
    Fault("weight decay on norms", _DDP, _GROUPS.format("weight_decay=0.1")),
    Fault("weight decay 0", LOW, _GROUPS.format("weight_decay=0.0")),
    Fault("learning rate x 1.5", LOW, "instead(train, 'learning_rate', lambda f: lambda *a: 1.5 * f(*a))"),
    Fault("learning rate x 1.02", _DS, "instead(train, 'learning_rate', lambda f: lambda *a: 1.02 * f(*a))"),
    Fault(
        "constant learning rate",
        _FSDP,
        "instead(train, 'learning_rate', lambda f: lambda c, *a: c.learning_rate)",
    ),
    Fault(
        "schedule a step late",
        _DDP,
        "instead(train, 'learning_rate', lambda f: lambda c, s, n: f(c, max(0, s - 1), n))",
    ),
    Fault(
        "schedule a step late",
        ALL,
        "instead(train, 'learning_rate', lambda f: lambda c, s, n: f(c, max(0, s - 1), n))",
    ),
    Fault("no bias correction", LOW, "on_step(lambda c: [s.add_(1000) for s in c.steps if s < 500])"),
    Fault("no bias correction", _DS, "on_step(lambda c: [s.add_(1000) for s in c.steps if s < 500])"),
    Fault("first moment forgotten", _FSDP, "on_step(lambda c: [m.zero_() for m in c.exp_avgs])"),
    Fault("first moment in bf16", LOW, "after_step(lambda c: [m.copy_(m.bfloat16()) for m in c.exp_avgs])"),
    Fault(
        "second moment in bf16", LOW, "after_step(lambda c: [m.copy_(m.bfloat16()) for m in c.exp_avg_sqs])"
    ),
    Fault(
        "second moment in bf16", _DS, "after_step(lambda c: [m.copy_(m.bfloat16()) for m in c.exp_avg_sqs])"
    ),
    Fault("masters rounded to bf16", LOW, "after_step(lambda c: [p.copy_(p.bfloat16()) for p in c.params])"),
    Fault("masters rounded to bf16", _DS, "after_step(lambda c: [p.copy_(p.bfloat16()) for p in c.params])"),
    Fault("update left out in step 3", _DS, "on_step(lambda c: c.leave_out(c.number == 3))"),
    Fault("update left out in step 3", _DDP, "on_step(lambda c: c.leave_out(c.number == 3))"),
    Fault("gradients of the step before", _FSDP, "on_step(lambda c: c.use_last_gradients())"),
    Fault("gradients of the step before", LOW, "on_step(lambda c: c.use_last_gradients())"),
    Fault(
        "gradients x 2 after clipping",
        _DDP,
        "on_step(lambda c: [g.mul_(2.0) for g in c.grads])",
        harmless="Adam's update does not change with the gradients' scale, and eps is 1e-8",
    ),
)
CLIPPING = (
    Fault(
        "no clipping",
        _FSDP,
        "after(job, 'build_optimizer', lambda made: setattr(made, 'max_grad_norm', 1e9))",
    ),
    Fault(
        "clipping at 0.5",
        _DDP,
        "after(job, 'build_optimizer', lambda made: setattr(made, 'max_grad_norm', 0.5))",
    ),
    Fault(
        "clipping at 0.5",
        _DS,
        "after(train, 'set_up', lambda run: setattr(run.model.optimizer, 'clip_grad', 0.5))",
    ),
    Fault(
        "each gradient clipped alone",
        LOW,
        "on_gradients(lambda name, g: g / max(1.0, g.float().norm().item() / 0.05))",
    ),
)
REDUCTION = (
    Fault(
        "no reduction",
        _DDP,
        "instead(job, 'set_reduction', lambda f: lambda m, c: m.register_comm_hook(None, keep))",
    ),
    Fault(
        "one projection never reduced",
        _DDP,
        "instead(job, 'set_reduction', lambda f: keep_one('model.layers.1.mlp.up_proj.weight'))",
    ),
    Fault(
        "no reduction in step 3",
        _DDP,
        "instead(job, 'set_reduction', lambda f: lambda m, c: m.register_comm_hook(None, keep_in_step(3)))",
    ),
    Fault(
        "noise on one rank's gradients",
        RANK_1,
        "on_step(lambda c: [g.add_(torch.randn_like(g), alpha=1e-3 * g.float().std().item()) for g "
        "in c.grads])",
    ),
    Fault(
        "noise on one rank's weights",
        RANK_1,
        "on_step(lambda c: [p.add_(torch.randn_like(p), alpha=1e-4) for p in c.params])",
    ),
    Fault("sum for mean", _DS, "on_gradients(lambda name, g: g * 2)"),
    Fault("sum for mean", _FSDP, "on_loss(lambda g: g * 2)"),
    Fault("gradients x 1.01", _DDP, "on_gradients(lambda name, g: g * 1.01)"),
    Fault("only rank 0 counts", _FSDP, "on_loss(lambda g: g * 2 if rank == 0 else g * 0)"),
    Fault("rank 1 left out of the mean", _DS, "on_gradients(lambda name, g: g if rank == 0 else g * 0)"),
    Fault(
        "one layer's gradients x 1.1",
        _DS,
        "on_gradients(lambda name, g: g * 1.1 if 'layers.2' in name else g)",
    ),
    Fault("head's gradient x 0.5", _DDP, "on_gradients(lambda name, g: g * 0.5 if 'lm_head' in name else g)"),
    Fault("embedding's gradient lost", _DDP, "on_gradients(lambda name, g: g * 0 if 'embed' in name else g)"),
    Fault(
        "a norm's gradient turned round",
        _DS,
        "on_gradients(lambda name, g: -g if name.endswith('layers.0.input_layernorm.weight') else g)",
    ),
    Fault(
        "gradients rounded to float8",
        LOW,
        "on_gradients(lambda name, g: g.to(torch.float8_e5m2).to(g.dtype))",
    ),
    Fault(
        "gradients rounded to float8",
        _DS,
        "on_gradients(lambda name, g: g.to(torch.float8_e5m2).to(g.dtype))",
    ),
)
_TWO = {"gradient_accumulation_steps": 2}
ACCUMULATION = (
    Fault("micro-steps summed", _DDP, "on_gradients(lambda name, g: g * 2)", flags=_TWO),
    Fault("only one micro-step counts", _FSDP, "on_loss(EveryOther())", flags=_TWO),
    Fault("only one micro-step counts", _DS, "on_gradients(EveryOther())", flags=_TWO),
)
DATA = (
    Fault(
        "both ranks see rank 0's batches",
        _FSDP,
        "instead(train, 'endless', lambda f: lambda *a, **o: same_on_all(f(*a, **o)))",
    ),
    Fault(
        "the first batch for ever",
        _DS,
        "instead(train, 'endless', lambda f: lambda *a, **o: stuck(f(*a, **o)))",
    ),
    Fault(
        "batches of another seed on rank 1",
        RANK_1,
        "instead(data, 'CopiedPhrases', lambda f: lambda **o: f(**{**o, 'seed': 7}))",
    ),
    Fault("labels not shifted", LOW, "on_labels(lambda labels: torch.roll(labels, 1, dims=1))"),
    Fault("labels not shifted", _DS, "on_labels(lambda labels: torch.roll(labels, 1, dims=1))"),
    Fault("labels two further", LOW, "on_labels(lambda labels: torch.roll(labels, -1, dims=1))"),
    Fault(
        "mean of the ranks' means",
        _DDP,
        "instead(train, 'steps_by_labels', lambda f: lambda a, batches, r, n: batches)",
    ),
    Fault(
        "first tokens of documents have a loss",
        LOW,
        "instead(train, 'model_inputs', lambda f: lambda b, c: {**f(b, c), 'labels': b['input_ids']})",
    ),
    Fault(
        "last eighth of each sequence has no loss",
        _FSDP,
        "on_labels(lambda labels: torch.where(torch.arange(128) < 112, labels, -100))",
    ),
    Fault(
        "one token in a hundred is another",
        _DS,
        "instead(train, 'model_inputs', lambda f: lambda b, c: {**f(b, c), 'input_ids': "
        "noisy(b['input_ids'])})",
    ),
)
ATTENTION = (
    Fault("no causal mask", LOW, _SDPA.format("'attn_mask': None, 'is_causal': False")),
    Fault("no causal mask", _FSDP, _SDPA.format("'attn_mask': None, 'is_causal': False")),
    Fault("documents see each other", LOW, _SDPA.format("'attn_mask': None, 'is_causal': True")),
    Fault("documents see each other", _DS, _SDPA.format("'attn_mask': None, 'is_causal': True")),
    Fault(
        "a window of 32 tokens",
        LOW,
        "instead(F, 'scaled_dot_product_attention', lambda f: lambda q, k, v, **o: f(q, k, v, "
        "**windowed(q, o)))",
    ),
    Fault("attention's scale x 1.1", LOW, _SDPA.format("'scale': 1.1 * q.shape[-1] ** -0.5")),
    Fault("attention's scale x 1.01", _DS, _SDPA.format("'scale': 1.01 * q.shape[-1] ** -0.5")),
    Fault("attention's scale 1 / d", _DDP, _SDPA.format("'scale': 1 / q.shape[-1]")),
    Fault("attention dropout 0.1", LOW, _SDPA.format("'dropout_p': 0.1")),
    Fault("attention dropout 0.02", _FSDP, _SDPA.format("'dropout_p': 0.02")),
    Fault(
        "keys rounded to float8",
        LOW,
        "instead(F, 'scaled_dot_product_attention', lambda f: lambda q, k, v, **o: "
        "f(q, k.to(torch.float8_e4m3fn).to(k.dtype), v, **o))",
    ),
)
POSITIONS = (
    Fault("RoPE's theta 500,000", LOW, _ROPE.format("copy_(500000.0 ** -(torch.arange(0, 64, 2) / 64))")),
    Fault("RoPE's theta x 1.1", _DS, _ROPE.format("copy_(11000.0 ** -(torch.arange(0, 64, 2) / 64))")),
    Fault("RoPE's frequencies in bf16", _FSDP, _ROPE.format("copy_(m.model.rotary_emb.inv_freq.bfloat16())")),
    Fault("RoPE's frequencies in bf16", LOW, _ROPE.format("copy_(m.model.rotary_emb.inv_freq.bfloat16())")),
    Fault("no positions", LOW, _ROPE.format("zero_()")),
    Fault("positions doubled", _DDP, _ROPE.format("mul_(2.0)")),
    Fault(
        "positions one further",
        _DS,
        "instead(llama.LlamaRotaryEmbedding, 'forward', lambda f: lambda s, x, position_ids: f(s, x, "
        "position_ids + 1))",
        harmless="RoPE's products depend on the distance of two positions only; bf16 rounds them otherwise",
    ),
)
MODEL = (
    Fault(
        "dropout 0.1 after each MLP",
        _DDP,
        "after(job, 'build_model', lambda m: [x.mlp.register_forward_hook(lambda h, i, o: F.dropout(o, 0.1)) "
        "for x in m.model.layers])",
    ),
    Fault("norms' eps 1e-3", LOW, "set_eps(1e-3)"),
    Fault("norms' eps 1e-5", _DS, "set_eps(1e-5)"),
    Fault(
        "norms' weights ignored",
        LOW,
        "instead(llama.LlamaRMSNorm, 'forward', lambda f: lambda s, x: "
        "F.rms_norm(x, x.shape[-1:], 0 * s.weight + 1, s.variance_epsilon))",
    ),
    Fault(
        "last layer left out",
        _FSDP,
        "after(job, 'build_model', lambda m: m.model.layers[-1].register_forward_hook(lambda h, i, o: i[0]))",
    ),
    Fault(
        "GELU for SiLU",
        LOW,
        "after(job, 'build_model', lambda m: [setattr(x.mlp, 'act_fn', torch.nn.GELU()) for x in "
        "m.model.layers])",
    ),
    Fault("one layer frozen", _DS, _MODEL.format("model.model.layers[1].requires_grad_(False)")),
    Fault(
        "norms frozen",
        _FSDP,
        _MODEL.format("[p.requires_grad_(False) for n, p in model.named_parameters() if 'norm' in n]"),
    ),
    Fault(
        "norms frozen",
        LOW,
        _MODEL.format("[p.requires_grad_(False) for n, p in model.named_parameters() if 'norm' in n]"),
    ),
    Fault(
        "head tied to the embedding",
        _DDP,
        _MODEL.format("setattr(model.lm_head, 'weight', model.model.embed_tokens.weight)"),
    ),
    Fault(
        "another first layer's weights",
        _DS,
        _MODEL.format("model.model.layers[0].mlp.up_proj.weight.data.mul_(1.05)"),
    ),
    Fault(
        "weights of another seed",
        _FSDP,
        _MODEL.format("[p.data.copy_(p.data.flip(0)) for p in model.parameters()]"),
    ),
    Fault(
        "queries and keys swapped",
        LOW,
        "instead(F, 'scaled_dot_product_attention', lambda f: lambda q, k, v, **o: f(k, q, v, **o))",
    ),
)
LOSS = (
    Fault("z-loss 1e-2", _DS, _LOGITS.format("ZLoss.apply(out, 1e-2)")),
    Fault(
        "label smoothing 0.01",
        LOW,
        "instead(F, 'cross_entropy', lambda f: lambda *a, **o: f(*a, **{**o, 'label_smoothing': 0.01}))",
    ),
    Fault("logits capped at 5", LOW, _LOGITS.format("5 * torch.tanh(out / 5)")),
    Fault("logits x 1.02", _FSDP, _LOGITS.format("out * 1.02")),
    Fault(
        "logits rounded to float8",
        LOW,
        _LOGITS.format("out + (out.to(torch.float8_e4m3fn).to(out.dtype) - out).detach()"),
        harmless="rounding without bias, averaged over a thousand tokens, moves the loss as bf16's own does",
    ),
)
FAULTS = (
    *(*OPTIMIZER, *CLIPPING, *REDUCTION, *ACCUMULATION),
    *(*DATA, *ATTENTION, *POSITIONS, *MODEL, *LOSS),
)
SAMPLE = (
    ("eps 1e-7", _FSDP),
    ("one projection never reduced", _DDP),
    ("RoPE's theta x 1.1", _DS),
)
"name and where of three that tests plant each time: of optimizer, reduction and model"
