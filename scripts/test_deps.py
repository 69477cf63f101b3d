#!/usr/bin/env python3
"""Which make goals install missing packages, and where to. The compiler and the package manager are stand-ins: nothing is
installed."""
import os
import shutil
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
        self.top = top.name
        self.log = os.path.join(top.name, "log")
        for name, script in STAND_INS.items():
            self.stand_in(name, script)
        self.path = top.name + os.pathsep + os.environ["PATH"]

    def stand_in(self, name, script):
        path = os.path.join(self.top, name)
        with open(path, "w") as file:
            file.write(f"#!/bin/bash\n{script}\n")
        os.chmod(path, 0o755)

    def logged(self):
        """What stand-ins have received since the last call."""
        if not os.path.exists(self.log):
            return []
        with open(self.log) as file:
            lines = file.read().splitlines()
        os.remove(self.log)
        return lines

    def make(self, *args):
        """Runs make with the stand-ins. Returns the finished process and the commands that apt-get received."""
        makes = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "DEPS", "CXX", "BACKEND")  # of the make around this test
        env = {name: value for name, value in os.environ.items() if name not in makes}
        done = subprocess.run(["make", "CXX=g++", *args], cwd=ROOT, env={**env, "PATH": self.path, "LOG": self.log},
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
        return done, self.logged()

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

    def test_deps_no_and_dry_runs_install_nothing(self):
        for args in ["DEPS=no", "test"], ["-n", "test"], ["-n"]:
            done, commands = self.make(*args)
            self.assertEqual(done.returncode, 2, done.stdout)
            self.assertIn("libpcre2-dev", done.stdout)
            self.assertEqual(commands, [], args)

    def install(self):
        """Runs deps.sh in an empty directory. Returns the finished process and the commands that apt-get received."""
        work = os.path.join(self.top, "work")
        os.makedirs(work, exist_ok=True)
        done = subprocess.run([os.path.join(ROOT, "scripts", "deps.sh"), "install"], cwd=work, stdin=subprocess.DEVNULL,
                              env={**os.environ, "PATH": self.path, "LOG": self.log, "TOP": self.top, "DEPS": "", "CXX": "g++"},
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
        return done, self.logged()

    @unittest.skipUnless(shutil.which("dpkg-deb"), "there is no dpkg-deb")
    def test_without_root_packages_are_unpacked(self):
        """A link to a library that the system has leads there; one to what came along stays. sudo would ask."""
        tree = os.path.join(self.top, "tree")
        library = os.path.realpath("/bin/sh")
        lib = os.path.join(tree, "usr", "lib")
        for directory in "DEBIAN", "usr/lib", "usr/include":
            os.makedirs(os.path.join(tree, directory))
        with open(os.path.join(tree, "DEBIAN", "control"), "w") as file:
            file.write("Package: libpcre2-dev\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b>\nDescription: d\n")
        open(os.path.join(tree, "usr", "include", "pcre2.h"), "w").close()
        os.symlink("../../" + library.lstrip("/"), os.path.join(lib, "libsystem.so"))
        os.symlink("../include/pcre2.h", os.path.join(lib, "libown.so"))
        os.symlink("nowhere", os.path.join(lib, "libnowhere.so"))
        subprocess.run(["dpkg-deb", "--build", tree, os.path.join(self.top, "a.deb")], check=True, stdout=subprocess.DEVNULL)
        self.stand_in("id", "echo 1000")
        self.stand_in("sudo", "exit 1")
        fetches = 'echo "$*" >>"$LOG"; [[ $* != *--download-only* ]] || cp "$TOP/a.deb" .deps.new/apt/archives/'
        self.stand_in("apt-get", f"{fetches}; exit 1")
        done, _ = self.install()
        self.assertEqual(done.returncode, 1)
        self.assertIn("could not be fetched", done.stdout)
        self.assertFalse(os.path.exists(os.path.join(self.top, "work", ".deps")))

        self.stand_in("apt-get", fetches)
        done, commands = self.install()
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertEqual([command.split()[-1] for command in commands], ["update", "patchelf"])
        self.assertIn(" install libpcre2-dev patchelf", commands[1])
        unpacked = os.path.join(self.top, "work", ".deps")
        self.assertTrue(os.path.exists(os.path.join(unpacked, "usr", "include", "pcre2.h")))
        links = {name: os.readlink(os.path.join(unpacked, "lib", f"lib{name}.so")) for name in ("system", "own", "nowhere")}
        self.assertEqual(links, {"system": library, "own": "../include/pcre2.h", "nowhere": "nowhere"})
        self.assertEqual(self.install()[1], [])  # they are there

    def test_sudo_is_used_where_it_does_not_ask(self):
        self.stand_in("id", "echo 1000")
        self.stand_in("sudo", '[[ $1 == -n ]] && shift; [[ $1 != env ]] || echo sudo >>"$LOG"; exec "$@"')
        done, commands = self.install()
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertEqual(commands, ["update", "sudo", "install -y --no-install-recommends libpcre2-dev"])

    def test_python_packages(self):
        """scripts/venv.sh installs each list of packages once, and again when it changes."""
        os.mkdir(os.path.join(self.top, "scripts"))

        def write_list(name, text):
            with open(os.path.join(self.top, "scripts", f"{name}.txt"), "w") as file:
                file.write(text)
        write_list("requirements", "numpy")
        write_list("requirements-dev", "openai")
        self.stand_in("pip", 'for word; do [[ $word != scripts/* ]] || echo "$word" >>"$LOG"; done; [[ ! $FAILS ]]')
        self.stand_in("python3", f'mkdir -p .venv/bin; cp {self.top}/pip .venv/bin/python')

        def installed(*args, **env):
            done = subprocess.run([os.path.join(ROOT, "scripts", "venv.sh"), *args], cwd=self.top, text=True,
                                  env={**os.environ, "DEPS": "", "FAILS": "", "PATH": self.path, "LOG": self.log, **env},
                                  stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            return done.returncode, self.logged(), done.stderr
        base, dev = "scripts/requirements.txt", "scripts/requirements-dev.txt"
        self.assertEqual(installed(), (0, [base], ""))
        self.assertEqual(installed(), (0, [], ""))
        self.assertEqual(installed("dev"), (0, [dev], ""))
        self.assertEqual(installed("dev"), (0, [], ""))
        write_list("requirements-dev", "openai >= 2")
        self.assertEqual(installed(), (0, [], ""))
        status, lists, words = installed("dev", FAILS="yes")
        self.assertEqual((status, lists), (0, [dev]))
        self.assertIn("could not be installed (.venv/pip.log says why): tests and checks that need them are skipped", words)
        self.assertEqual(installed("dev", DEPS="no")[:2], (0, []))
        self.assertEqual(installed("dev"), (0, [dev], ""))
        shutil.rmtree(os.path.join(self.top, ".venv"))
        self.assertEqual(installed("dev"), (0, [base, dev], ""))


if __name__ == "__main__":
    unittest.main()
