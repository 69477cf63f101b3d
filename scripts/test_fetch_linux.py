#!/usr/bin/env python3
"""fetch_linux.py on a small Debian package that the test writes; it downloads nothing."""
import contextlib
import hashlib
import io
import json
import lzma
import os
import sys
import tarfile
import tempfile
import unittest
from unittest import mock

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "scripts"))
import fetch_linux  # noqa: E402


def source(i):
    return "".join(f"static int function_{i}_{j}(struct device *dev);\n" for j in range(20))


# 60 unrelated files, and 40 directories with three copies of one text each. The first has é in it.
FILES = {f"drivers/a{i:02d}.c": source(i) for i in range(60)}
FILES["drivers/a00.c"] += "/* é */\n"
FILES.update((f"copies/b{i:02d}/{name}.c", source(100 + i) + f"/* {name} */\n")
             for i in range(40) for name in ("x", "y", "z"))
LEFT_OUT = {
    "generated": {"drivers/gpu/drm/amd/include/asic_reg/dcn/dcn_1_0_offset.h": source(1),
                  "drivers/accel/habanalabs/include/gaudi/asic_reg/blocks.h": source(2),
                  "drivers/gpu/drm/amd/include/navi10_enum.h": source(3),
                  "tools/perf/pmu-events/arch/x86/a/b.json": source(4), "Documentation/a.svg": "<svg/>"},
    "table of numbers": {"drivers/net/table.c": "{\n" + "\t0xdeadbeef, 0x12345678UL,\n" * 50 + "}\n"},
    "not UTF-8": {"drivers/latin1.c": b"caf\xe9"},
    "empty": {"include/empty.h": "", "include/blank.h": "\n\n"},
}


def tar_xz(files, root, links=()):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as tar:
        for path, text in files.items():
            content = text if isinstance(text, bytes) else text.encode()
            entry = tarfile.TarInfo(root + path)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
        for path in links:
            entry = tarfile.TarInfo(root + path)
            entry.type, entry.linkname = tarfile.SYMTYPE, "target"
            tar.addfile(entry)
    return data.getvalue()


def ar(members):
    """A .deb file is an ar archive: members at even offsets behind headers of 60 bytes."""
    data = b"!<arch>\n"
    for name, content in members.items():
        header = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n"
        data += header.encode() + content + b"\n" * (len(content) % 2)
    return data


class FetchLinuxTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.top, self.target = folder.name, os.path.join(folder.name, "text", "linux")
        files = {**FILES, **{path: text for group in LEFT_OUT.values() for path, text in group.items()}}
        tree = tar_xz(files, "linux-source-6.12/", ["drivers/link.c"])
        data = tar_xz({"usr/share/doc/copyright": "GPL-2", "usr/src/linux-source-6.12.tar.xz": tree}, "./")
        self.members = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": data}
        self.package = self.write(ar(self.members))
        self.downloads = []

    def write(self, data, name="package.deb"):
        path = os.path.join(self.top, name)
        with open(path, "wb") as file:
            file.write(data)
        return path

    def run_main(self, *arguments, val=0.2, download=None):
        """(exit status, stdout, stderr) with the test's package instead of Debian's."""
        def copy(name, folder):
            self.downloads.append(name)
            path = os.path.join(folder, "linux-source-6.12_6.12.1-1_all.deb")
            os.link(self.package, path)
            return path

        out, err = io.StringIO(), io.StringIO()
        with mock.patch.multiple(fetch_linux, apt_download=download or copy, VAL=val), \
                mock.patch.object(sys, "argv", ["fetch_linux.py", *arguments]), \
                contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = fetch_linux.main()
            except SystemExit as error:
                status = error.code
        return status, out.getvalue(), err.getvalue()

    def corpus(self, target):
        """{side: {path: text}} and source.json."""
        found = {}
        for side in ("train", "val"):
            found[side] = {}
            for name in sorted(os.listdir(os.path.join(target, side))):
                with lzma.open(os.path.join(target, side, name), "rt", encoding="utf-8", newline="") as lines:
                    records = [json.loads(line) for line in lines]
                found[side].update((record["path"], record["text"]) for record in records)
        with open(os.path.join(target, "source.json"), encoding="utf-8") as file:
            return found, json.load(file)

    def test_corpus(self):
        status, out, err = self.run_main(self.target)
        self.assertEqual(status, 0, err)
        found, said = self.corpus(self.target)
        self.assertEqual({**found["train"], **found["val"]}, FILES)
        self.assertEqual(len(found["train"]) + len(found["val"]), len(FILES))  # a file is on one side
        for path in found["val"]:  # with its near-duplicates
            if path.startswith("copies/"):
                self.assertEqual({os.path.dirname(path) + f"/{name}.c" for name in "xyz"} - set(found["val"]), set())
        # 20% of 100 groups, binomial: standard deviation 4.
        groups = {os.path.dirname(path) if path.startswith("copies/") else path for path in found["val"]}
        self.assertTrue(8 <= len(groups) <= 32, groups)
        self.assertTrue(any(path.startswith("copies/") for path in groups))
        for side in ("train", "val"):
            self.assertEqual(said[side]["files"], len(found[side]))
            self.assertEqual(said[side]["bytes"], sum(len(text.encode()) for text in found[side].values()))
            self.assertIn(f"{said[side]['files']} files, {said[side]['bytes']} bytes", out)
        counts = {reason: {"files": len(files),
                           "bytes": sum(len(t if isinstance(t, bytes) else t.encode()) for t in files.values())}
                  for reason, files in LEFT_OUT.items()}
        self.assertEqual(said["left_out"], counts)
        with open(self.package, "rb") as file:
            self.assertEqual(said["sha256"], hashlib.sha256(file.read()).hexdigest())
        self.assertEqual((said["package"], said["near_duplicate_groups"]), ("linux-source-6.12_6.12.1-1_all.deb", 100))
        self.assertEqual(os.listdir(os.path.dirname(self.target)), ["linux"])  # no package, nothing temporary

    def test_large_groups_are_training_text(self):
        with mock.patch.object(fetch_linux, "MAX_GROUP", 0.04):  # of 20%: 1.4 files
            status, _, err = self.run_main(self.target)
        self.assertEqual(status, 0, err)
        found, _ = self.corpus(self.target)
        self.assertTrue(found["val"])
        self.assertFalse([path for path in found["val"] if path.startswith("copies/")])

    def test_same_package_gives_the_same_bytes(self):
        found = []
        for name in "one", "two":
            target = os.path.join(self.top, name)
            self.assertEqual(self.run_main(target, "--deb", self.package)[0], 0)
            found.append({})
            for directory, _, names in os.walk(target):
                for path in (os.path.join(directory, n) for n in names):
                    with open(path, "rb") as file:
                        found[-1][os.path.relpath(path, target)] = file.read()
        self.assertEqual(found[0], found[1])
        self.assertEqual(self.downloads, [])
        self.assertTrue(os.path.exists(self.package))

    def test_goes_on_where_it_was_interrupted(self):
        with mock.patch.object(fetch_linux, "pack", side_effect=KeyboardInterrupt):
            status, _, err = self.run_main(self.target)
        self.assertEqual((status, "start again to go on" in err), (130, True))
        self.assertFalse(os.path.exists(self.target))
        self.assertEqual(self.run_main(self.target)[0], 0)
        status, out, _ = self.run_main(self.target)
        self.assertEqual((status, "already" in out), (0, True))
        self.assertEqual(self.downloads, ["linux-source-6.12"])  # once

    def test_version(self):
        self.assertEqual(self.run_main(self.target, "--version", "6.12.1-1")[0], 0)
        self.assertEqual(self.downloads, ["linux-source-6.12=6.12.1-1"])

    def refused(self, words, *arguments, **options):
        status, _, err = self.run_main(*arguments, self.target, **options)
        last = err.splitlines()[-1]
        self.assertEqual((status, [word for word in words if word not in last]), (1, []), err)
        self.assertFalse(os.path.exists(self.target))
        self.assertFalse(os.path.exists(self.target + ".tmp"))

    def test_errors_are_one_line(self):
        def no_package(*_):
            raise OSError("apt-get: E: Unable to locate package linux-source-6.12")
        self.refused(["linux-source-6.12 cannot be fetched", "Unable to locate", "apt-get update", "--deb FILE"],
                     download=no_package)
        self.refused(["none.deb"], "--deb", os.path.join(self.top, "none.deb"))
        good = ar(self.members)
        for data, words in ((b"no ar archive", ["does not begin"]), (good[:-100], []), (b"", ["does not begin"]),
                            (ar({"debian-binary": b"2.0\n", "data.tar.zst": b""}), ["no data.tar.xz"]),
                            (good[:-4000] + b"?" * 100 + good[-3900:], [])):
            self.refused(["bad.deb", "not a readable", *words], "--deb", self.write(data, "bad.deb"))
        other = ar({"data.tar.xz": tar_xz({"usr/bin/true": "x"}, "./")})
        self.refused(["holds no usr/src/linux-source-"], "--deb", self.write(other, "bad.deb"))
        self.refused(["cannot be split"], "--deb", self.package, val=0)
        os.makedirs(self.target)
        status, _, err = self.run_main(self.target)
        self.assertEqual((status, "is not a corpus" in err), (1, True))


if __name__ == "__main__":
    unittest.main()
