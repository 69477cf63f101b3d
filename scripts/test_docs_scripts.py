#!/usr/bin/env python3
"""Scripts that the documentation calls by their names can be called so, also where only .venv has their packages."""
import glob
import os
import re
import subprocess
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGES = ["README.md", "CONTRIBUTING.md", "dev/README.md", "docs/*/*.md"]


def called_scripts(text):
    """Those that stand where a command begins: in a code block, or between backquotes."""
    found, in_code = set(), False
    for line in text.splitlines():
        if line.startswith("```"):
            in_code = not in_code
        for command in [line] if in_code else re.findall(r"`([^`]+)`", line):
            for part in re.split(r"&&|\|", command):
                match = re.match(r"\s*(?:sudo\s+)?(?:[A-Z_]+=\S+\s+)*((?:scripts|dev|data)/[\w/]+\.(?:py|sh))\b", part)
                if match:
                    found.add(match[1])
    return found


class DocsScriptsTest(unittest.TestCase):
    def scripts(self):
        found = {}
        for pattern in PAGES:
            for page in glob.glob(os.path.join(ROOT, pattern)):
                with open(page, encoding="utf-8") as file:
                    for script in called_scripts(file.read()):
                        found.setdefault(script, os.path.relpath(page, ROOT))
        return found

    def test_finds_commands(self):
        text = "Run `scripts/a.py x`, `X=1 scripts/b.sh`, not python `python c/scripts/d.py` or scripts/e.py.\n" \
               "```\nscripts/f.sh 1   # as root\nmake && dev/g.py | cat\npython scripts/h.py\n```\n"
        self.assertEqual(called_scripts(text), {"scripts/a.py", "scripts/b.sh", "scripts/f.sh", "dev/g.py"})

    def test_they_are_there_and_executable(self):
        scripts = self.scripts()
        self.assertGreater(len(scripts), 20)
        for script, page in sorted(scripts.items()):
            with self.subTest(script=script, page=page):
                path = os.path.join(ROOT, script)
                self.assertTrue(os.path.isfile(path), "there is no such file")
                with open(path, encoding="utf-8") as file:
                    first = file.readline()
                # A page may also name a file that is not a program, as a module or a list of packages.
                if first.startswith("#!"):
                    self.assertTrue(os.access(path, os.X_OK), "not executable: chmod +x")

    def test_importers_need_no_activated_environment(self):
        """A Python without packages hands over to .venv's."""
        python = os.path.join(ROOT, ".venv", "bin", "python")
        if not os.path.exists(python) or subprocess.run([python, "-c", "import numpy"], stderr=subprocess.DEVNULL,
                                                        check=False).returncode:
            self.skipTest("needs .venv with NumPy (make venv)")
        with tempfile.TemporaryDirectory() as folder:
            bare = os.path.join(folder, "python3")
            with open(bare, "w", encoding="utf-8") as file:
                file.write(f'#!/bin/sh\nexec {os.path.realpath(python)} -S "$@"\n')
            os.chmod(bare, 0o755)
            for script in "scripts/import_gguf.py", "scripts/import_pytorch.py":
                with self.subTest(script):
                    done = subprocess.run([os.path.join(ROOT, script), "--help"], capture_output=True, text=True, check=False,
                                          env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"})
                    self.assertEqual((done.returncode, done.stderr), (0, ""))
                    self.assertIn("usage: " + os.path.basename(script), done.stdout)


if __name__ == "__main__":
    unittest.main()
