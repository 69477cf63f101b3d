"""Preference losses as trl trains with them, in float64: its own trainers, collators and losses.

trl 1.16 does not always compute what kernels/preference_loss.h says. Options, and in one place an override, make it so:

- DPO with label smoothing: DPOTrainer's loss `sigmoid` ignores label_smoothing. With f(h) = −ln σ(h) and
  f(−h) = f(h) + h, our (1 − ε)·f(h) + ε·f(−h) is f(h) + ε·h. trl's `robust` with a smoothing of δ is
  f(h) − δ/(1 − 2δ)·h, so that 2·sigmoid − robust with δ = ε/(1 + 2ε) is our loss.
- IPO: the loss takes means over tokens, as ours. The rewards that trl logs are β times sums, ours β times means: they
  are divided by the response's tokens here.
- ORPO: trl's NLL is over the chosen prompt and response, and a mean over the tokens of a batch. Ours is over the
  response, and a mean over pairs: the override takes it from trl's mean log-probabilities of the responses. The
  odds-ratio term is trl's own.

trl computes some things in float32 whatever the model's dtype is; make_reference.Float64 turns them into float64. It
does not reach the gradient of DPOTrainer's chunked head, so that its losses have an error of about 1e-7.
"""
import copy
import os
import tempfile

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # that CPO and ORPO may move

import datasets  # noqa: E402
import tokenizers  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from trl.experimental.cpo import CPOConfig, CPOTrainer  # noqa: E402
from trl.experimental.orpo import ORPOConfig, ORPOTrainer  # noqa: E402

from compare_curves import BETAS, EPS  # noqa: E402
from make_reference import Float64  # noqa: E402


def tokenizer_of_ids(vocab_size, end):
    """The token with the id i is the word <i>. All responses end with the token `end`: trl then adds none."""
    words = {f"<{i}>": i for i in range(vocab_size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<0>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"<{end}>", pad_token="<0>")


def text_of(ids):
    return "".join(f" <{i}>" for i in ids)


class PairByPair:
    """A micro-step is one pair. Records what trl logs of it, as sums over the responses and with our rewards."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        logged = self.logged()
        pair = {"loss": loss.item(), "tokens": self.response_tokens(inputs)}
        for key in ("rewards", "logps"):
            pair[key] = [logged[f"{key}/{side}"][-1] for side in ("chosen", "rejected")]
        self.recorded.append(self.ours(pair))
        return loss


class DPO(PairByPair, trl.DPOTrainer):
    def logged(self):
        return self._metrics["train"]

    def response_tokens(self, inputs):
        return inputs["completion_mask"].sum(1).tolist()

    def ours(self, pair):
        pair["log_ratios"] = [reward / self.beta for reward in pair["rewards"]]
        if self.loss_types == ["ipo"]:
            pair["rewards"] = [reward / n for reward, n in zip(pair["rewards"], pair["tokens"])]
        return pair


class WithoutReference(PairByPair):
    def logged(self):
        return self._stored_metrics["train"]

    def response_tokens(self, inputs):
        return [int((inputs[side + "_labels"] != -100).sum()) for side in ("chosen", "rejected")]

    def ours(self, pair):
        return {**pair, "logps": [mean * n for mean, n in zip(pair["logps"], pair["tokens"])]}


class SimPO(WithoutReference, CPOTrainer):
    pass


class ORPO(WithoutReference, ORPOTrainer):
    def concatenated_forward(self, model, batch):
        chosen_logps, *others, _ = super().concatenated_forward(model, batch)
        return chosen_logps, *others, -chosen_logps.mean()


def trainer_of(loss, beta, label_smoothing=0, simpo_margin=0):
    """The trainer, its configuration's class, and the options that make its loss ours."""
    if loss == "simpo":
        return SimPO, CPOConfig, {"beta": beta, "loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": simpo_margin,
                                  "label_smoothing": label_smoothing}
    if loss == "orpo":
        return ORPO, ORPOConfig, {"beta": beta}
    if loss == "dpo" and label_smoothing:
        return DPO, trl.DPOConfig, {"beta": beta, "loss_type": ["sigmoid", "robust"], "loss_weights": [2.0, -1.0],
                                    "label_smoothing": label_smoothing / (1 + 2 * label_smoothing)}
    return DPO, trl.DPOConfig, {"beta": beta, "loss_type": ["ipo" if loss == "ipo" else "sigmoid"]}


def train(model_path, steps, lr, **options):
    """Trains a model on each step's pairs (prompt, chosen, rejected: lists of ids). Returns each step's values, under
    the keys of our log.jsonl."""
    trainer_class, config_class, loss = trainer_of(**options)
    pairs = [pair for step in steps for pair in step]
    ends = {response[-1] for _, *responses in pairs for response in responses}
    if len(ends) != 1 or len({len(step) for step in steps}) != 1:
        raise ValueError("all responses must end with the same token, and all steps must have as many pairs")
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64,
                                                              attn_implementation="eager")
    rows = [dict(zip(("prompt", "chosen", "rejected"), map(text_of, pair))) for pair in pairs]
    with tempfile.TemporaryDirectory() as folder, Float64():
        config = config_class(
            output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False, max_length=1 << 20,
            per_device_train_batch_size=1, gradient_accumulation_steps=len(steps[0]), max_steps=len(steps),
            train_sampling_strategy="sequential", learning_rate=lr, lr_scheduler_type="constant", warmup_steps=0,
            optim="adamw_torch", adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_epsilon=EPS, weight_decay=0.0,
            max_grad_norm=0.0, save_strategy="no", report_to=[], disable_tqdm=True, logging_strategy="no", **loss)
        reference = {"ref_model": copy.deepcopy(model)} if trainer_class is DPO else {}
        trainer = trainer_class(model=model, args=config, train_dataset=datasets.Dataset.from_list(rows),
                                processing_class=tokenizer_of_ids(model.config.vocab_size, ends.pop()), **reference)
        trainer.recorded = []
        trainer.train()
    for pair, recorded in zip(pairs, trainer.recorded, strict=True):
        if recorded["tokens"] != [len(response) for response in pair[1:]]:
            raise RuntimeError(f"trl has responses of {recorded['tokens']} tokens in place of {pair[1:]}")
    size = len(steps[0])
    return [step_of(trainer.recorded[begin:begin + size]) for begin in range(0, len(pairs), size)]


def step_of(pairs):
    """Means over a step's pairs; log-probabilities and the divergence are means over tokens."""
    def mean(values):
        return sum(values) / len(pairs)

    def per_token(key, sides):
        return (sum(pair[key][side] for pair in pairs for side in sides) /
                sum(pair["tokens"][side] for pair in pairs for side in sides))

    step = {"loss": mean([pair["loss"] for pair in pairs])}
    for side, name in enumerate(("chosen", "rejected")):
        step["rewards_" + name] = mean([pair["rewards"][side] for pair in pairs])
        step["logp_" + name] = per_token("logps", [side])
    step["rewards_margin"] = step["rewards_chosen"] - step["rewards_rejected"]
    step["rewards_accuracy"] = mean([pair["rewards"][0] > pair["rewards"][1] for pair in pairs])
    if "log_ratios" in pairs[0]:
        step["kl"] = per_token("log_ratios", [0, 1])
    return step
