#!/usr/bin/env python3
"""Every key that transformers or llama.cpp declare is used here, refused, or listed with a reason to ignore it.

    scripts/check_keys.py

The keys come from the packages' source, which is read and not run: the config classes of the families that are
supported and what their models read of them, GenerationConfig, the tokenizers' base classes, and the GGUF keys. Whether
config.json's keys are used or refused is asked of ./train_gpt: it refuses a text that cannot be their value. A key of
generation_config.json or tokenizer_config.json is used if the sources name it. Reasons: scripts/ignored_keys.py, and
models/gguf_keys.cpp for GGUF. Prints a line for each fault; the exit status is 1 if there is one.
"""

import in_venv  # noqa: F401
import ast
import concurrent.futures
import fnmatch
import glob
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile

import hf_directory
import ignored_keys

sys.path.insert(0, os.path.join(hf_directory.ROOT, "data"))
from make_data import pip_download  # noqa: E402

CACHE = os.path.join(hf_directory.ROOT, "build", "keys")
TRANSFORMERS = ("transformers==4.57.6", "transformers==5.24.0")
GGUF, GGUF_KEYS = "gguf==0.19.0", "models/gguf_keys.cpp"
FAMILIES = ("gpt2", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3", "olmo2")
SHARED = ("masking_utils.py", "cache_utils.py", "modeling_rope_utils.py")  # which read the config of every family
# Methods that take the keys of a file, and the dictionaries that they find them in.
READERS = ("__init__", "__post_init__", "convert_rope_params_to_dict", "_from_pretrained")
DICTIONARIES = ("kwargs", "init_kwargs", "local_kwargs")
# Classes whose keys are those of a tokenizer_config.json with a tokenizer.json.
TOKENIZERS = (
    ("tokenization_utils_base.py", "SpecialTokensMixin"),
    ("tokenization_utils_base.py", "PreTrainedTokenizerBase"),
    ("tokenization_utils_fast.py", "PreTrainedTokenizerFast"),
    ("tokenization_utils_tokenizers.py", "TokenizersBackend"),
    ("models/llama/tokenization_llama_fast.py", "LlamaTokenizerFast"),
    ("models/llama/tokenization_llama.py", "LlamaTokenizer"),
)
TOKENIZER_SOURCES = ("data/tokenizer*.cpp", "data/declared_tokens.cpp", "data/chat_template.cpp")
GENERATION_SOURCES = ("infer/*.cpp", "models/model_source.cpp")


class Package:
    """The source of a wheel, downloaded once."""

    def __init__(self, requirement):
        folder = os.path.join(CACHE, requirement)
        found = glob.glob(os.path.join(glob.escape(folder), "*.whl"))
        if not found:
            os.makedirs(CACHE, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=CACHE) as downloads:
                pip_download(requirement, downloads)
                os.makedirs(folder, exist_ok=True)
                for name in os.listdir(downloads):
                    os.replace(os.path.join(downloads, name), os.path.join(folder, name))
            found = glob.glob(os.path.join(glob.escape(folder), "*.whl"))
        self.wheel, self.name = zipfile.ZipFile(found[0]), requirement.split("==")[0]

    def text(self, path):
        """ "" where this version has no such file."""
        path = f"{self.name}/{path}"
        return self.wheel.read(path).decode() if path in self.wheel.namelist() else ""

    def class_of(self, path, name):
        nodes = ast.walk(ast.parse(self.text(path)))
        return next((node for node in nodes if isinstance(node, ast.ClassDef) and node.name == name), None)


def text_of(node):
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def keys_read_by(function):
    """The parameters of a method, and the constants that it takes from a dictionary of keys."""
    arguments = function.args
    keys = (
        {argument.arg for argument in arguments.args + arguments.kwonlyargs} if function.name == "__init__" else set()
    )
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("pop", "get")
            and node.args
        ):
            where, key = node.func.value, text_of(node.args[0])
        elif isinstance(node, ast.Subscript):
            where, key = node.value, text_of(node.slice)
        else:
            continue
        if isinstance(where, ast.Name) and where.id in DICTIONARIES and key:
            keys.add(key)
    return keys - {"self"}


def keys_of_class(node):
    """The fields of a dataclass, the names that stand for them, and what the methods read. Of None: none."""
    keys = set()
    for part in node.body if node else ():
        if isinstance(part, ast.AnnAssign) and "ClassVar" not in ast.unparse(part.annotation):
            keys.add(part.target.id)
        elif isinstance(part, ast.FunctionDef) and part.name in READERS:
            keys |= keys_read_by(part)
        elif isinstance(part, ast.Assign) and part.targets[0].id == "attribute_map":
            keys |= {text_of(key) for key in part.value.keys}
        elif isinstance(part, ast.Assign) and part.targets[0].id == "SPECIAL_TOKENS_ATTRIBUTES":
            keys |= {text_of(key) for key in part.value.elts}
    return keys


def attributes_of_config(source):
    """What a model's code reads of its config."""
    return {
        a or b for a, b in re.findall(r"config\.(?!json\b)([a-z_]\w*)\b(?![\w(])|attr\([\w.]*config, \"(\w+)\"", source)
    }


def config_keys(package, family):
    folder = f"models/{family}"
    [name] = set(
        re.findall(
            r"^class (\w+Config)\(Pre[Tt]rainedConfig", package.text(f"{folder}/configuration_{family}.py"), re.M
        )
    )
    base = "PreTrainedConfig" if package.class_of("configuration_utils.py", "PreTrainedConfig") else "PretrainedConfig"
    return (
        keys_of_class(package.class_of(f"{folder}/configuration_{family}.py", name))
        | keys_of_class(package.class_of("configuration_utils.py", base))
        | keys_of_class(package.class_of("modeling_rope_utils.py", "RotaryEmbeddingConfigMixin"))
        | attributes_of_config("\n".join(map(package.text, (f"{folder}/modeling_{family}.py", *SHARED))))
    )


def gguf_constants(package):
    """The keys of GGUF: the texts in the class Keys."""
    keys = {
        text_of(node.value)
        for node in ast.walk(package.class_of("constants.py", "Keys"))
        if isinstance(node, ast.Assign)
    }
    return {re.sub(r"\{(?!arch\})\w+\}", "x", key) for key in keys}


def gguf_tables():
    """What models/gguf_keys.cpp says: the keys that it uses or refuses, and {reason: patterns of ignored keys}."""
    with open(os.path.join(hf_directory.ROOT, GGUF_KEYS), encoding="utf-8") as file:
        text = file.read()
    decided = re.findall(r'\{"([^"]+)", (?:Kind::|"\[)', text)
    groups = re.findall(r'\{"([^"]+)",\s*\{((?:\s*"[^"]*",?)+)\s*\}\}', text.split("IGNORED = {")[1])
    return set(decided), {reason: re.findall('"([^"]*)"', patterns) for reason, patterns in groups}


def example(family):
    """A config.json in which no key is without effect because of another."""
    if family == "gpt2":
        return {"model_type": family, "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64, "vocab_size": 100}
    config = {
        "model_type": family,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "vocab_size": 100,
    }
    if family not in ("llama", "olmo2"):
        config.update(use_sliding_window=True, sliding_window=8)
    if family != "phi3":
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": 2.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    return config


def is_refused(config):
    with tempfile.TemporaryDirectory() as folder:
        hf_directory.write_json(folder, "config.json", config)
        return (
            subprocess.run(
                [hf_directory.PROGRAM, "info", folder], stdin=subprocess.DEVNULL, capture_output=True
            ).returncode
            != 0
        )


def uses_config_key(family, key):
    """True if train_gpt uses or refuses a key: it then refuses a text that cannot be its value. rope_scaling.x: x in
    that object."""
    config = example(family)
    *outer, name = key.split(".")
    (config[outer[0]] if outer else config)[name] = "?"
    return is_refused(config)


class Reasons:
    """A table {reason: patterns of keys}, and which of its patterns a key needed."""

    def __init__(self, table):
        self.patterns, self.needed = [pattern for patterns in table.values() for pattern in patterns], set()

    def has(self, *names):
        found = [pattern for pattern in self.patterns if any(fnmatch.fnmatchcase(name, pattern) for name in names)]
        self.needed.update(found)
        return bool(found)

    def faults(self, where):
        for pattern in self.patterns:
            if pattern not in self.needed:
                yield f"{where}: {pattern}: no key is ignored for this; remove it"


def faults_of(where, decisions, reasons):
    """decisions: (names of a key, whether it is used). All of its names may be listed."""
    for names, used in decisions:
        listed = not used and reasons.has(*names)
        if not used and not listed:
            remedy = f"use it, refuse it, or say in {reasons_file(where)} why not"
            yield f"{where}: key {names[-1]}: neither used nor refused; {remedy}"
    yield from reasons.faults(reasons_file(where))


def reasons_file(where):
    return GGUF_KEYS if where == "GGUF" else "scripts/ignored_keys.py"


def config_decisions(packages):
    names = [
        (family, key) for family in FAMILIES for key in sorted(set().union(*(config_keys(p, family) for p in packages)))
    ]
    rope = set().union(*(keys_of_class(p.class_of("modeling_rope_utils.py", "RopeParameters")) for p in packages))
    names += [("llama", f"rope_scaling.{key}") for key in sorted(rope)]
    for family in FAMILIES:
        if is_refused(example(family)):
            raise hf_directory.ModelError(f"{hf_directory.PROGRAM} refuses check_keys.py's example of {family}")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        used = pool.map(lambda name: uses_config_key(*name), names)
        return [((key, f"{family}.{key}"), x) for (family, key), x in zip(names, used)]


def source_decisions(keys, patterns):
    """A key is used if a source names it as a text."""
    text = ""
    for pattern in patterns:
        for path in glob.glob(os.path.join(hf_directory.ROOT, pattern)):
            with open(path, encoding="utf-8") as file:
                text += file.read()
    return [((key,), f'"{key}"' in text) for key in sorted(keys)]


def faults():
    packages = [Package(requirement) for requirement in TRANSFORMERS]
    union = lambda classes: set().union(
        *(keys_of_class(p.class_of(*c)) for p in packages for c in classes)
    )  # noqa: E731
    yield from faults_of("config.json", config_decisions(packages), Reasons(ignored_keys.CONFIG))
    generation = union([("generation/configuration_utils.py", "GenerationConfig")])
    yield from faults_of(
        "generation_config.json", source_decisions(generation, GENERATION_SOURCES), Reasons(ignored_keys.GENERATION)
    )
    tokenizers = source_decisions(union(TOKENIZERS), TOKENIZER_SOURCES)
    yield from faults_of("tokenizer_config.json", tokenizers, Reasons(ignored_keys.TOKENIZER))
    decided, ignored = gguf_tables()
    decisions = [((key,), key in decided) for key in sorted(gguf_constants(Package(GGUF)))]
    yield from faults_of("GGUF", decisions, Reasons(ignored))


def main():
    found = list(faults())
    print("\n".join(found) if found else "every key is used, refused or listed with a reason")
    sys.exit(bool(found))


if __name__ == "__main__":
    sys.exit(hf_directory.main("check_keys", main))
