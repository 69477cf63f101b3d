#!/usr/bin/env python3
"""Converts a GGUF file into a model directory in Hugging Face layout; quantised weights are widened.

    scripts/import_gguf.py model.gguf models/name [--dtype fp32|bf16|fp16]

Needs the Python packages gguf and numpy (`make venv`). It reads the architectures llama (LLaMA, Mistral), qwen2, qwen3,
smollm3, olmo2 and phi3, and converts the weights, the shape, RoPE scaling, the tokenizer (byte-level BPE or
SentencePiece), the special tokens and the chat template. A value that this project does not support is an error;
unknown keys are named. At the end `train_gpt info` loads what was written.
"""
import in_venv  # noqa: F401
import argparse
import os
import sys
from dataclasses import dataclass, field

import numpy as np

import gguf_header
import gguf_keys
import hf_directory
import tokenizer_json
from hf_directory import ModelError

# What `tokenizer.ggml.pre` says about words. Of the architectures read here, only OLMo2 has those of dbrx.
WORDS = {"gpt-2": "gpt2", "default": "llamacpp-default", "smollm": "smollm", "qwen2": "qwen2", "tekken": "tekken",
         "dbrx": "olmo2", "llama-bpe": "llama3", "llama3": "llama3", "llama-v3": "llama3"}
STARTS = ("llama3", "tekken")  # the words of tokenizers that put <s> in front of a text if the file does not say
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # kinds of tokens
# LLaMA 3.1's scaling but for its factor, which is not in the file.
LLAMA3_ROPE = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class Architecture:
    model: str                 # the class in transformers
    parts: dict                # tensors of a layer
    permuted: bool = False     # llama.cpp rotates neighbouring channels, so that the rows of q and k have another order
    biases: tuple = ()         # the tensors with a bias: always
    bias_keys: dict = field(default_factory=dict)  # config.json's keys for biases: the tensors with one if it is true


ATTENTION = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
             "attn_output": "self_attn.o_proj"}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
LLAMA = {**NORMS, **ATTENTION, **MLP}
ATTENTION_BIAS, MLP_BIAS = {"attention_bias": tuple(ATTENTION)}, {"mlp_bias": tuple(MLP)}
ARCHITECTURES = {
    "llama": Architecture("Llama", LLAMA, permuted=True, bias_keys={**ATTENTION_BIAS, **MLP_BIAS}),
    "qwen2": Architecture("Qwen2", LLAMA, biases=("attn_q", "attn_k", "attn_v")),
    "qwen3": Architecture("Qwen3", {**LLAMA, **QK_NORMS}, bias_keys=ATTENTION_BIAS),
    "smollm3": Architecture("SmolLM3", LLAMA, permuted=True, bias_keys={**ATTENTION_BIAS, **MLP_BIAS}),
    "olmo2": Architecture("Olmo2", {**ATTENTION, **QK_NORMS, "post_attention_norm": "post_attention_layernorm", **MLP,
                                    "post_ffw_norm": "post_feedforward_layernorm"}, bias_keys=ATTENTION_BIAS),
    "phi3": Architecture("Phi3", {**NORMS, "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj",
                                  "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}),
}


class Gguf:
    def __init__(self, path):
        import gguf

        self.path, self.quants = path, gguf.quants
        gguf_header.check(path)
        try:
            reader = gguf.GGUFReader(path)
            # The package cannot show an empty list.
            self.values = {name: field.contents() if len(field.data) else [] for name, field in reader.fields.items()}
        except (ValueError, IndexError, KeyError, OverflowError, MemoryError, UnicodeDecodeError) as error:
            raise ModelError(f"{path}: not a GGUF file that can be read ({error})") from None
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}

    def get(self, key, *otherwise):
        if key not in self.values and not otherwise:
            raise ModelError(f"{self.path}: key {key} is missing")
        return self.values.get(key, *otherwise)

    def check_keys(self):
        """Throws for a key that would change tokens or logits and is not supported. Returns the unknown keys."""
        architecture, unknown = self.get("general.architecture"), []
        for key, value in self.values.items():
            general = "{arch}" + key.removeprefix(architecture) if key.startswith(f"{architecture}.") else key
            if key.startswith("GGUF."):  # what the package itself adds: version, counts
                continue
            if general in gguf_keys.USED:
                kind = gguf_keys.USED[general]
                if not gguf_keys.has_type(value, kind):
                    expected = gguf_keys.type_name(kind)
                    raise ModelError(f"{self.path}: key {key} is {shown(value)}; it must be {expected}")
            elif general in gguf_keys.DEMANDED:
                supported = gguf_keys.DEMANDED[general]
                if value not in supported:
                    allowed = " or ".join(map(shown, supported)) or "a file without it"
                    raise ModelError(f"{self.path}: key {key} is {shown(value)}; supported: {allowed}")
            elif not gguf_keys.is_ignored(general):
                unknown.append(key)
        return unknown

    def shape(self, name):
        """As NumPy has it: rows first."""
        if name not in self.tensors:
            raise ModelError(f"{self.path}: tensor {name} is missing")
        return tuple(int(n) for n in reversed(self.tensors[name].shape))

    def tensor(self, name):
        tensor = self.tensors[name]
        try:
            values = self.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise ModelError(f"{self.path}: tensor {name} is {tensor.tensor_type.name}; supported: F32, F16, BF16 and "
                             "the quantised types that the Python package gguf widens") from None
        return np.asarray(values, np.float32).reshape(self.shape(name))


def shown(value):
    """A value on one line that is not too long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."


def float32(x):
    """The shortest decimal number that is this float32."""
    return float(str(np.float32(x)))


def rope_scaling(file, architecture, theta, head_size):
    """rope_scaling of config.json, from the metadata or from the factors that LLaMA 3.1's files carry as a tensor."""
    key = f"{architecture}.rope.scaling."
    kind = file.get(key + "type", "linear")
    factor = float32(file.get(key + "factor", file.get(f"{architecture}.rope.scale_linear", 0.0))) or 1.0
    if not 0 < factor < float("inf"):
        raise ModelError(f"{file.path}: RoPE's scaling factor is {factor}; it must be positive")
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        if name in file.tensors:
            raise ModelError(f"{file.path}: tensor {name} is for RoPE scaling longrope; "
                             "supported: none, linear, LLaMA 3.1's")
    if "rope_freqs.weight" not in file.tensors:
        if kind == "none" or (kind == "linear" and factor == 1):
            return None
        if kind == "linear" and architecture != "phi3":
            return {"rope_type": "linear", "factor": factor}
        raise ModelError(f"{file.path}: key {key}type is {kind}, the factor {factor}; supported: none, linear (not for "
                         "phi3)")
    if kind != "none" and (kind != "linear" or factor != 1):
        raise ModelError(f"{file.path}: has tensor rope_freqs.weight and RoPE scaling {kind} with factor {factor}; "
                         "supported: one of them")
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
    name = file.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelError(f"{file.path}: is of the architecture {name}; supported: {', '.join(ARCHITECTURES)}")
    get = lambda key, *otherwise: file.get(f"{name}.{key}", *otherwise)
    one = lambda key, *otherwise: one_for_all(file, f"{name}.{key}", *otherwise)
    if get("expert_count", 0):
        raise ModelError(f"{file.path}: is a mixture of experts; dense models are supported")
    channels, heads = get("embedding_length"), one("attention.head_count")
    head_size = get("attention.key_length", channels // heads)
    for key in ("attention.value_length",) + (("rope.dimension_count",) if name != "phi3" else ()):
        if get(key, head_size) != head_size:
            raise ModelError(f"{file.path}: key {name}.{key} is {get(key)}; supported: the head size, {head_size}")
    theta = float32(get("rope.freq_base", 10000.0))
    config = {
        "architectures": [ARCHITECTURES[name].model + "ForCausalLM"], "model_type": name,
        "vocab_size": file.shape("token_embd.weight")[0],
        "hidden_size": channels, "num_hidden_layers": get("block_count"), "num_attention_heads": heads,
        "num_key_value_heads": one("attention.head_count_kv", heads), "head_dim": head_size,
        "intermediate_size": one("feed_forward_length"), "max_position_embeddings": get("context_length"),
        "rms_norm_eps": float32(get("attention.layer_norm_rms_epsilon")), "rope_theta": theta,
        "rope_scaling": rope_scaling(file, name, theta, head_size), "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors, "initializer_range": 0.02,
    }
    for key, parts in ARCHITECTURES[name].bias_keys.items():
        config[key] = f"blk.0.{parts[0]}.bias" in file.tensors
    config.update(read_attention(file, name, config))
    if name == "phi3":
        original = get("rope.scaling.original_context_length", config["max_position_embeddings"])
        config.update(partial_rotary_factor=get("rope.dimension_count", head_size) / head_size,
                      original_max_position_embeddings=original)
    for key, token in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[key + "_token_id"] = file.get(f"tokenizer.ggml.{token}_token_id", None)
    return config


def read_attention(file, name, config):
    """The keys of config.json about the window and about layers without RoPE."""
    window = one_for_all(file, f"{name}.attention.sliding_window", 0)
    if name == "phi3":
        return {"sliding_window": window or None}
    if name == "llama" and window:
        if config["attention_bias"] or config["mlp_bias"]:
            raise ModelError(f"{file.path}: has a sliding window and biases; no model that is supported has both")
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    if window:
        raise ModelError(f"{file.path}: key {name}.attention.sliding_window is {window}; supported for llama and phi3")
    if name == "smollm3":  # the file does not say; llama.cpp has each fourth layer without RoPE
        with_rope = [int((i + 1) % 4 > 0) for i in range(config["num_hidden_layers"])]
        return {"no_rope_layer_interval": 4, "no_rope_layers": with_rope, "use_sliding_window": False}
    return {"use_sliding_window": False} if name in ("qwen2", "qwen3") else {}


def weights(file, config):
    """(name, shape, function that gives the array) of every tensor."""
    architecture = ARCHITECTURES[file.get("general.architecture")]
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if not config["tie_word_embeddings"]:
        names["output.weight"] = "lm_head.weight"
    biases = {*architecture.biases}
    for key, parts in architecture.bias_keys.items():
        biases.update(parts if config[key] else ())
    permuted, heads = {}, {}
    if architecture.permuted:
        permuted = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for layer in range(config["num_hidden_layers"]):
        for part, target in architecture.parts.items():
            for kind in ("weight", "bias") if part in biases else ("weight",):
                names[f"blk.{layer}.{part}.{kind}"] = f"model.layers.{layer}.{target}.{kind}"
                heads[f"blk.{layer}.{part}.{kind}"] = permuted.get(part)
    for name in file.tensors:
        if name not in names and name != "rope_freqs.weight":
            raise ModelError(f"{file.path}: tensor {name} is of no {architecture.model} that is supported")
    for name, target in names.items():
        def make(name=name):
            return hf_directory.split_halves(file.tensor(name), heads[name]) if heads.get(name) else file.tensor(name)

        yield target, file.shape(name), make


def read_tokenizer(file):
    """(tokenizer.json's content, special tokens by role)"""
    tokens, kinds = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type", [])
    for key in ("tokenizer.ggml.token_type", "tokenizer.ggml.scores"):
        if file.get(key, []) and len(file.get(key)) != len(tokens):
            raise ModelError(f"{file.path}: key {key} has {len(file.get(key))} values for {len(tokens)} tokens; the "
                             "file is damaged")
    kinds = kinds or [NORMAL] * len(tokens)
    # The rows of a vocabulary that has more of them than the tokenizer has tokens.
    tokens = [None if kind == UNUSED and token == f"[PAD{i}]" else token
              for i, (token, kind) in enumerate(zip(tokens, kinds))]
    special = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = file.get(f"tokenizer.ggml.{key}_token_id", None)
        special[role + "_token"] = tokens[token] if token is not None and token < len(tokens) else None
    model, pre = file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre", "default")
    phi3 = file.get("general.architecture") == "phi3"
    # The file does not say which tokens take the white space behind them: of Phi-3 these, as llama.cpp has it.
    strips = lambda token: phi3 and token not in ("<unk>", "<s>", "<|endoftext|>")
    added = [tokenizer_json.added_token(i, token, special=kind in (CONTROL, UNKNOWN), rstrip=strips(token))
             for i, (token, kind) in enumerate(zip(tokens, kinds)) if kind in (CONTROL, UNKNOWN, USER_DEFINED)]
    add_bos = file.get("tokenizer.ggml.add_bos_token", model == "llama" or WORDS.get(pre) in STARTS)
    bos = special["bos_token"]
    start = (bos, tokens.index(bos)) if add_bos and bos is not None else None
    if model == "llama":
        return tokenizer_json.sentencepiece(tokens, file.get("tokenizer.ggml.scores"), added, special["unk_token"],
                                            file.get("tokenizer.ggml.add_space_prefix", True), start), special
    if phi3:
        raise ModelError(f"{file.path}: the tokenizer is {model}; supported for phi3: llama (SentencePiece)")
    if model != "gpt2" or pre not in WORDS:
        raise ModelError(f"{file.path}: the tokenizer is {model} with words of kind {pre}; "
                         f"supported: llama, and gpt2 with {', '.join(WORDS)}")
    merges = [merge.split(" ") for merge in file.get("tokenizer.ggml.merges")]
    for i, pair in enumerate(merges):
        if len(pair) != 2:
            raise ModelError(f"{file.path}: key tokenizer.ggml.merges: entry {i} is {shown(' '.join(pair))}, not two "
                             "tokens with a space between them; the file is damaged")
    vocab = {token: i for i, token in enumerate(tokens) if token is not None}
    return tokenizer_json.byte_level(vocab, merges, added, WORDS[pre], start), special


def end_tokens(file):
    """The ids that end a text, as in llama.cpp: one, or a list."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")]
    ids = list(dict.fromkeys(file.get(key) for key in keys if file.get(key, None) is not None))
    return ids[0] if len(ids) == 1 else ids


def sampling(file):
    """The sampling that the file declares, as keys of generation_config.json. In llama.cpp a temperature or top_k below
    0 means 0."""
    names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
             "penalty_repeat": "repetition_penalty"}
    found = {name: file.get(f"general.sampling.{key}", None) for key, name in names.items()}
    return {name: max(0, x if isinstance(x, int) else float32(x)) for name, x in found.items() if x is not None}


def import_gguf(source, target, dtype=None):
    file = Gguf(source)
    unknown = file.check_keys()
    config = read_config(file)
    if dtype is None:
        stored = file.tensors["token_embd.weight"].tensor_type.name
        dtype = {"F16": "fp16", "BF16": "bf16"}.get(stored, "fp32")
    with hf_directory.Directory(target) as folder:
        hf_directory.write_json(folder, "config.json", config)
        ids = {"bos_token_id": config["bos_token_id"], "eos_token_id": end_tokens(file)}
        ids = {key: x for key, x in ids.items() if x not in (None, [])}
        hf_directory.write_json(folder, "generation_config.json", {**ids, **sampling(file)})
        hf_directory.write_tokenizer(folder, *read_tokenizer(file), file.get("tokenizer.chat_template", None))
        hf_directory.write_safetensors(os.path.join(folder, "model.safetensors"), list(weights(file, config)), dtype)
    if unknown:
        names = ", ".join(map(repr, unknown[:5])) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
        print(f"import_gguf: {source}: unknown keys are ignored: {names}", file=sys.stderr)


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
