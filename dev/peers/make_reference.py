#!/usr/bin/env python3
"""Makes the reference fixtures of the tests: tiny random models of each family and the results that PyTorch computes from them.

    python dev/peers/make_reference.py dev/fixtures/models [CASE ...]        default: all cases

needs torch and transformers (4 or 5). Every number comes from fixed seeds, so a second run writes the same weights, and
the same references up to the last digits of float64 sums. Each case becomes a folder:

    config.json, model.safetensors ...   the model as transformers saves it (random weights in the case's dtype)
    config_transformers4.json            all but GPT-2: the same config in the keys of transformers 4
    reference.safetensors                what follows from those weights in float64:
        tokens, targets     int32 [B, T]      inputs and next tokens; target -1 is ignored
        logits              float64 [B, T, V]
        loss                float64 []        mean cross-entropy over the targets that are not ignored
        grad/<name>         float32           gradient of the loss for each parameter of the file, rounded once
        adamw_losses        float64 [10]      the loss before each of 10 AdamW steps on this same batch

transformers computes RMSNorm, softmax and RoPE in float32 whatever the model's dtype is. Here such requests are turned
into float64 (class Float64), and NoFloat32 fails if any operator still returns a float32 tensor.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM,
                          Olmo2Config, Olmo2ForCausalLM, Phi3Config, Phi3ForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM,
                          SmolLM3Config, SmolLM3ForCausalLM)

IGNORE = -1
STEPS, LR, BETAS, EPS, WEIGHT_DECAY, GRAD_CLIP = 10, 1e-2, (0.9, 0.95), 1e-8, 0.1, 1.0


def gpt2(**options):
    options = dict(n_layer=2, n_embd=32, n_head=4, n_positions=32) | options
    return GPT2LMHeadModel, GPT2Config(bos_token_id=0, eos_token_id=0, **options)


def llama(**options):
    # rope_theta and rope_scaling are understood by transformers 4 and 5.
    options = dict(num_hidden_layers=2, hidden_size=24, num_attention_heads=4, intermediate_size=40, vocab_size=53,
                 max_position_embeddings=32, rope_theta=1000.0) | options
    return LlamaForCausalLM, LlamaConfig(bos_token_id=1, eos_token_id=2, **options)


def tiny(model_class, config_class, **options):
    """A descendant of LLaMA."""
    options = dict(num_hidden_layers=2, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=20,
                   vocab_size=29, max_position_embeddings=32, rope_theta=1000.0, pad_token_id=None) | options
    return model_class, config_class(bos_token_id=1, eos_token_id=2, **options)


# name: (model class and config, B, T, options)
CASES = {
    "gpt2-plain": (gpt2(n_layer=3, n_embd=48, vocab_size=67, n_positions=24), 3, 17, {}),
    # LayerNorm's epsilon is large, so that a wrong one can't hide.
    "gpt2-inner-eps": (gpt2(vocab_size=61, n_inner=80, layer_norm_epsilon=1e-2), 2, 11, {}),
    # The sequence fills the position table, and some targets are ignored.
    "gpt2-untied": (gpt2(vocab_size=59, n_head=2, n_positions=12, tie_word_embeddings=False), 2, 12, {"ignore": True}),
    "gpt2-fp16": (gpt2(vocab_size=37, n_embd=24), 2, 9, {"dtype": torch.float16}),
    "llama-gqa": (llama(hidden_size=48, num_attention_heads=6, num_key_value_heads=2, intermediate_size=56,
                        vocab_size=101, rope_theta=10000.0), 2, 13, {}),
    "llama-mqa-head-dim": (llama(hidden_size=32, num_key_value_heads=1, head_dim=14, rms_norm_eps=1e-2), 2, 11, {}),
    "llama-bias-tied": (llama(num_key_value_heads=2, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
                        2, 11, {"ignore": True}),
    # Wavelengths 6, 20, 63, 199 ... against 16 and 64: kept, blended and divided frequencies all occur.
    "llama-rope-llama3": (llama(num_attention_heads=2, num_key_value_heads=1, head_dim=16, rope_theta=10000.0,
                                max_position_embeddings=256,
                                rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                              "high_freq_factor": 4.0, "original_max_position_embeddings": 64}),
                          2, 21, {}),
    "llama-rope-linear": (llama(rope_scaling={"rope_type": "linear", "factor": 2.5}), 2, 14, {}),
    # Longer than max_position_embeddings, so that the scaling acts.
    "llama-rope-dynamic": (llama(max_position_embeddings=16, rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
                           2, 25, {}),
    "llama-bf16": (llama(num_key_value_heads=2), 2, 10, {"dtype": torch.bfloat16}),
    "llama-sharded": (llama(num_key_value_heads=2, vocab_size=43), 1, 10, {"max_shard_size": "16KB"}),
    # Windows shorter than the sequence, in some layers and in all.
    "qwen2": (tiny(Qwen2ForCausalLM, Qwen2Config, tie_word_embeddings=True, use_sliding_window=True, sliding_window=5,
                   max_window_layers=1), 2, 11, {}),
    "qwen3": (tiny(Qwen3ForCausalLM, Qwen3Config, head_dim=6, attention_bias=True), 2, 9, {"ignore": True}),
    "smollm3": (tiny(SmolLM3ForCausalLM, SmolLM3Config, no_rope_layer_interval=2, mlp_bias=True), 2, 9, {}),
    "mistral": (tiny(MistralForCausalLM, MistralConfig, head_dim=6, sliding_window=4), 2, 12, {}),
    "phi3": (tiny(Phi3ForCausalLM, Phi3Config, hidden_size=24, num_attention_heads=3, num_key_value_heads=1,
                  partial_rotary_factor=0.5), 2, 9, {}),
    "olmo2": (tiny(Olmo2ForCausalLM, Olmo2Config, attention_bias=True, rms_norm_eps=1e-3), 2, 9, {}),
}


class Float64(TorchFunctionMode):
    """Whoever asks for float32, by dtype or by .float(), gets float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def widen(x):
            return torch.float64 if x is torch.float32 else x

        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(widen, args), **{key: widen(x) for key, x in (kwargs or {}).items()})


class NoFloat32(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.dtype == torch.float32:
                raise RuntimeError(f"{func} returned float32 in a float64 computation")
        return out


def randomise(model, generator):
    """Weights at which activations, attention scores and logits are of order 1, and no parameter is without effect."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() >= 2:
                p.normal_(0, 0.15, generator=generator)
            else:
                norm_weight = name.endswith("weight")  # all other vectors are biases
                p.normal_(1.0 if norm_weight else 0.0, 0.2, generator=generator)


def transformers4_config(config):
    """A config.json as transformers 4 writes it."""
    c = dict(config)
    if "rope_parameters" in c:
        rope = dict(c.pop("rope_parameters"))
        c["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            c["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        c["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    if c["rope_scaling"] and c["rope_scaling"]["rope_type"] in ("linear", "dynamic"):  # older files say "type"
        c["rope_scaling"] = {"type": c["rope_scaling"]["rope_type"], "factor": c["rope_scaling"]["factor"]}
    if "dtype" in c:
        c["torch_dtype"] = c.pop("dtype")
    c["transformers_version"] = "4.46.0"
    return c


def check_same_rope(a, b):
    def rope(config):  # transformers 5 keeps the old key "type" beside the new one
        return {k: v for k, v in config.to_dict()["rope_parameters"].items() if k != "type"}

    if int(transformers.__version__.split(".")[0]) >= 5 and rope(a) != rope(b):
        raise RuntimeError(f"the two forms of the config differ: {rope(a)} and {rope(b)}")


def loss_of(model, tokens, targets):
    logits = model(input_ids=tokens.long(), use_cache=False).logits
    return logits, F.cross_entropy(logits.flatten(0, 1), targets.long().flatten(), ignore_index=IGNORE)


def adamw_losses(model, tokens, targets):
    params = list(model.parameters())
    groups = [{"params": [p for p in params if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
              {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, foreach=False)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        _, loss = loss_of(model, tokens, targets)
        loss.backward()
        # By hand: torch.nn.utils.clip_grad_norm_ adds 1e-6 to the norm.
        norm = torch.sqrt(sum((p.grad**2).sum() for p in params))
        for p in params:
            p.grad *= torch.clamp(GRAD_CLIP / norm, max=1.0)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def make_case(folder, seed, model_and_config, B, T, ignore=False, dtype=torch.float32, max_shard_size="1GB"):
    model_class, config = model_and_config
    shutil.rmtree(folder, ignore_errors=True)
    generator = torch.Generator().manual_seed(seed)
    model = model_class(config)
    randomise(model, generator)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    if config.model_type != "gpt2":
        v4 = transformers4_config(json.loads((folder / "config.json").read_text()))
        (folder / "config_transformers4.json").write_text(json.dumps(v4, indent=2, sort_keys=True) + "\n")
        check_same_rope(type(config).from_dict(v4), type(config).from_pretrained(folder))

    text = torch.randint(config.vocab_size, (B, T + 1), generator=generator, dtype=torch.int32)
    tokens, targets = text[:, :-1].clone(), text[:, 1:].clone()
    if ignore:
        targets[torch.rand(B, T, generator=generator) < 0.3] = IGNORE
        targets[0, 0] = IGNORE  # at the edge too

    # The weights of the files, not those that were in memory. They enter a model that was built in float64.
    loaded = model_class.from_pretrained(folder)
    torch.set_default_dtype(torch.float64)
    with Float64():
        config._attn_implementation = "eager"
        exact = model_class(config).double()
        exact.load_state_dict({name: w.double() for name, w in loaded.state_dict().items()})
        exact.tie_weights()
        exact.eval()  # no dropout
        with NoFloat32():
            losses = adamw_losses(exact, tokens, targets)
        exact.load_state_dict({name: w.double() for name, w in loaded.state_dict().items()})
        exact.zero_grad()
        with NoFloat32():
            logits, loss = loss_of(exact, tokens, targets)
            loss.backward()
    torch.set_default_dtype(torch.float32)
    out = {"tokens": tokens, "targets": targets, "logits": logits.detach(), "loss": loss.detach(),
           "adamw_losses": losses}
    out |= {f"grad/{name}": p.grad.float() for name, p in exact.named_parameters()}
    save_file({name: x.contiguous() for name, x in out.items()}, folder / "reference.safetensors")
    print(f"{folder.name}: loss {loss:.4f}, logits {logits.std():.2f} rms, after {STEPS} steps {losses[-1]:.4f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the cases are written; older ones of the same name are replaced")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
    args = parser.parse_args()
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for seed, (name, (model, B, T, options)) in enumerate(CASES.items(), start=1):
        if name in args.cases or not args.cases:
            make_case(args.folder / name, seed, model, B, T, **options)
    (args.folder / "README.md").write_text(
        "Tiny random models and what PyTorch computes from them in float64. Generated numbers only, made by\n"
        "`python dev/peers/make_reference.py dev/fixtures/models` with "
        f"torch {torch.__version__.split('+')[0]} and transformers {transformers.__version__}; the script describes the files.\n")


if __name__ == "__main__":
    main()
