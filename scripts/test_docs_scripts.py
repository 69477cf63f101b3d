#!/usr/bin/env python3
"""Scripts that the documentation calls by their names can be called so, also where only .venv has their packages."""
import os
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "scripts"))
import check_docs  # noqa: E402

PAGES = "README.md CONTRIBUTING.md dev/README.md docs/*/*.md"


def called_scripts(page):
    """Those that a command of the page's text begins with."""
    found = set()
    for _, words in check_docs.page_commands(page):
        while words and (words[0] == "sudo" or re.match(r"[A-Z_]+=", words[0])):
            words = words[1:]
        if words and re.fullmatch(r"(scripts|dev|data)/[\w/]+\.(py|sh)", words[0]):
            found.add(words[0])
    return found


class DocsScriptsTest(unittest.TestCase):
    def scripts(self):
        found = {}
        for page in check_docs.pages(PAGES):
            for script in called_scripts(check_docs.read(page)):
                found.setdefault(script, page)
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
