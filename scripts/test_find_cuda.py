#!/usr/bin/env python3
"""scripts/find_cuda.sh on toolkits of empty files with an nvcc that only prints its version and architectures."""
import os
import stat
import subprocess
import tempfile
import unittest

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "find_cuda.sh")
NVCC = r"""#!/bin/bash
case $1 in
    --version) echo "Cuda compilation tools, release %s, V0" ;;
    --list-gpu-code) printf 'sm_%%s\n' 75 80 86 89 90 100 ;;
    --dryrun) echo "#$ TOP=$(dirname "$0")/.." >&2 ;;
esac
"""


class FindCudaTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="train_gpt_cuda_")
        self.addCleanup(folder.cleanup)
        self.top = os.path.realpath(folder.name)  # also the project's folder, so that no real .venv is seen
        self.script("path/nvidia-smi", "#!/bin/sh\nexit 9\n")

    def script(self, name, text):
        path = self.file(name, text)
        os.chmod(path, os.stat(path).st_mode | stat.S_IXUSR)
        return path

    def file(self, name, text=""):
        path = os.path.join(self.top, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(text)
        return path

    def toolkit(self, name, version="13.0", lib="lib64", cublas=True):
        self.script(f"{name}/bin/nvcc", NVCC % version)
        major = version.split(".")[0]
        self.file(f"{name}/include/cuda_runtime.h")
        self.file(f"{name}/{lib}/libcudart.so.{major}")
        if cublas:
            self.cublas(name, major, lib)
        return os.path.join(self.top, name)

    def cublas(self, name, major="13", lib="lib"):
        self.file(f"{name}/include/cublasLt.h")
        self.file(f"{name}/{lib}/libcublasLt.so.{major}")
        return os.path.join(self.top, name)

    def run_script(self, *args, **variables):
        env = {"PATH": f"{self.top}/path:/usr/bin:/bin", **variables}
        return subprocess.run([SCRIPT, *args], cwd=self.top, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def found(self, *args, **variables):
        done = self.run_script(*args, **variables)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        found = {}
        for line in done.stdout.splitlines():
            key, value = line.split("=", 1)
            found.setdefault(key, []).append(value)
        return found

    def refused(self, **variables):
        done = self.run_script(**variables)
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertRegex(done.stderr, r"\ACUDA build: [^\n]+\n\Z")
        return done.stderr

    def test_finds_toolkit_in_any_directory(self):
        home = self.toolkit("opt/kit")
        expected = {"nvcc": [f"{home}/bin/nvcc"], "version": ["13.0"], "arch": ["90a"], "include": [f"{home}/include"],
                    "lib": [f"{home}/lib64/libcudart.so.13", f"{home}/lib64/libcublasLt.so.13"]}
        for variables in ({"NVCC": f"{home}/bin/nvcc"}, {"CUDA_HOME": home}, {"CUDA_PATH": home}, {"PATH": f"{home}/bin:/usr/bin:/bin"}):
            found = self.found(**variables)
            found.pop("nccl")
            found.pop("nccl_include")
            self.assertEqual(found, expected)
        self.assertEqual(self.found("nvcc", CUDA_HOME=home), {"nvcc": [f"{home}/bin/nvcc"]})

    def test_explicit_setting_takes_precedence(self):
        first, second = self.toolkit("first"), self.toolkit("second", "12.6")
        self.assertEqual(self.found(NVCC=f"{first}/bin/nvcc", CUDA_HOME=second)["version"], ["13.0"])
        self.assertEqual(self.found(CUDA_HOME=second, PATH=f"{first}/bin:/usr/bin:/bin")["version"], ["12.6"])

    def test_follows_link_to_nvcc(self):
        home = self.toolkit("opt/kit")
        os.symlink(f"{home}/bin/nvcc", f"{self.top}/path/nvcc")
        found = self.found()
        self.assertEqual((found["nvcc"], found["include"]), ([f"{home}/bin/nvcc"], [f"{home}/include"]))

    def test_wheels(self):
        cu13 = self.toolkit(".venv/lib/python3.11/site-packages/nvidia/cu13", lib="lib")
        libs = [f"{cu13}/lib/libcudart.so.13", f"{cu13}/lib/libcublasLt.so.13"]
        self.assertEqual(self.found(NVCC=f"{cu13}/bin/nvcc")["lib"], libs)
        # An nvcc elsewhere that has no libraries beside it, as the distribution's may.
        bare = self.script("bare/bin/nvcc", NVCC % "13.0")
        self.assertEqual(self.found(NVCC=bare)["lib"], libs)
        os.rename(f"{self.top}/.venv", f"{self.top}/env")
        self.assertEqual(self.found(NVCC=bare, VIRTUAL_ENV=f"{self.top}/env")["lib"], [lib.replace("/.venv/", "/env/") for lib in libs])

    def test_uses_cublas_wheel_of_the_same_version(self):
        home = self.toolkit("kit", "12.8", cublas=False)
        self.assertIn("no cuBLAS for CUDA 12", self.refused(CUDA_HOME=home))
        self.cublas(".venv/lib/python3.11/site-packages/nvidia/cu13", "13")
        self.assertIn("no cuBLAS for CUDA 12", self.refused(CUDA_HOME=home))
        wheel = self.cublas(".venv/lib/python3.11/site-packages/nvidia/cublas", "12")
        found = self.found(CUDA_HOME=home)
        self.assertEqual(found["include"], [f"{home}/include", f"{wheel}/include"])
        self.assertEqual(found["lib"][1], f"{wheel}/lib/libcublasLt.so.12")

    def test_libraries_in_separate_directories(self):
        home, own = self.toolkit("kit"), self.cublas("own")
        self.file("own/include/nccl.h")
        self.file("own/lib/libnccl.so.2")
        found = self.found(CUDA_HOME=home, CUBLAS_HOME=own, NCCL_HOME=own)
        self.assertEqual(found["lib"][1], f"{own}/lib/libcublasLt.so.13")
        self.assertEqual((found["nccl"], found["nccl_include"]), ([f"{own}/lib/libnccl.so.2"], [f"{own}/include"]))
        self.assertIn("CUBLAS_HOME=/nowhere", self.refused(CUDA_HOME=home, CUBLAS_HOME="/nowhere"))
        found = self.found(CUDA_HOME=home, NCCL_HOME="/nowhere")
        self.assertEqual((found["nccl"], found["nccl_include"]), ([""], [""]))

    def test_rejects_incomplete_toolkits(self):
        self.assertIn("/nowhere/nvcc", self.refused(NVCC="/nowhere/nvcc"))
        self.assertIn("/nowhere", self.refused(CUDA_HOME="/nowhere"))
        self.assertIn("12.3, but 12.4 or newer", self.refused(CUDA_HOME=self.toolkit("old", "12.3")))
        self.found(CUDA_HOME=self.toolkit("oldest", "12.4"))
        self.assertIn("names no release", self.refused(NVCC=self.script("other", "#!/bin/sh\necho other 13.0\n")))
        os.remove(f"{self.toolkit('bare')}/include/cuda_runtime.h")
        self.assertIn("no CUDA runtime", self.refused(CUDA_HOME=f"{self.top}/bare"))

    def test_architectures(self):
        home = self.toolkit("kit")
        self.assertEqual(self.found(CUDA_HOME=home, ARCH="80 90a")["arch"], ["80", "90a"])
        self.assertEqual(self.found(CUDA_HOME=home, ARCH="all")["arch"], ["80", "86", "89", "90a", "100"])
        self.assertIn("sm_75 is not supported", self.refused(CUDA_HOME=home, ARCH="75"))
        self.assertIn("does not know sm_120", self.refused(CUDA_HOME=home, ARCH="120"))
        self.assertIn("no architecture", self.refused(CUDA_HOME=home, ARCH="hopper"))

    def test_architecture_of_local_gpus(self):
        home = self.toolkit("kit")
        for capabilities, archs in (("9.0\n9.0\n", ["90a"]), ("9.0\n8.0\n", ["80", "90a"]), ("10.0\n", ["100"]), ("[N/A]\n", ["90a"])):
            self.script("path/nvidia-smi", f"#!/bin/sh\nprintf '{capabilities}'\n")
            self.assertEqual(self.found(CUDA_HOME=home)["arch"], archs)
        self.script("path/nvidia-smi", "#!/bin/sh\necho 7.0\n")
        self.assertIn("sm_70 is not supported", self.refused(CUDA_HOME=home))


if __name__ == "__main__":
    unittest.main()
