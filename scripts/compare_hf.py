#!/usr/bin/env python3
"""Compares this project with transformers, activation by activation.

    scripts/compare_hf.py MODEL [--tokens "1 2 3"] [--tolerance 1e-5]
    scripts/compare_hf.py --random 40                    GPT-2 and LLaMA of random shapes, made by transformers

With a model directory it runs `train_gpt logits --dump` and transformers on the same tokens. It prints the error of each
activation in the order of computation (the largest difference over the largest value), and the first one above the
tolerance. transformers computes in float64, so the error is ours.

With --random it generates models with odd sizes, one, some or all KV heads, tied and untied heads, with and without
biases, explicit head sizes and inner widths, every RoPE scaling, fp32, fp16 and bf16 files, shards, and config.json in
the form of transformers 4 or 5. Each model's logits must be within the tolerance, and what `train_gpt convert` saves must
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
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from make_reference import Float64, randomise, transformers4_config


class CompareError(Exception):
    """One line: what went wrong."""


def load_exact(folder):
    """The model in float64, and its config."""
    kinds = {"gpt2": GPT2LMHeadModel, "llama": LlamaForCausalLM}
    config = transformers.AutoConfig.from_pretrained(folder)
    if config.model_type not in kinds:
        raise CompareError(f"{folder}: transformers has no {config.model_type}")
    loaded = kinds[config.model_type].from_pretrained(folder)
    torch.set_default_dtype(torch.float64)
    config._attn_implementation = "eager"
    with Float64():
        model = kinds[config.model_type](config).double()
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
    """q and k are watched behind RoPE, where transformers has a function and no module."""
    from transformers.models.llama import modeling_llama

    original, rotated = modeling_llama.apply_rotary_pos_emb, []

    def apply(*args, **kwargs):
        q, k = original(*args, **kwargs)
        rotated.extend(x.transpose(1, 2).flatten(2) for x in (q, k))
        return q, k

    modeling_llama.apply_rotary_pos_emb = apply
    for layer, block in enumerate(model.model.layers):
        name, attention, mlp = f"layers.{layer}.", block.self_attn, block.mlp

        def keep_qkv(_, args, result, name=name, values=[]):
            watch.keep(name + "qkv", torch.cat([*rotated, values.pop()], -1))
            rotated.clear()

        def keep_value(_, args, result, values=keep_qkv.__defaults__[1]):
            values.append(result)

        def keep_fc(_, args, result, name=name, gate=[]):
            gate.append(result)
            if len(gate) == 2:
                watch.keep(name + "fc", torch.cat(gate, -1))
                gate.clear()

        watch.module(block.input_layernorm, name + "norm1", name + "res1")
        attention.v_proj.register_forward_hook(keep_value)
        attention.o_proj.register_forward_hook(keep_qkv)
        watch.module(attention.o_proj, name + "proj", name + "att")
        watch.module(block.post_attention_layernorm, name + "norm2", name + "res2")
        mlp.gate_proj.register_forward_hook(keep_fc)
        mlp.up_proj.register_forward_hook(keep_fc)
        watch.module(mlp.down_proj, name + "fcproj", name + "act")
    watch.module(model.model.norm, "normf", "resf")
    return lambda: setattr(modeling_llama, "apply_rotary_pos_emb", original)


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
    order = {"res1": 0, "norm1": 1, "qkv": 2, "att": 3, "proj": 4, "res2": 5, "norm2": 6, "fc": 7, "act": 8, "fcproj": 9}
    layer = lambda name: int(name.split(".")[1]) if name.startswith("layers.") else 1 << 30
    rows.sort(key=lambda row: (layer(row[0]), order.get(row[0].split(".")[-1], 10 + (row[0] == "normf"))))
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

def random_model(rng):
    """A config, and how it is saved."""
    pick = lambda *choices: choices[rng.integers(len(choices))]
    heads, head_size = pick(1, 2, 3, 5, 6), 2 * pick(1, 2, 3, 5, 8)
    common = {"vocab_size": int(rng.integers(3, 300)), "tie_word_embeddings": pick(True, False), "bos_token_id": 0, "eos_token_id": 1}
    length = int(rng.integers(2, 40))
    if pick(True, False):
        config = GPT2Config(n_layer=pick(1, 2, 3), n_head=heads, n_embd=heads * pick(1, 3, head_size), n_positions=length,
                            n_inner=pick(None, 1, int(rng.integers(2, 90))), layer_norm_epsilon=pick(1e-5, 1e-3),
                            activation_function=pick("gelu_new", "gelu_pytorch_tanh"), **common)
        return GPT2LMHeadModel(config), length
    kv_heads = pick(1, heads, *[k for k in range(1, heads) if heads % k == 0])
    positions = pick(length, max(2, length // 2))
    rope = pick(None, None, {"rope_type": "linear", "factor": 2.5}, {"rope_type": "dynamic", "factor": 2.0},
                {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                 "original_max_position_embeddings": 16})
    if rope and rope["rope_type"] == "dynamic":
        head_size = max(head_size, 4)
    explicit = pick(True, False)  # a head size of its own
    config = LlamaConfig(num_hidden_layers=pick(1, 2, 3), num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_size,
                         hidden_size=heads * (pick(1, 3, 7) if explicit else head_size), intermediate_size=int(rng.integers(1, 90)),
                         max_position_embeddings=positions, rms_norm_eps=pick(1e-6, 1e-5, 1e-3), rope_theta=pick(10000.0, 500.0, 500000.0),
                         rope_scaling=rope, attention_bias=pick(True, False), mlp_bias=pick(True, False), **common)
    return LlamaForCausalLM(config), length


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
    model, length = random_model(rng)
    randomise(model, torch.Generator().manual_seed(number))
    dtype = [torch.float32, torch.float32, torch.float16, torch.bfloat16][rng.integers(4)]
    source, saved = folder / "source", folder / "saved"
    model.to(dtype).save_pretrained(source, max_shard_size=["1GB", "8KB"][rng.integers(2)])
    version4 = model.config.model_type == "llama" and bool(rng.integers(2))
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
