#!/usr/bin/env python3
"""Which make goals install missing packages. The compiler and the package manager are stand-ins: nothing is installed."""
import os
import subprocess
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
STAND_INS = {
    "g++": "cat >/dev/null; echo libpcre2-dev",  # as the preprocessor answers scripts/deps.sh: this package is missing
    "dpkg-query": "case ${!#} in libpcre2-dev) ;; *) printf installed ;; esac",
    "apt-get": 'echo "$*" >>"$LOG"',
    "id": "echo 0",
}


class DepsTest(unittest.TestCase):
    def setUp(self):
        top = tempfile.TemporaryDirectory(prefix="train_gpt_deps_")
        self.addCleanup(top.cleanup)
        self.log = os.path.join(top.name, "log")
        for name, script in STAND_INS.items():
            path = os.path.join(top.name, name)
            with open(path, "w") as file:
                file.write(f"#!/bin/bash\n{script}\n")
            os.chmod(path, 0o755)
        self.path = top.name + os.pathsep + os.environ["PATH"]

    def make(self, *args):
        """Runs make with the stand-ins. Returns the finished process and the commands that apt-get received."""
        makes = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "DEPS", "CXX", "BACKEND")  # of the make around this test
        env = {name: value for name, value in os.environ.items() if name not in makes}
        done = subprocess.run(["make", "CXX=g++", *args], cwd=ROOT, env={**env, "PATH": self.path, "LOG": self.log},
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
        if not os.path.exists(self.log):
            return done, []
        with open(self.log) as file:
            return done, file.read().splitlines()

    def test_build_goals_install_nothing(self):
        for goals in [], ["all"], ["train_gpt"], ["lib"], ["ladder"], ["test-binaries"]:
            done, commands = self.make(*goals)
            self.assertEqual(done.returncode, 2, done.stdout)
            self.assertIn("Missing: libpcre2-dev. Run 'make deps'", done.stdout)
            self.assertEqual(commands, [], goals)

    def test_other_goals_install_missing_packages(self):
        for goal in "train", "test", "data", "chat", "bench", "mutants":
            done, commands = self.make(goal)
            self.assertEqual(done.returncode, 2, done.stdout)  # the stand-in for apt-get installs nothing
            self.assertIn("Still missing after the installation: libpcre2-dev", done.stdout)
            self.assertEqual(commands, ["update", "install -y --no-install-recommends libpcre2-dev"], goal)
            os.remove(self.log)

    def test_deps_no_and_dry_runs_install_nothing(self):
        for args in ["DEPS=no", "test"], ["-n", "test"], ["-n"]:
            done, commands = self.make(*args)
            self.assertEqual(done.returncode, 2, done.stdout)
            self.assertIn("libpcre2-dev", done.stdout)
            self.assertEqual(commands, [], args)


if __name__ == "__main__":
    unittest.main()
