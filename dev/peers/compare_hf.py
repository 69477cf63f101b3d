#!/usr/bin/env python3
"""Compares this project with transformers, activation by activation.

    dev/peers/compare_hf.py MODEL [--tokens "1 2 3"] [--tolerance 1e-5]
    dev/peers/compare_hf.py --random 40                    models of random shapes of each family, made by transformers

With a model directory it runs `train_gpt logits --dump` and transformers on the same tokens. It prints the error of each
activation in the order of computation (the largest difference over the largest value), and the first one above the
tolerance. transformers computes in float64, so the error is ours.

With --random it generates models with odd sizes, one, some or all KV heads, tied and untied heads, with and without
biases, explicit head sizes and inner widths, every RoPE scaling, windows and no RoPE in some layers, fp32, fp16 and bf16
files, shards, and config.json in the form of transformers 4 or 5. Each model's logits must be within the tolerance, and what `train_gpt convert` saves must
load in transformers and give the same bits there.

Needs torch and transformers (4 or 5). Exit status 1 if a comparison fails.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import (GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, MistralForCausalLM, Olmo2ForCausalLM, Phi3ForCausalLM,
                          Qwen2ForCausalLM, Qwen3ForCausalLM, SmolLM3ForCausalLM)

from make_reference import Float64, randomise, transformers4_config


class CompareError(Exception):
    """One line: what failed."""


def load_exact(folder):
    """The model in float64, and its config."""
    config = transformers.AutoConfig.from_pretrained(folder)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    torch.set_default_dtype(torch.float64)
    config._attn_implementation = "eager"
    with Float64():
        model = type(loaded)(config).double()
    model.load_state_dict({name: x.double() for name, x in loaded.state_dict().items()})
    model.tie_weights()
    torch.set_default_dtype(torch.float32)
    return model.eval(), config


class Watch:
    """Collects inputs and outputs of modules under the names that `logits --dump` gives them."""

    def __init__(self):
        self.seen = {}

    def keep(self, name, x):
        self.seen[name] = x.detach().reshape(-1, x.shape[-1]).numpy()

    def module(self, module, output=None, inputs=None):
        def hook(_, args, result):
            if inputs:
                self.keep(inputs, args[0])
            if output:
                self.keep(output, result)
        module.register_forward_hook(hook)


def watch_gpt2(model, watch):
    for layer, block in enumerate(model.transformer.h):
        name = f"layers.{layer}."
        watch.module(block.ln_1, name + "norm1", name + "res1")
        watch.module(block.attn.c_attn, name + "qkv")
        watch.module(block.attn.c_proj, name + "proj", name + "att")
        watch.module(block.ln_2, name + "norm2", name + "res2")
        watch.module(block.mlp.c_fc, name + "fc")
        watch.module(block.mlp.c_proj, name + "fcproj", name + "act")
    watch.module(model.transformer.ln_f, "normf", "resf")


def watch_llama(model, watch):
    """LLaMA and its descendants. q and k are watched behind RoPE, where transformers has a function and no module."""
    modeling = sys.modules[type(model).__module__]
    original, rotated = modeling.apply_rotary_pos_emb, []

    def apply(*args, **kwargs):
        q, k = original(*args, **kwargs)
        rotated.extend(x.transpose(1, 2).flatten(2) for x in (q, k))
        return q, k

    modeling.apply_rotary_pos_emb = apply
    for layer, block in enumerate(model.model.layers):
        name, attention, mlp = f"layers.{layer}.", block.self_attn, block.mlp
        projected, fc = [], []
        fused = hasattr(attention, "qkv_proj")
        for projection in [attention.qkv_proj] if fused else [attention.q_proj, attention.k_proj, attention.v_proj]:
            projection.register_forward_hook(lambda _, args, result, seen=projected: seen.append(result))

        def keep_qkv(_, args, result, name=name, projected=projected):
            qkv = torch.cat(projected, -1)
            if rotated:  # not in a layer without RoPE
                qkv = torch.cat([*rotated, qkv[..., sum(x.shape[-1] for x in rotated):]], -1)
            watch.keep(name + "qkv", qkv)
            projected.clear()
            rotated.clear()

        def keep_fc(_, args, result, name=name, parts=fc, count=1 if hasattr(mlp, "gate_up_proj") else 2):
            parts.append(result)
            if len(parts) == count:
                watch.keep(name + "fc", torch.cat(parts, -1))
                parts.clear()

        after = not hasattr(block, "input_layernorm")  # norms after attention and the MLP
        if after:
            watch.module(attention.q_proj, inputs=name + "res1")
            watch.module(mlp, inputs=name + "res2")
        else:
            watch.module(block.input_layernorm, name + "norm1", name + "res1")
            watch.module(block.post_attention_layernorm, name + "norm2", name + "res2")
        attention.o_proj.register_forward_hook(keep_qkv)
        watch.module(attention.o_proj, name + "proj", name + "att")
        for projection in [mlp.gate_up_proj] if hasattr(mlp, "gate_up_proj") else [mlp.gate_proj, mlp.up_proj]:
            projection.register_forward_hook(keep_fc)
        watch.module(mlp.down_proj, name + "fcproj", name + "act")
    watch.module(model.model.norm, "normf", "resf")
    return lambda: setattr(modeling, "apply_rotary_pos_emb", original)


def run(*command):
    done = subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise CompareError(done.stderr.strip())


def ours(driver, folder, tokens, dump):
    output = os.path.join(dump, "logits.npy")
    run(driver, "logits", "--model", folder, "--tokens", " ".join(map(str, tokens)), "--output", output, "--dump", dump)
    return np.load(output)


def error_of(x, reference):
    return float(np.abs(x - reference).max() / max(np.abs(reference).max(), 1e-30))


def compare(driver, folder, tokens, tolerance):
    """(error of the logits, [(name, error) of each activation in the order of computation])"""
    model, config = load_exact(folder)
    watch = Watch()
    stop = watch_gpt2(model, watch) if config.model_type == "gpt2" else watch_llama(model, watch)
    try:
        with Float64(), torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    finally:
        if stop:
            stop()
    with tempfile.TemporaryDirectory() as dump:
        got = ours(driver, folder, tokens, dump)
        rows = []
        for name, reference in watch.seen.items():
            path = os.path.join(dump, name + ".npy")
            if not os.path.exists(path):
                raise CompareError(f"train_gpt dumps no activation {name}")
            rows.append((name, error_of(np.load(path)[:len(tokens)], reference)))
    order = {x: i for i, x in enumerate("res1 norm1 qkv att proj res2 norm2 fc act fcproj".split())}
    layer = lambda name: int(name.split(".")[1]) if name.startswith("layers.") else 1 << 30
    rows.sort(key=lambda row: (layer(row[0]), order.get(row[0].split(".")[-1], 20 + (row[0] == "normf"))))
    rows.append(("logits", error_of(got, logits)))
    return rows[-1][1], rows


def compare_model(args):
    config = transformers.AutoConfig.from_pretrained(args.model)
    if args.tokens:
        tokens = [int(word) for word in args.tokens.split()]
    else:
        tokens = np.random.default_rng(args.seed).integers(config.vocab_size, size=min(48, config.max_position_embeddings)).tolist()
    _, rows = compare(args.driver, args.model, tokens, args.tolerance)
    first = next((name for name, error in rows if not error <= args.tolerance), None)
    for name, error in rows:
        print(f"{name:24} {error:.1e}{'  <- first beyond ' + str(args.tolerance) if name == first else ''}")
    print(f"{len(rows)} activations of {len(tokens)} tokens, " + (f"first beyond {args.tolerance}: {first}" if first else "all within " + str(args.tolerance)))
    return first is None


# ---- Random models ------------------------------------------------------------------------------------------------------

FAMILIES = {"gpt2": GPT2LMHeadModel, "llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM, "qwen3": Qwen3ForCausalLM,
            "smollm3": SmolLM3ForCausalLM, "mistral": MistralForCausalLM, "phi3": Phi3ForCausalLM, "olmo2": Olmo2ForCausalLM}
BIASES = {"llama": ["attention_bias", "mlp_bias"], "qwen3": ["attention_bias"], "smollm3": ["attention_bias", "mlp_bias"], "olmo2": ["attention_bias"]}


def random_windows(family, layers, length, pick, rng):
    """Windows below, at and above the length of the sequence, in some or all layers; layers without RoPE."""
    window = pick(None, 1, length // 2 + 1, length, length + 3)
    options = {}
    if family in ("mistral", "phi3"):
        options["sliding_window"] = window
    if family in ("qwen2", "qwen3", "smollm3"):
        options |= {"use_sliding_window": window is not None, "sliding_window": window}
        if window and pick(True, False):
            options["layer_types"] = [pick("full_attention", "sliding_attention") for _ in range(layers)]
    if family in ("qwen2", "qwen3"):
        options["max_window_layers"] = pick(0, 1, layers)
    if family == "smollm3":
        options |= pick({"no_rope_layer_interval": pick(1, 2, 4)}, {"no_rope_layers": [int(rng.integers(2)) for _ in range(layers)]})
    return options


def random_model(family, rng):
    """A random model of a family, and the length of a sequence for it."""
    pick = lambda *choices: choices[rng.integers(len(choices))]
    heads, head_size = pick(1, 2, 3, 5, 6), 2 * pick(1, 2, 3, 5, 8)
    common = {"vocab_size": int(rng.integers(3, 300)), "tie_word_embeddings": pick(True, False), "bos_token_id": 0,
              "eos_token_id": 1, "pad_token_id": None}
    length, layers = int(rng.integers(2, 40)), pick(1, 2, 3)
    if family == "gpt2":
        config = GPT2Config(n_layer=layers, n_head=heads, n_embd=heads * pick(1, 3, head_size), n_positions=length,
                            n_inner=pick(None, 1, int(rng.integers(2, 90))), layer_norm_epsilon=pick(1e-5, 1e-3),
                            activation_function=pick("gelu_new", "gelu_pytorch_tanh"), **common)
        return GPT2LMHeadModel(config), length
    kv_heads = pick(1, heads, *[k for k in range(1, heads) if heads % k == 0])
    rope = pick(None, None, {"rope_type": "linear", "factor": 2.5}, {"rope_type": "dynamic", "factor": 2.0},
                {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                 "original_max_position_embeddings": 16})
    if family == "phi3":
        rope = None
        fraction = pick(1.0, 0.5)
        head_size = head_size if fraction == 1 else 4 * pick(1, 2, 3)
        common["partial_rotary_factor"] = fraction
    elif family == "olmo2" and transformers.__version__.startswith("4."):
        rope = None  # its Olmo2Config refuses the keys that the others take
    elif rope and rope["rope_type"] == "dynamic":
        head_size = max(head_size, 4)
    explicit = family in ("llama", "mistral", "qwen3", "olmo2") and pick(True, False)  # a head size of its own
    if explicit or family == "qwen3":
        common["head_dim"] = head_size
    common |= {name: pick(True, False) for name in BIASES.get(family, [])} | random_windows(family, layers, length, pick, rng)
    config = FAMILIES[family].config_class(
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        hidden_size=heads * (pick(1, 3, 7) if explicit else head_size), intermediate_size=int(rng.integers(1, 90)),
        max_position_embeddings=pick(length, max(2, length // 2)), rms_norm_eps=pick(1e-6, 1e-5, 1e-3),
        rope_theta=pick(10000.0, 500.0, 500000.0), rope_scaling=rope, **common)
    return FAMILIES[family](config), length


def bits(folder, tokens):
    """transformers' fp32 logits. The weights are copied: where they lie in the file decides which of its loops PyTorch takes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for p in model.parameters():
        p.data = p.data.clone()
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits


def random_case(args, number, folder):
    rng = np.random.default_rng([args.seed, number])
    torch.manual_seed(number)
    families = args.families.split(",")
    model, length = random_model(families[number % len(families)], rng)
    randomise(model, torch.Generator().manual_seed(number))
    dtype = [torch.float32, torch.float32, torch.float16, torch.bfloat16][rng.integers(4)]
    source, saved = folder / "source", folder / "saved"
    model.to(dtype).save_pretrained(source, max_shard_size=["1GB", "8KB"][rng.integers(2)])
    version4 = model.config.model_type != "gpt2" and bool(rng.integers(2))
    if version4:
        path = source / "config.json"
        path.write_text(json.dumps(transformers4_config(json.loads(path.read_text()))))
    tokens = rng.integers(model.config.vocab_size, size=length).tolist()
    error, rows = compare(args.driver, str(source), tokens, args.tolerance)
    run(args.driver, "convert", source, saved)
    same = torch.equal(bits(source, tokens), bits(saved, tokens))
    c = model.config
    kind = f"{c.model_type} {c.num_hidden_layers}x{c.hidden_size} heads {c.num_attention_heads}/{getattr(c, 'num_key_value_heads', c.num_attention_heads)}"
    print(f"{number:3} {kind:32} {str(dtype)[6:]:9} {'config 4' if version4 else '':8} logits {error:.1e}  saved {'the same' if same else 'DIFFERS'}", flush=True)
    first = next((name for name, e in rows if not e <= args.tolerance), None)
    if error > args.tolerance:
        print(f"    first beyond {args.tolerance}: {first}")
    return error <= args.tolerance and same


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a model directory")
    parser.add_argument("--random", type=int, metavar="N", help="make and compare N random models instead")
    parser.add_argument("--driver", default="./train_gpt", help="this project's train_gpt (default %(default)s)")
    parser.add_argument("--tokens", help="token ids (default: 48 random ones)")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest difference over largest value (default %(default)s)")
    parser.add_argument("--families", default=",".join(FAMILIES), help="with --random: names with commas between (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if (args.model is None) == (args.random is None):
        parser.error("give a model directory, or --random N")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        if args.model:
            return 0 if compare_model(args) else 1
        good = 0
        for number in range(args.random):
            with tempfile.TemporaryDirectory() as folder:
                good += random_case(args, number, Path(folder))
        print(f"{good} of {args.random} models agree")
        return 0 if good == args.random else 1
    except (CompareError, OSError) as error:
        print(f"compare_hf: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
