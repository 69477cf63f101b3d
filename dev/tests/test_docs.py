#!/usr/bin/env python3
"""The commands that README.md and docs/use print. TRAIN_GPT names the driver.

Every block of commands runs as printed, by bash, in a copy of the tree in which the models, data and runs that the page
names are small stand-ins. A training run that takes longer is stopped after a few steps by SIGTERM, and must save. A
block that cannot run here has one line before it:

    <!-- not run: needs a GPU -->

Of these, and of commands between backquotes, the test checks that commands, options, values, make goals, variables and
scripts exist. A block of commands is one of bash, sh or console, or has no language and a line that begins with one of
this project's commands."""
import ast
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest

import harness
from harness import DRIVER, ENVIRONMENT, ROOT, run, sanitized

sys.path.insert(0, os.path.join(ROOT, "scripts"))
import check_docs  # noqa: E402

RUN = "README.md docs/use/*.md dev/testing.md dev/library.md"
READ = RUN + " docs/understand/*.md dev/README.md"
STEPS = 3          # that a training run takes at least before it is stopped
BLOCK_S = 300
CHAT_TEMPLATE = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
                 "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")

# Programs of others that pages may call.
OTHERS = {"apt-get", "bash", "cat", "cp", "curl", "echo", "git", "grep", "head", "ls", "mpirun", "ncu", "nsys", "pip",
          "printf", "rm", "srun", "tail", "tensorboard", "torchrun", "wget"}
LAUNCHERS = {"mpirun", "ncu", "nsys", "srun", "torchrun"}
WRAPPERS = {"sudo", "env", "time", "nohup", "-E"}
# Options of others that pages name without their program.
OTHERS_OPTIONS = {"--allow-run-as-root", "--kill-on-bad-exit", "--master-addr", "--mca", "--node-rank",
                  "--oversubscribe", "--shm-size"}


# What installs or downloads, which a test must not do.
NEVER = re.compile(r"\bsudo |\bpip install|\bapt-get |\bhf download|\.ci/run|"
                   r"scripts/(in_debian|fetch_|deps|venv|cuda_toolkit)")


# ---- what there is ---------------------------------------------------------------------------------------------------

@functools.cache
def driver_options():
    """{command: {option: the values that it may have, None: any}}"""
    table = {}
    for command in re.findall(r"^  ([a-z]+)  ", run("--help").stdout, re.M):
        lines = re.findall(r"^  (--[\w-]+)(.*)$", run(command, "--help", "all").stdout, re.M)
        table[command] = {"--help": None}
        for option, rest in lines:
            values = re.match(r" \w+:\{([^}]*)\}", rest)
            table[command][option] = values[1].split(",") if values else None
    return table


@functools.cache
def script_options(path):
    """The options of a script: those that it, or a module of its directories that it imports, gives to argparse; of a
    shell script every one in its text."""
    with open(path, encoding="utf-8") as file:
        source = file.read()
    if path.endswith(".sh"):
        return set(re.findall(r"--[a-z][\w-]*", source)) | {"--help"}
    found, tree = {"--help"}, ast.parse(source)
    folders = [os.path.dirname(path), *(os.path.join(ROOT, name) for name in ("scripts", "data", "dev/peers"))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            found |= {x.value for x in node.args if isinstance(x, ast.Constant) and str(x.value).startswith("--")}
        names = [x.name for x in node.names] if isinstance(node, ast.Import) else \
            [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            module = next((m for m in (os.path.join(f, name + ".py") for f in folders) if os.path.exists(m)), None)
            found |= script_options(module) if module else set()
    return found


@functools.cache
def make_names():
    """Goals and variables of the Makefile."""
    text = harness.text_of(os.path.join(ROOT, "Makefile"))
    joined = text.replace("\\\n", " ")
    variables = " ".join(re.findall(r"^(?:DATA|WORD)_VARIABLES := (.*)", joined, re.M)).split()
    return set(re.search(r"^\.PHONY: (.*)", joined, re.M)[1].split()), {*variables, "CXXFLAGS", "NVCCFLAGS"}


@functools.cache
def has_preset(name):
    return run("info", name).returncode == 0


@functools.cache
def every_option():
    """Of the driver and of every script."""
    scripts = [path for folder in ("scripts", "data", "dev/peers", "dev/tests", "dev/bench", "dev/ladder")
               for path in check_docs.pages(f"{folder}/*.py {folder}/*.sh")]
    of_scripts = [script_options(os.path.join(ROOT, path)) for path in scripts]
    return OTHERS_OPTIONS.union(*driver_options().values(), *of_scripts)


# ---- what a command names --------------------------------------------------------------------------------------------

def is_stand_in(value):
    """Whether a word of a page stands for any: N, DIR, S, ..., <family>."""
    return not value or not re.fullmatch(r"[a-z0-9][\w.,|-]*", value)


def options_of(words):
    """(option, its value or "") of each option."""
    for word, value in zip(words, [*words[1:], ""]):
        name, equals, given = word.partition("=")
        if re.fullmatch(r"\[?--[a-z][\w-]*\]?", name):
            yield name.strip("[]"), given if equals else "" if value.startswith("-") else value


def driver_fault(words):
    if not words or is_stand_in(words[0]) or words[0] == "help":
        unknown = [name for name, _ in options_of(words) if name not in ("--help", "--version")]
        return f"train_gpt has no option {unknown[0]} without a command" if unknown else None
    command, *rest = words
    if command not in driver_options():
        return f"train_gpt has no command {command}"
    for name, value in options_of(rest):
        if name not in driver_options()[command]:
            return f"train_gpt {command} has no option {name}"
        values = driver_options()[command][name]
        wrong = [one for one in re.split("[|,]", value) if values and not is_stand_in(value) and one not in values]
        if wrong:
            return f"train_gpt {command} {name} cannot be {wrong[0]}; it is one of {', '.join(values)}"
        if name == "--help" and value and run(command, "--help", value).returncode:
            return f"train_gpt {command} --help has no group {value}"
        if name == "--model" and not is_stand_in(value) and not has_preset(value):
            return f"there is no preset {value}"
    return None


def make_fault(words):
    goals, variables = make_names()
    for word in words:
        name, equals, _ = word.strip("[]").partition("=")
        if equals and name not in variables:
            return f"the Makefile has no variable {name}"
        if not equals and name not in goals and not name.startswith(("-", "build/")) and name != "...":
            return f"the Makefile has no goal {name}"
    return None


def script_fault(path, words):
    full = os.path.join(ROOT, path)
    if not os.path.isfile(full):
        return f"there is no {path}"
    unknown = [name for name, _ in options_of(words) if name not in script_options(full)]
    return f"{path} has no option {unknown[0]}" if unknown else None


def fault(words, between_backquotes=False):
    """What is wrong with the names in a command: None, or a few words."""
    words = list(words)
    while words and (words[0] in WRAPPERS or re.match(r"[A-Z_0-9]+=", words[0])):
        del words[0]
    if not words:
        return None
    name, *rest = words
    base = os.path.basename(name)
    if base == "train_gpt":
        return driver_fault(rest)
    if name == "make":
        return make_fault(rest)
    if base in LAUNCHERS:
        driver = next((i for i, word in enumerate(rest) if os.path.basename(word) == "train_gpt"), None)
        return None if driver is None else driver_fault(rest[driver + 1:])
    if re.fullmatch(r"(\.venv/bin/)?python3?|\$\w+", name):
        if name == "python":
            return "Debian has no command python: call the script itself, python3 or .venv/bin/python"
        return script_fault(rest[0], rest[1:]) if rest and rest[0].endswith(".py") else None
    if re.match(r"(scripts|data|dev|\.ci)/", name):
        full = os.path.join(ROOT, name)
        only_named = between_backquotes and not rest  # as a module
        if os.path.isfile(full) and not os.access(full, os.X_OK) and not only_named:
            return f"{name} is not executable"
        return script_fault(name, rest)
    if name.startswith((".venv/bin/", "build/")) or name in OTHERS:
        return None
    return f"there is no command {name}"


def faults_of(page, runs=True):
    """(line, fault) of the commands of a page's text: in code blocks, and between backquotes. runs: its blocks run."""
    for block in check_docs.blocks(page):
        if runs and not block.language and not block.has_commands():
            yield block.line - 1, "name the language of the block: bash for commands, text for what a program prints"
        if block.reason is not None and not block.has_commands():
            yield block.line - 1, "the block has no commands: remove the comment <!-- not run: ... -->"
        elif block.reason == "":
            yield block.line - 1, "say why the block is not run"
        elif block.has_commands():
            yield from ((block.line + line - 1, found) for line, words in check_docs.commands(block.text)
                        if (found := fault(words)))
    for line, text in check_docs.spans(page):
        yield from ((line, found) for found in span_faults(text) if found)


def span_faults(text):
    """Of what stands between backquotes: a command, its beginning, or options alone."""
    try:
        found = list(check_docs.commands(text))
    except ValueError:
        return
    for _, words in found:
        bare = [word for word in words if not re.match(r"[A-Z_0-9]+=", word)]
        if not bare:
            continue
        if re.match(r"(\./)?train_gpt$|make$|\.venv/bin/python|python3?$", bare[0]) or \
                re.match(r"(scripts|data|dev|\.ci)/[\w/]+\.(py|sh)$", bare[0]) and (bare[1:] or bare is not words):
            yield fault(words, between_backquotes=True)
        elif bare[0] in driver_options() and any(word.startswith("--") for word in bare):
            yield driver_fault(bare)
        elif bare[0].startswith("--"):
            yield from (f"nothing has an option {name}" for name, _ in options_of(bare) if name not in every_option())


# ---- running the blocks ----------------------------------------------------------------------------------------------

# Everything goes to the driver as it is. A training run is asked to stop when it has logged a few steps.
DRIVER_SCRIPT = f"""#!/usr/bin/env bash
[[ $1 == train && " $* " != *" --help"* ]] || exec {shlex.quote(DRIVER)} "$@"
for ((i = 1; i < $#; i++)); do
    [[ ${{!i}} != --out ]] || log=${{@:i+1:1}}/log.jsonl
done
count() {{ cat "$log" 2>/dev/null | grep -c '"loss"' || true; }}
before=$(count)
{shlex.quote(DRIVER)} "$@" &
while kill -0 $! 2>/dev/null; do
    if (($(count) >= before + {STEPS})); then kill -TERM $! 2>/dev/null; break; fi
    sleep 0.05
done
wait $!
"""

# Only goals that build and fetch nothing here.
MAKE_SCRIPT = """#!/usr/bin/env bash
for word in "$@"; do
    case $word in
        all|train_gpt|lib|train|data|smollm2|chat|hellaswag|help|cuda-info|-*|*=*) ;;
        *) echo "make $word does not run in this test: mark the block" >&2; exit 1 ;;
    esac
done
exec {make} {kept} "$@"
"""


def write(path, text):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def readable(output):
    """The last lines of what a command printed, without what random weights generate."""
    text = re.sub(rb"(?m)^@@line \d+\n|[^\n -~]", b"", output).decode()
    return text[-1500:].strip()


def write_program(path, text):
    write(path, text)
    os.chmod(path, 0o755)


class StandIns:
    """A model, tokens, a run and texts, made once and copied to where a page names one."""

    def __init__(self, top):
        self.top = top
        self.at = functools.partial(os.path.join, top)
        for name in ("text/a.txt", "text/b.md", "text/c.c", "text/d.txt"):
            write(self.at(name), "".join(harness.sentence(i, ord(name[5])) for i in range(120)))
        write(self.at("text.txt"), harness.text_of(self.at("text/a.txt")) * 4)
        turns = [{"prompt": f"What is {i} plus {i}?", "response": f"{i} + {i} = {2 * i}."} for i in range(60)]
        write(self.at("examples.jsonl"), "".join(json.dumps(turn) + "\n" for turn in turns))
        questions = [{"ctx": f"{i} and one is", "endings": [str(i + 1), str(i)], "label": 0} for i in range(50)]
        write(self.at("questions.jsonl"), "".join(json.dumps(question) + "\n" for question in questions))
        write(self.at("prompts"), "The cat\n---\nThe owl\n")
        # Byte tokens, and the marks and the template of conversations.
        harness.tokenize(self.at("text"), self.at("bytes"), "--val", "0.3")
        tokenizer = json.loads(harness.text_of(self.at("bytes", "tokenizer.json")))
        for number, mark in enumerate(("<|im_start|>", "<|im_end|>")):
            tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 257 + number, "content": mark})
        write(self.at("marks", "tokenizer.json"), json.dumps(tokenizer))
        write(self.at("marks", "tokenizer_config.json"), json.dumps({"chat_template": CHAT_TEMPLATE}))
        harness.tokenize(self.at("text"), self.at("tokens"), "--val", "0.3", tokenizer=self.at("marks"))
        harness.tokenize(self.at("examples.jsonl"), self.at("examples"), "--val", "0.3", tokenizer=self.at("marks"))
        shape = ["--layers", 2, "--channels", 32, "--heads", 2, "--kv-heads", 1, "--ffn", 64, "--max-positions", 2048]
        done = run("train", "--model", "llama-1B", *shape, "--vocab-size", 300, "--data", self.at("tokens"),
                   "--out", self.at("run"), "--steps", 4, "--batch-size", 1, "--seq-len", 32, "--dtype", "fp32")
        if done.returncode:
            raise AssertionError(f"the stand-in for models cannot be trained: {done.stderr}")
        run("convert", self.at("run"), self.at("model"))
        shutil.copy(self.at("marks", "tokenizer_config.json"), self.at("model"))

    # What a page names, where it names it, and what stands in for it. Later rows are for what earlier ones do not name.
    NAMES = [
        (r"(?:>|--out|--output|\bconvert \S+) ?(\S+)", None),                       # what the page makes
        (r"\bNAME=([\w-]+)", None),
        (r"\b(?:TEXT|VAL_TEXT)=(\S+\.jsonl)\b|--text (\S+\.jsonl)\b", "examples.jsonl"),
        (r"--(?:eval-)?multiple-choice (\S+)|(data/text/[\w-]+\.jsonl)", "questions.jsonl"),
        (r"\b(?:TEXT|VAL_TEXT)=(\S+\.\w+)\b|--text (\S+\.\w+)\b", "text.txt"),
        (r"\b(?:TEXT|VAL_TEXT)=(\S+)|--text (\S+)", "text"),
        (r"--(?:prompt-file|sample-prompts) (\S+)", "prompts"),
        (r"(?m)^make (?:data|train)\s*(?:#.*)?$", "tokens", "data/tokens/quickstart"),
        (r"\bmake (?:smollm2|chat)\b", "model", "checkpoints/SmolLM2-135M-Instruct"),
        (r"\bmake hellaswag\b", "questions.jsonl", "data/text/hellaswag.jsonl"),
        (r"(data/tokens/[\w-]+)|--data ([\w/-]+)(?=\s)", "tokens"),
        (r"(runs/[\w-]+)", "run"),
        (r"(checkpoints/[\w.-]+)", "model"),
        (r"--(?:model|base) ([\w.-]+/[\w./-]+|[A-Z]+)(?=\s)|TOKENIZER=(?!byte|bpe|gpt2)(\S+)", "model"),
    ]

    def provide(self, text, folder):
        """Makes in the folder what the text of a block names, and what the block does not make itself."""
        made, text = set(), re.sub(r"(?m)\s#.*", "", text)
        for pattern, stand_in, *fixed in self.NAMES:
            for found in re.finditer(pattern, text):
                name = fixed[0] if fixed else next(group for group in found.groups() if group)
                path = os.path.join(folder, name)
                if stand_in is None:
                    made |= {name, f"data/tokens/{name}"}
                elif name not in made and not os.path.lexists(path):
                    source = self.at("examples" if stand_in == "tokens" and self.of_examples(name) else stand_in)
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                    (shutil.copytree if os.path.isdir(source) else shutil.copy)(source, path)

    @staticmethod
    def of_examples(name):
        return os.path.basename(name) in ("qa", "sums", "chat")


class Tree:
    """A copy of the project in which blocks run. Its directories are its own, most files are links."""

    def __init__(self, folder):
        self.folder = folder
        for name in os.listdir(ROOT):
            source, target = os.path.join(ROOT, name), os.path.join(folder, name)
            if name in ("build", "runs", "checkpoints", "train_gpt", ".git"):
                continue
            if name in (".venv", ".deps") or os.path.isfile(source):
                os.symlink(source, target)
            else:
                shutil.copytree(source, target, copy_function=self.copy,
                                ignore=shutil.ignore_patterns("__pycache__", *["text", "tokens"] * (name == "data")))
        driver = os.path.join(folder, "build", "cpu", "train_gpt")
        write_program(driver, DRIVER_SCRIPT)
        os.symlink(driver, os.path.join(folder, "train_gpt"))
        for variable, name in (("TRAIN_GPT_DATA_LIB", "libtrain_gpt_data.so"),
                               ("TRAIN_GPT_KERNELS_LIB", "libtrain_gpt_kernels.so")):
            library = os.environ.get(variable) or os.path.join(os.path.dirname(os.path.realpath(DRIVER)), name)
            os.symlink(os.path.abspath(library), os.path.join(os.path.dirname(driver), name))
        # Nothing is compiled or installed.
        kept = [f"-o {path}" for path in ("build/cpu/train_gpt", "build/cpu/libtrain_gpt_data.so",
                                          "build/cpu/libtrain_gpt_kernels.so", ".venv/bin/python")]
        script = MAKE_SCRIPT.format(make=shutil.which("make"), kept=" ".join(kept))
        write_program(os.path.join(folder, "bin", "make"), script)
        goals, variables = make_names()
        self.environment = {name: value for name, value in ENVIRONMENT.items()
                            if name not in variables and not name.startswith(("MAKE", "MFLAGS", "TRAIN_GPT"))}
        self.environment |= {"BACKEND": "cpu", "DEPS": "no", "OMP_WAIT_POLICY": "passive", "STEPS": "2",
                             "PIP_NO_INDEX": "1",
                             "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9",
                             "PATH": f"{os.path.join(folder, 'bin')}:{os.environ['PATH']}"}

    @staticmethod
    def copy(source, target):
        """Python finds modules and data beside the file that a link leads to."""
        (shutil.copy if source.endswith(".py") else os.symlink)(source, target)

    def run(self, text, line=1):
        """Runs lines of a shell up to the first that fails. The first is the page's line of that number. Returns (line,
        what it said) of the one that fails, or None."""
        script = "\n" * (line - 1) + text
        trap = "trap 'echo \"@@line $LINENO\" >&2' ERR; set -eE -o pipefail; . \"$1\""
        with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
            file.write(script)
            file.flush()
            try:
                done = subprocess.run(["bash", "-c", trap, "bash", file.name], cwd=self.folder, env=self.environment,
                                      stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                      timeout=BLOCK_S)
            except subprocess.TimeoutExpired as expired:
                return line, f"no end after {BLOCK_S} s: {readable(expired.stdout or b'')}"
        if not done.returncode:
            return None
        failed = re.search(rb"^@@line (\d+)$", done.stdout, re.M)
        return int(failed[1]) if failed else line, f"exit status {done.returncode}: {readable(done.stdout)}"


class Docs(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if sanitized():
            raise unittest.SkipTest("the normal build runs the pages' commands")
        cls.top = tempfile.mkdtemp(prefix="train_gpt_docs_")
        cls.addClassCleanup(shutil.rmtree, cls.top)
        os.mkdir(os.path.join(cls.top, "stand-ins"))
        cls.stand_ins = StandIns(os.path.join(cls.top, "stand-ins"))

    def tree(self):
        folder = tempfile.mkdtemp(dir=self.top)
        self.addCleanup(shutil.rmtree, folder)
        return Tree(folder)

    def failing_blocks(self, page):
        """(line, what it said) of each block of a page's text that fails."""
        tree = self.tree()
        for block in check_docs.blocks(page):
            if not block.has_commands() or block.reason is not None:
                continue
            if NEVER.search(block.text):
                yield block.line, f"{NEVER.search(block.text)[0]} installs or downloads: mark the block"
                continue
            self.stand_ins.provide(block.text, tree.folder)
            # In a console block commands follow a $, and what they print does not.
            lines = [line if block.language != "console" else line[2:] if line.startswith("$ ") else ""
                     for line in block.text.splitlines()]
            failed = tree.run("\n".join(lines) + "\n", block.line)
            if failed:
                yield failed

    def expect_page(self, name):
        page = check_docs.read(name)
        runs = name in check_docs.pages(RUN)
        found = [*faults_of(page, runs), *(self.failing_blocks(page) if runs else ())]
        missing = [what for _, what in found if re.search("make venv`? installs", what)]
        if len(found) > len(missing):
            self.fail("\n" + "\n".join(f"{name}:{line}: {what}" for line, what in found))
        if missing:
            self.skipTest(missing[0].splitlines()[-1])

    def test_finds_wrong_names(self):
        page = """
Run `make tests`, `make TEX=a data`, `./train_gpt train --learning-rate 1`, `train --recompute blocks` or `--stepz`.
`train_gpt tune`, `scripts/no.py`, `scripts/sweep.py --outt x`, `./train_gpt plan --model
gpt2-125M`, `python scripts/sweep.py`, `train_gpt train --help adam`.

    <!-- not run: a block of its own -->
<!-- not run: needs a GPU -->
```
MPI=no ./train_gpt plan --model gpt2-tiny \\
    --batch 4 && make data TXT=a   # comment --none
torchrun --nproc-per-node 8 ./train_gpt train --gpu 3
```
<!-- not run: -->
```bash
make
```
<!-- not run: text -->
```text
make
```
```
P=python3
$P scripts/sweep.py
```
Right: `make data CORPUS=linux [VOCAB=32768]`, `--dtype fp32\\|bf16`, `train --help muon`,
`./train_gpt plan --model M ...`, `./train_gpt`, `TEXT=folder scripts/run_gpt2_124M.sh`, `train_gpt.cu`, `make -n`,
`dev/tests/test_{a,b}.py`, `--lr` `x --y`.
""".replace("\\\\", "\\")
        found = list(faults_of(page))
        self.assertEqual([line for line, _ in found], [9, 9, 11, 14, 18, 21, 2, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4], found)
        self.assertIn((2, "train_gpt train has no option --learning-rate"), found)
        self.assertIn((9, "the Makefile has no variable TXT"), found)

    def test_finds_failing_blocks(self):
        page = """
```
make data TEXT=mine.txt NAME=mine TOKENIZER=byte
./train_gpt train --model gpt2-tiny --data data/tokens/mine --out runs/mine --steps 100000
./train_gpt sample --model runs/mine --prompt "A" --max-tokens 4 | cat
```
Next
```bash
echo fine

./train_gpt sample --model runs/mine \\
    --prompt "A" --max-tokens none | cat
```
```console
$ ./train_gpt info no_file
an error
```
<!-- not run: needs a GPU -->
```
./train_gpt train --gpus all
```
```
make test
```
""".replace("\\\\", "\\")
        found = list(self.failing_blocks(page))
        self.assertEqual([line for line, _ in found], [12, 15, 23], found)  # a command ends in line 12
        self.assertIn("--max-tokens", found[0][1])
        self.assertIn("no_file", found[1][1])


for page_name in check_docs.pages(READ):
    setattr(Docs, "test_" + re.sub(r"\W", "_", page_name), lambda self, name=page_name: self.expect_page(name))


if __name__ == "__main__":
    unittest.main()
