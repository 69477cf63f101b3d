"""dev/peers/compare_tokenizers.py on a few hundred strings, and on an answer that is wrong."""

import os
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
BINARY = os.path.join(
    ROOT, os.path.dirname(os.environ.get("TRAIN_GPT", "build/cpu/train_gpt")), "dev", "test_tokenizer"
)


def missing():
    try:
        import tokenizers  # noqa: F401
    except ImportError:
        return "the Python package tokenizers is not installed"
    return None if os.path.exists(BINARY) else f"{BINARY} is not built"


@unittest.skipIf(missing(), missing())
class CompareTokenizersTest(unittest.TestCase):
    def compare(self, *args, binary=BINARY):
        return subprocess.run(
            [sys.executable, os.path.join(HERE, "compare_tokenizers.py"), "--binary", binary, *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )

    def test_families(self):
        done = self.compare("--strings", "300", "--seed", "3")
        self.assertEqual(done.returncode, 0, done.stdout)
        lines = done.stdout.splitlines()[1:]
        self.assertEqual(len(lines), 8)
        for line in lines:
            self.assertRegex(line, r"^[a-z0-9.-]+: equal$")

    def test_differences_are_reported(self):
        with tempfile.TemporaryDirectory() as folder:
            binary = os.path.join(folder, "test_tokenizer")
            # The expected ids of the first text, which is empty, get one before the test reads them.
            with open(binary, "w") as file:
                file.write(
                    "#!/bin/sh\nsed -i 's/\"plain\":\\[\\[/&7/' \"$TOKENIZER_FIXTURES\"/*.json\n"
                    f'exec "{BINARY}" "$@"\n'
                )
            os.chmod(binary, 0o755)
            done = self.compare("--strings", "2", "qwen", binary=binary)
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertIn("qwen: ", done.stdout)
        self.assertIn("one[\"plain\"]", done.stdout)

    def test_bad_arguments(self):
        for args, message in ((["qwen9"], "there is no family qwen9"), (["--binary", "/none"], "/none is missing")):
            done = self.compare(*args)
            self.assertEqual(done.returncode, 2, done.stdout)
            self.assertIn(message, done.stdout)


if __name__ == "__main__":
    unittest.main()
