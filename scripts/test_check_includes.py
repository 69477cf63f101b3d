#!/usr/bin/env python3
"""Every #include of the tree goes in a direction that docs/understand/design.md allows, and check_includes.py finds one that does not."""
import os
import tempfile
import unittest

import check_includes
import check_words

PAGE = """# Design

### Which directory includes which

| path | may include |
|---|---|
| `commands/` | `driver/`, `kernels/`, `runtime/` |
| `train_gpt.cu`, `driver/` | `data/tokenizer.h`, `kernels/` |
| `data/` | `runtime/` |
| `kernels/library/` | `kernels/` |
| `kernels/` | `runtime/device/` |
| `runtime/` | |

## Another table

| `kernels/` | `commands/` |
"""


class IncludesTest(unittest.TestCase):
    def test_the_tree(self):
        if not check_words.in_a_clone():
            self.skipTest("needs git and a clone, which tell the project's files from others")
        names = check_includes.sources()
        self.assertEqual(list(check_includes.faults(check_includes.TOP, names, check_includes.EXCEPTIONS)), [])
        for expected in ("train_gpt.cu", "kernels/cuda/wgmma.cuh", "runtime/context.h", "data/jinja/lexer.cpp"):
            self.assertIn(expected, names)

    def faults(self, files, exceptions=None):
        with tempfile.TemporaryDirectory() as top:
            every = ["runtime/device/tensor.h", "runtime/text.h", "data/tokenizer.h", "data/loader.h", "driver/pass.h",
                     "kernels/library/tensor_ops.h", "kernels/rope.h", "kernels/rope.cpp", "commands/cli.h"]
            for name, text in [("docs/understand/design.md", PAGE), *((name, "") for name in every), *files.items()]:
                os.makedirs(os.path.dirname(os.path.join(top, name)), exist_ok=True)
                with open(os.path.join(top, name), "w", encoding="utf-8") as file:
                    file.write(text)
            return list(check_includes.faults(top, [*every, *files], exceptions or {}))

    def test_allowed_directions(self):
        includes = {"commands/train.cpp": ["commands/cli.h", "driver/pass.h", "kernels/rope.h", "runtime/device/tensor.h"],
                    "train_gpt.cu": ["driver/pass.h", "data/tokenizer.h", "kernels/rope.h"],
                    "driver/plan.cpp": ["driver/pass.h"], "kernels/library/api.h": ["kernels/rope.h"],
                    "kernels/rope.cu": ["kernels/rope.h", "runtime/device/tensor.h"]}
        self.assertEqual(self.faults({name: "".join(f'#include "{header}"\n' for header in headers)
                                      for name, headers in includes.items()}), [])

    def test_other_directions(self):
        for name, header in [("runtime/log.cpp", "kernels/rope.h"),                # upward
                             ("driver/plan.cpp", "commands/cli.h"),
                             ("train_gpt.cu", "data/loader.h"),                    # beside the header that is allowed
                             ("kernels/rope.cu", "runtime/text.h"),
                             ("kernels/rope.cu", "kernels/library/tensor_ops.h"),  # a row of its own
                             ("commands/train.cpp", "kernels/library/tensor_ops.h"),
                             ("kernels/rope.cu", "kernels/rope.cpp"),              # a source file
                             ("serve/main.cpp", "runtime/text.h")]:                # no row
            [fault] = self.faults({name: f'// a comment\n#  include "{header}"  // for something\n'})
            self.assertTrue(fault.startswith(f"{name}:2: includes {header}, which"), fault)
        [fault] = self.faults({"data/bpe.cpp": '#include "text.h"\n'})
        self.assertIn("data/bpe.cpp:1: there is no file text.h", fault)

    def test_exceptions_only_shrink(self):
        upward = {"runtime/log.cpp": '#include "kernels/rope.h"\n'}
        needed = {"runtime/log.cpp": {"kernels/rope.h"}}
        self.assertEqual(self.faults(upward, needed), [])
        [fault] = self.faults({}, needed)
        self.assertIn("remove the exception", fault)


if __name__ == "__main__":
    unittest.main()
