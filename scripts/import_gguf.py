#!/usr/bin/env python3
"""Converts a GGUF file of the LLaMA architecture into a model directory in Hugging Face layout; quantised weights are widened.

    scripts/import_gguf.py model.gguf models/name [--dtype fp32|bf16|fp16]

Needs the Python packages gguf and numpy (`make venv`). It converts the weights, the shape, RoPE scaling, the tokenizer
(byte-level BPE or SentencePiece), the special tokens and the chat template. A value that this project does not support is
an error.
"""
import argparse
import os

import numpy as np

import hf_directory
import tokenizer_json
from hf_directory import ModelError

# What `tokenizer.ggml.pre` says about words.
WORDS = {"gpt-2": "gpt2", "default": "llamacpp-default", "smollm": "smollm",
         "llama-bpe": "llama3", "llama3": "llama3", "llama-v3": "llama3"}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # kinds of tokens
# LLaMA 3.1's scaling but for its factor, which is not in the file.
LLAMA3_ROPE = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class Gguf:
    def __init__(self, path):
        import gguf

        self.path, self.quants = path, gguf.quants
        try:
            reader = gguf.GGUFReader(path)
            self.values = {name: field.contents() for name, field in reader.fields.items()}
        except (ValueError, IndexError, KeyError, OverflowError, MemoryError, UnicodeDecodeError) as error:
            raise ModelError(f"{path}: not a GGUF file that can be read ({error})") from None
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}

    def get(self, key, *otherwise):
        if key not in self.values and not otherwise:
            raise ModelError(f"{self.path}: key {key} is missing")
        return self.values.get(key, *otherwise)

    def shape(self, name):
        """As NumPy has it: rows first."""
        if name not in self.tensors:
            raise ModelError(f"{self.path}: tensor {name} is missing")
        return tuple(int(n) for n in reversed(self.tensors[name].shape))

    def tensor(self, name):
        tensor = self.tensors[name]
        return np.asarray(self.quants.dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(self.shape(name))


def float32(x):
    """The shortest decimal number that is this float32."""
    return float(str(np.float32(x)))


def rope_scaling(file, theta, head_size):
    """rope_scaling of config.json, from the metadata or from the factors that LLaMA 3.1's files carry as a tensor."""
    kind = file.get("llama.rope.scaling.type", "none")
    if "rope_freqs.weight" not in file.tensors:
        if kind == "none":
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": float32(file.get("llama.rope.scaling.factor"))}
        raise ModelError(f"{file.path}: key llama.rope.scaling.type is {kind}; supported: none, linear")
    stored = file.tensor("rope_freqs.weight").astype(np.float64)
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_size, 2) / head_size)
    scaling = {**LLAMA3_ROPE, "factor": float(stored.max())}
    low, high, length = (scaling[key] for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))
    smooth = np.clip((length / wavelength - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    if stored.shape != expected.shape or np.abs(stored / expected - 1).max() > 1e-4:
        raise ModelError(f"{file.path}: tensor rope_freqs.weight is not LLaMA 3.1's scaling, the only one supported")
    return scaling


def one_for_all(file, key, *otherwise):
    """A number that may be written once for each layer."""
    value = file.get(key, *otherwise)
    values = set(value) if isinstance(value, list) else {value}
    if len(values) != 1:
        raise ModelError(f"{file.path}: key {key} differs from layer to layer; only one value for all is supported")
    return values.pop()


def read_config(file):
    architecture = file.get("general.architecture")
    if architecture != "llama":
        raise ModelError(f"{file.path}: is of the architecture {architecture}; llama is supported")
    if file.get("llama.expert_count", 0):
        raise ModelError(f"{file.path}: is a mixture of experts; dense models are supported")
    channels, heads = file.get("llama.embedding_length"), one_for_all(file, "llama.attention.head_count")
    head_size = file.get("llama.attention.key_length", channels // heads)
    for key in ("llama.rope.dimension_count", "llama.attention.value_length"):
        if file.get(key, head_size) != head_size:
            raise ModelError(f"{file.path}: key {key} is {file.get(key)}; supported: the head size, {head_size}")
    theta = float32(file.get("llama.rope.freq_base", 10000.0))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": file.shape("token_embd.weight")[0],
        "hidden_size": channels, "num_hidden_layers": file.get("llama.block_count"), "num_attention_heads": heads,
        "num_key_value_heads": one_for_all(file, "llama.attention.head_count_kv", heads), "head_dim": head_size,
        "intermediate_size": one_for_all(file, "llama.feed_forward_length"),
        "max_position_embeddings": file.get("llama.context_length"),
        "rms_norm_eps": float32(file.get("llama.attention.layer_norm_rms_epsilon")), "rope_theta": theta,
        "rope_scaling": rope_scaling(file, theta, head_size), "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors, "initializer_range": 0.02,
    }
    for name in ("bos", "eos"):
        config[name + "_token_id"] = file.get(f"tokenizer.ggml.{name}_token_id", None)
    return config


def weights(file, config):
    """(name, shape, function that gives the array) of every tensor."""
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    parts = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
             "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
             "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
    turned = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name in file.tensors:
        if name == "rope_freqs.weight":
            continue
        stem, _, kind = name.rpartition(".")
        layer, _, part = stem.removeprefix("blk.").partition(".")
        if not stem.startswith("blk."):
            target = names.get(stem)
        else:
            target = f"model.layers.{layer}.{parts[part]}" if part in parts and layer.isdigit() else None
        if target is None or kind not in ("weight", "bias"):
            raise ModelError(f"{file.path}: tensor {name} is of no LLaMA that is supported")

        def make(name=name, heads=turned.get(part)):
            return hf_directory.split_halves(file.tensor(name), heads) if heads else file.tensor(name)

        yield f"{target}.{kind}", file.shape(name), make


def read_tokenizer(file):
    """(tokenizer.json's content, special tokens by role)"""
    tokens, kinds = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type", [])
    kinds = kinds or [NORMAL] * len(tokens)
    special = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = file.get(f"tokenizer.ggml.{key}_token_id", None)
        special[role + "_token"] = tokens[token] if token is not None and token < len(tokens) else None
    added = [tokenizer_json.added_token(i, token, special=kind in (CONTROL, UNKNOWN))
             for i, (token, kind) in enumerate(zip(tokens, kinds)) if kind in (CONTROL, UNKNOWN, USER_DEFINED)]
    model, pre = file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre", "default")
    add_bos = file.get("tokenizer.ggml.add_bos_token", model == "llama" or WORDS.get(pre) == "llama3")
    bos = special["bos_token"]
    start = (bos, tokens.index(bos)) if add_bos and bos is not None else None
    for key in ("tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.precompiled_charsmap"):
        if file.get(key, False):
            raise ModelError(f"{file.path}: key {key} is set; SentencePiece without it is supported")
    if model == "llama":
        return tokenizer_json.sentencepiece(tokens, file.get("tokenizer.ggml.scores"), added, special["unk_token"],
                                            file.get("tokenizer.ggml.add_space_prefix", True), start), special
    if model != "gpt2" or pre not in WORDS:
        raise ModelError(f"{file.path}: the tokenizer is {model} with words of kind {pre}; supported: llama, and gpt2 with {', '.join(WORDS)}")
    merges = [merge.split(" ") for merge in file.get("tokenizer.ggml.merges")]
    return tokenizer_json.byte_level({token: i for i, token in enumerate(tokens)}, merges, added, WORDS[pre], start), special


def import_gguf(source, target, dtype=None):
    file = Gguf(source)
    config = read_config(file)
    if dtype is None:
        stored = file.tensors["token_embd.weight"].tensor_type.name
        dtype = {"F16": "fp16", "BF16": "bf16"}.get(stored, "fp32")
    with hf_directory.Directory(target) as folder:
        hf_directory.write_json(folder, "config.json", config)
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config[key] is not None}
        hf_directory.write_json(folder, "generation_config.json", ids)
        hf_directory.write_tokenizer(folder, *read_tokenizer(file), file.get("tokenizer.chat_template", None))
        hf_directory.write_safetensors(os.path.join(folder, "model.safetensors"), list(weights(file, config)), dtype)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="the .gguf file")
    parser.add_argument("target", help="the directory to write; must not exist")
    parser.add_argument("--dtype", choices=hf_directory.DTYPES,
                        help="what weights are stored in (default: fp16 or bf16 if the file's embedding is, else fp32)")
    args = parser.parse_args()
    return hf_directory.main("import_gguf", lambda: import_gguf(args.source, args.target, args.dtype))


if __name__ == "__main__":
    raise SystemExit(main())
