#!/usr/bin/env python3
"""Converts PyTorch checkpoints of GPT-2 and LLaMA into a model directory in Hugging Face layout with safetensors.

    scripts/import_pytorch.py SOURCE models/name [--dtype fp32|bf16|fp16]

SOURCE is a directory in one of two layouts:

    pytorch_model.bin (or pytorch_model.bin.index.json and shards) and config.json, as older transformers saved them; a
        tokenizer.model is converted if there is no tokenizer.json
    consolidated.00.pth, .01.pth ... and params.json, as Meta publishes LLaMA 1 to 3.2, with tokenizer.model

Needs the Python packages torch and numpy, and sentencepiece for the tokenizer.model of LLaMA 1 and 2. No code in the files
is executed. At the end `train_gpt info` loads what was written: a tensor that is missing, or of no such model, is an
error.
"""
import in_venv  # noqa: F401
import argparse
import glob
import json
import os
import shutil
import warnings

import hf_directory
import tokenizer_json
from hf_directory import ModelError

CARRIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json",
           "added_tokens.json", "chat_template.jinja")
MORE_TEMPLATES = "additional_chat_templates"
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
BUFFERS = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq", "rope.freqs")
LLAMA3_SPECIAL = (["<|begin_of_text|>", "<|end_of_text|>"] + [f"<|reserved_special_token_{i}|>" for i in range(4)]
                  + ["<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>"]
                  + [f"<|reserved_special_token_{i}|>" for i in range(5, 251)])


def read_json(path):
    """The object in a file."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON ({error}); the file is damaged") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: JSON, but not an object; the file is damaged")
    return content


def load(path):
    """{name: tensor}, mapped from the file where its format allows that."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the pickle's version: what matters fails
        for mmap in (True, False):  # the format before 2020 can't be mapped
            try:
                tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
                break
            except OSError:
                raise
            except Exception as error:  # a damaged file makes torch's unpickler raise anything
                reason = (str(error).splitlines() or [""])[0].split(". ")[0] or type(error).__name__
        else:
            raise ModelError(f"{path}: not tensors that torch.load(weights_only=True) can read ({reason}); save the "
                             "model's state_dict() with torch.save")
    if not isinstance(tensors, dict) or not all(isinstance(x, torch.Tensor) for x in tensors.values()):
        raise ModelError(f"{path}: holds something else than named tensors; save the model's state_dict() with "
                         "torch.save")
    return tensors


def to_numpy(tensor):
    return tensor.detach().float().numpy()


def stored_dtype(tensor):
    return {"torch.float16": "fp16", "torch.bfloat16": "bf16"}.get(str(tensor.dtype), "fp32")


# ---- transformers' pytorch_model.bin ------------------------------------------------------------------------------------

def bare_name(name):
    """Without what torch.compile, DDP, FSDP and activation checkpointing put around modules."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while parts[0] == "module" and len(parts) > 1:
        parts.pop(0)
    return ".".join(parts)


def with_bare_names(source, tensors):
    bare = {}
    for name, x in tensors.items():
        if bare_name(name) in bare:
            raise ModelError(f"{source}: tensor {bare_name(name)} occurs twice (also as {name}); remove one")
        bare[bare_name(name)] = x
    return bare


def shard_names(index):
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict):
        raise ModelError(f"{index}: key 'weight_map' is missing or not an object; the file is damaged")
    for tensor, name in where.items():
        if not isinstance(name, str) or not name or "/" in name or "\0" in name:
            raise ModelError(f"{index}: key 'weight_map' gives no file name for {tensor}: {json.dumps(name)}")
    return sorted(set(where.values()))


def hugging_face(source):
    index = os.path.join(source, "pytorch_model.bin.index.json")
    names = shard_names(index) if os.path.exists(index) else ["pytorch_model.bin"]
    config = read_json(os.path.join(source, "config.json"))
    tensors = {}
    for name in names:
        part = load(os.path.join(source, name))
        twice = next(iter(tensors.keys() & part.keys()), None)
        if twice is not None:
            raise ModelError(f"{source}: tensor {twice} is in two files; remove one")
        tensors.update(part)
    tensors = {name: x for name, x in with_bare_names(source, tensors).items() if not name.endswith(BUFFERS)}
    embedding = next((x for name, x in tensors.items() if name.endswith(("wte.weight", "embed_tokens.weight"))), None)
    if embedding is None:
        raise ModelError(f"{source}: holds no token embedding (wte.weight or embed_tokens.weight)")
    tied = config.get("tie_word_embeddings", config.get("model_type") == "gpt2")
    head = tensors.get("lm_head.weight")
    if tied and head is not None and (head.shape == embedding.shape and bool((head == embedding).all())):
        del tensors["lm_head.weight"]
    return config, [(name, tuple(x.shape), lambda x=x: to_numpy(x)) for name, x in tensors.items()], stored_dtype(embedding)


# ---- Meta's consolidated.*.pth ------------------------------------------------------------------------------------------

def meta_config(source, params, tensors, rope_factor):
    """config.json of params.json and the weights' shapes."""
    channels, heads = params["dim"], params["n_heads"]
    llama3 = params.get("rope_theta", 10000.0) == 500000.0
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": tensors.shape("tok_embeddings.weight")[0],
        "hidden_size": channels, "num_hidden_layers": params["n_layers"], "num_attention_heads": heads,
        "num_key_value_heads": params.get("n_kv_heads") or heads, "head_dim": channels // heads,
        "intermediate_size": tensors.shape("layers.0.feed_forward.w1.weight")[0], "max_position_embeddings": 8192 if llama3 else 4096,
        "rms_norm_eps": params["norm_eps"], "rope_theta": params.get("rope_theta", 10000.0), "rope_scaling": None, "hidden_act": "silu",
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": "output.weight" not in tensors, "initializer_range": 0.02,
        "bos_token_id": 128000 if llama3 else 1, "eos_token_id": 128001 if llama3 else 2,
    }
    if params.get("use_scaled_rope"):
        if not rope_factor:
            raise ModelError(f"{source}: params.json asks for scaled RoPE and does not say how far; add --rope-factor 8 for "
                             "LLaMA 3.1, 32 for 3.2")
        config["max_position_embeddings"] = 131072
        config["rope_scaling"] = {"rope_type": "llama3", "factor": rope_factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                  "original_max_position_embeddings": 8192}
    if params.get("moe") or params.get("vision_chunk_size"):
        raise ModelError(f"{source}: params.json describes a model with experts or vision; dense text models are supported")
    return config


class Joined:
    """The whole tensors of several shards, made when they are asked for."""

    def __init__(self, source, shards, channels):
        self.source, self.shards, self.channels = source, shards, channels
        for shard in shards[1:]:
            if set(shard) != set(shards[0]):
                raise ModelError(f"{source}: the shards hold different tensors")

    def __contains__(self, name):
        return name in self.shards[0]

    def __iter__(self):
        return iter(self.shards[0])

    def parts(self, name):
        """What model parallelism made of a tensor, and along which dimension: outputs (rows) or inputs (columns)."""
        if name not in self:
            raise ModelError(f"{self.source}: tensor {name} is missing")
        parts = [shard[name] for shard in self.shards]
        by_inputs = name.endswith((".wo.weight", ".w2.weight"))
        if name == "tok_embeddings.weight":
            by_inputs = parts[0].shape[1] != self.channels  # LLaMA 1 and 2 split channels, LLaMA 3 the vocabulary
        return (parts, int(by_inputs)) if parts[0].dim() > 1 else (parts[:1], 0)

    def shape(self, name):
        parts, dimension = self.parts(name)
        shape = list(parts[0].shape)
        shape[dimension] = sum(part.shape[dimension] for part in parts)
        return tuple(shape)

    def __getitem__(self, name):
        import torch

        parts, dimension = self.parts(name)
        return torch.cat(parts, dimension)


def meta(source, rope_factor):
    path = os.path.join(source, "params.json")
    params = read_json(path)
    for key in ("dim", "n_layers", "n_heads", "norm_eps"):
        if not isinstance(params.get(key), (int, float)):
            raise ModelError(f"{path}: key '{key}' is missing or not a number; the file is damaged")
    paths = sorted(glob.glob(os.path.join(glob.escape(source), "consolidated.*.pth")))
    tensors = Joined(source, [with_bare_names(path, load(path)) for path in paths], params["dim"])
    config = meta_config(source, params, tensors, rope_factor)
    names = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
    parts = {"attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
             "attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj",
             "feed_forward.w2": "mlp.down_proj", "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    permuted = {"attention.wq": config["num_attention_heads"], "attention.wk": config["num_key_value_heads"]}
    weights = []
    for name in tensors:
        if name.endswith(BUFFERS):
            continue
        stem = name.removesuffix(".weight")
        layer, _, part = stem.removeprefix("layers.").partition(".")
        target = f"model.layers.{layer}.{parts[part]}" if stem.startswith("layers.") and part in parts else names.get(stem)
        if target is None or stem == name:
            raise ModelError(f"{source}: tensor {name} is of no LLaMA that is supported")

        def make(name=name, heads=permuted.get(part)):
            array = to_numpy(tensors[name])
            return hf_directory.split_halves(array, heads) if heads else array

        weights.append((target + ".weight", tensors.shape(name), make))
    return config, weights, stored_dtype(tensors.shards[0]["tok_embeddings.weight"])


# ---- tokenizer.model ----------------------------------------------------------------------------------------------------

def find_tokenizer(source, folders):
    paths = [os.path.join(source, folder, "tokenizer.model") for folder in folders]
    return next((path for path in paths if os.path.exists(path)), None)


def convert_tokenizer(folder, path, settings):
    """Writes tokenizer.json from a tokenizer.model. settings: of tokenizer_config.json."""
    with open(path, "rb") as file:
        is_tiktoken = file.read(64).split(b"\n")[0].endswith(b" 0")
    if is_tiktoken:
        special = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
        hf_directory.write_tokenizer(folder, tokenizer_json.tiktoken_model(path, LLAMA3_SPECIAL), special)
    else:
        hf_directory.write_tokenizer(folder, *tokenizer_json.sentencepiece_model(path, settings))


def llama_settings(path):
    """What tokenizer_config.json says about a tokenizer.model. Throws for a tokenizer that is not LLaMA's."""
    settings = read_json(path) if os.path.exists(path) else {}
    for key, supported in (("tokenizer_class", ("LlamaTokenizer", "LlamaTokenizerFast")), ("add_eos_token", (False,))):
        if settings.get(key) not in (None, *supported):
            raise ModelError(f"{path}: key '{key}' is {json.dumps(settings[key])}; supported with a tokenizer.model: "
                             f"{' or '.join(map(json.dumps, supported))}. Save the model's tokenizer.json beside it")
    return {key: x for key, x in settings.items() if x is not None}


def import_pytorch(source, target, dtype=None, rope_factor=None):
    is_meta = os.path.exists(os.path.join(source, "params.json"))
    if not is_meta and not glob.glob(os.path.join(glob.escape(source), "pytorch_model.bin*")):
        raise ModelError(f"{source}: holds neither pytorch_model.bin nor params.json with consolidated.*.pth")
    if is_meta and not os.path.exists(os.path.join(source, "consolidated.00.pth")):
        raise ModelError(f"{source}: holds params.json but no consolidated.00.pth")
    config, weights, stored = meta(source, rope_factor) if is_meta else hugging_face(source)
    with hf_directory.Directory(target) as folder:
        hf_directory.write_json(folder, "config.json", {key: x for key, x in config.items() if key not in ("dtype", "torch_dtype")})
        path = find_tokenizer(source, ("", "..") if is_meta else ("",))
        if path and (is_meta or not os.path.exists(os.path.join(source, "tokenizer.json"))):
            settings = {} if is_meta else llama_settings(os.path.join(source, "tokenizer_config.json"))
            convert_tokenizer(folder, path, settings)
        for name in CARRIED:
            if os.path.exists(os.path.join(source, name)):
                shutil.copyfile(os.path.join(source, name), os.path.join(folder, name))
        if os.path.isdir(os.path.join(source, MORE_TEMPLATES)):
            shutil.copytree(os.path.join(source, MORE_TEMPLATES), os.path.join(folder, MORE_TEMPLATES))
        hf_directory.write_safetensors(os.path.join(folder, "model.safetensors"), weights, dtype or stored)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="the folder with the checkpoint")
    parser.add_argument("target", help="the directory to write; must not exist")
    parser.add_argument("--dtype", choices=hf_directory.DTYPES, help="what weights are stored in (default: as in the checkpoint)")
    parser.add_argument("--rope-factor", type=float, help="how far Meta's files scale RoPE: 8 for LLaMA 3.1, 32 for 3.2")
    args = parser.parse_args()
    return hf_directory.main("import_pytorch", lambda: import_pytorch(args.source, args.target, args.dtype, args.rope_factor))


if __name__ == "__main__":
    raise SystemExit(main())
