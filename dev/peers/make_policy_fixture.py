#!/usr/bin/env python3
"""Makes dev/fixtures/policy.json: rewards and log-probabilities of rollouts, and what trl makes of them, in float64.

    python dev/peers/make_policy_fixture.py

trl's GRPOTrainer scores the rollouts and computes the loss; what it would get from a model, a sampler and rewards comes
from here instead: tokens, their log-probabilities, and rewards. Nothing of its formulas is replaced. All inputs are
numbers of float32, so that fp32 kernels get what trl gets.

trl 1.16 calls `--advantage` scale_rewards, and `--loss-norm` sequence, batch and constant the loss types grpo, dapo and
dr_grpo. Its bnpo is dapo where one pass holds the whole step, as here. The importance weight is its
vllm_importance_sampling_mode "token_truncate". Its use_bias_correction_kl, which multiplies the KL by π_θ / π_old
(DeepSeek-V3.2), is off, as in GRPO. Truncated completions are masked or not by mask_truncated_completions.

Needs torch, transformers and trl.
"""
import json
import math
import os
import tempfile

import datasets
import torch
import transformers
import trl

from trl_preferences import text_of, tokenizer_of_ids

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MODEL = os.path.join(ROOT, "dev/fixtures/models/llama-gqa")
FIXTURE = os.path.join(ROOT, "dev/fixtures/policy.json")
VOCAB, END, TOKEN = 101, 2, 5  # of the model; any token but END
GROUP, GROUPS, MAX_TOKENS = 4, 3, 9
LENGTHS = [1, 4, 7, 2, 9, 3, 5, 9, 6, 9, 2, 8]  # three completions are cut
REWARDS = [1, 0, 0.25, 0.5, 1, 1, 1, 1, -0.75, 1.5, 0, 0]  # of the second group they are equal

FIRST = {"num_iterations": 1}  # π_old is π_θ
LATER = {"num_iterations": 2}
KL = {"beta": 0.04, "use_bias_correction_kl": False}
CAPPED = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0}
UNCAPPED = {**CAPPED, "vllm_importance_sampling_clip_max": math.inf}
MASKED = {"mask_truncated_completions": True}
HIGHER = {"epsilon": 0.2, "epsilon_high": 0.28}
GRPO = {"loss_type": "grpo", "scale_rewards": "group"}
DAPO = {"loss_type": "dapo", "scale_rewards": "group", **HIGHER}
DR_GRPO = {"loss_type": "dr_grpo", "scale_rewards": "none"}
BATCH = {"loss_type": "dapo", "scale_rewards": "batch"}

CASES = {
    "grpo, first update": {**GRPO, **FIRST},
    "grpo, later update": {**GRPO, **LATER},
    "grpo, later update, kl": {**GRPO, **LATER, **KL},
    "grpo, first update, capped": {**GRPO, **FIRST, **CAPPED},
    "grpo, later update, capped": {**GRPO, **LATER, **CAPPED},
    "grpo, later update, not capped": {**GRPO, **LATER, **UNCAPPED},
    "grpo, later update, masked": {**GRPO, **LATER, **MASKED},
    "dapo, first update": {**DAPO, **FIRST},
    "dapo, later update": {**DAPO, **LATER},
    "dapo, later update, kl, capped, masked": {**DAPO, **LATER, **KL, **CAPPED, **MASKED},
    "dr_grpo, first update, kl": {**DR_GRPO, **FIRST, **KL},
    "dr_grpo, later update": {**DR_GRPO, **LATER},
    "dr_grpo, later update, masked": {**DR_GRPO, **LATER, **MASKED},
    "batch, first update, capped": {**BATCH, **FIRST, **CAPPED},
    "batch, later update": {**BATCH, **LATER},
}
ADVANTAGE = {"group": "group", "batch": "batch", "none": "mean-only"}
LOSS_NORM = {"grpo": "sequence", "dapo": "batch", "dr_grpo": "constant"}


def numbers_of_float32(tensor, step=2**-20):
    """Rounded to multiples of 2⁻²⁰, which are short enough for a file."""
    return (tensor / step).round() * step


def make_rollouts():
    """[completions, longest]: log-probabilities of the four models, zeros after the end."""
    generator = torch.Generator().manual_seed(5)
    shape = len(LENGTHS), max(LENGTHS)

    def normal(scale):
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    logps = -normal(1.5).abs() - 0.01
    old = logps + normal(0.3)
    rollouts = {"logps": logps, "old": old, "sampler": old + normal(0.5), "reference": logps + normal(0.4)}
    mask = torch.arange(shape[1])[None, :] < torch.tensor(LENGTHS)[:, None]
    return {name: numbers_of_float32(values) * mask for name, values in rollouts.items()}


class FromRollouts(trl.GRPOTrainer):
    """Samples, scores and evaluates nothing itself."""

    rollouts = None

    def _generate(self, prompts):
        ids = [[TOKEN] * (n - 1) + [TOKEN if n == MAX_TOKENS else END] for n in LENGTHS]
        texts = [text_of(row) for row in ids]
        sampled = [self.rollouts["sampler"][i, :n].tolist() for i, n in enumerate(LENGTHS)]
        prompt_ids = [[TOKEN]] * len(prompts)
        return prompt_ids, ids, None, texts, sampled if self.use_vllm else None, {}, None, [[] for _ in prompts]

    def _calculate_rewards(self, *_):
        return torch.tensor(REWARDS, dtype=torch.float64)[:, None]

    def _get_per_token_logps_and_entropies(self, model, *_, **__):
        if torch.is_grad_enabled():
            return self.leaf, torch.zeros_like(self.leaf), None
        if model is self.ref_model:
            return self.rollouts["reference"], None, None
        return self.rollouts["old" if self.num_iterations > 1 else "logps"], None, None


def run(options, rollouts, prompts, tokenizer, folder):
    corrected = "vllm_importance_sampling_mode" in options
    args = trl.GRPOConfig(output_dir=folder, report_to=[], use_cpu=True, per_device_train_batch_size=len(LENGTHS),
                          num_generations=GROUP, max_completion_length=MAX_TOKENS, gradient_accumulation_steps=1,
                          steps_per_generation=1, **options)
    trainer = FromRollouts(model=MODEL, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=args,
                           train_dataset=prompts, processing_class=tokenizer)
    trainer.rollouts = rollouts
    trainer.use_vllm = corrected  # which only says here that there are log-probabilities of a sampler
    trainer.vllm_importance_sampling_correction = corrected
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    trainer.leaf = rollouts["logps"].clone().requires_grad_()
    inputs = trainer._generate_and_score_completions([{"prompt": text_of([TOKEN])} for _ in LENGTHS])
    assert ("old_per_token_logps" in inputs) == (options["num_iterations"] > 1 or corrected)
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    assert loss.dtype == torch.float64
    assert inputs["advantages"].dtype == torch.float64
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    case = {"advantage": ADVANTAGE[options["scale_rewards"]], "loss_norm": LOSS_NORM[options["loss_type"]],
            "clip_low": trainer.epsilon_low, "clip_high": trainer.epsilon_high, "kl": trainer.beta,
            "first_update": options["num_iterations"] == 1, "masked": trainer.mask_truncated_completions,
            "advantages": inputs["advantages"].tolist(), "loss": loss.item(), "gradient": ragged(trainer.leaf.grad),
            "clip_fraction": logged["clip_ratio/region_mean"]}
    if corrected:
        cap = trainer.vllm_importance_sampling_clip_max
        case["importance_cap"] = None if math.isinf(cap) else cap
        for ours, theirs in (("sampler_gap", "mean"), ("sampler_gap_largest", "max")):
            case[ours] = logged["sampling/sampling_logp_difference/" + theirs]
    if trainer.beta:
        case["kl_mean"] = logged["kl"]
    return case


def ragged(values):
    return [row[:n].tolist() for row, n in zip(values, LENGTHS)]


def rounded(value):
    if isinstance(value, list):
        return [rounded(x) for x in value]
    return float(f"{value:.10g}") if isinstance(value, float) else value


def main():
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    transformers.utils.logging.disable_progress_bar()
    rollouts, tokenizer = make_rollouts(), tokenizer_of_ids(VOCAB, END)
    prompts = datasets.Dataset.from_dict({"prompt": [text_of([TOKEN])] * GROUPS})
    cases = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, options in CASES.items():
            cases[name] = run(options, rollouts, prompts, tokenizer, folder)
    made_with = f"trl {trl.__version__} and transformers {transformers.__version__}"
    head = {"made_with": made_with, "group": GROUP, "max_tokens": MAX_TOKENS, "rewards": REWARDS, "lengths": LENGTHS,
            **{name: ragged(values) for name, values in rollouts.items()}}
    lines = [f'"{key}": {json.dumps(value)}' for key, value in head.items()]
    of_cases = [f'  "{name}": {json.dumps({key: rounded(x) for key, x in case.items()})}' for name, case in cases.items()]
    with open(FIXTURE, "w", encoding="utf-8") as file:
        file.write("{" + ",\n".join(lines) + ',\n"cases": {\n' + ",\n".join(of_cases) + "}}\n")


if __name__ == "__main__":
    main()
