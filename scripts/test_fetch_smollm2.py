#!/usr/bin/env python3
"""fetch_smollm2.py: a model that an earlier version has fetched is used, and its old path still leads to it."""
import contextlib
import io
import os
import sys
import tempfile
import unittest
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import fetch_smollm2  # noqa: E402


class FetchTest(unittest.TestCase):
    def test_the_old_path_leads_to_the_new_one(self):
        with tempfile.TemporaryDirectory() as top:
            old, new = os.path.join(top, "models", "M"), os.path.join(top, "checkpoints", "M")
            os.makedirs(old)
            with open(os.path.join(old, "model.safetensors"), "w") as file:
                file.write("weights")
            said = io.StringIO()
            with mock.patch.multiple(fetch_smollm2, OLD=old, TARGET=new), contextlib.redirect_stdout(said):
                fetch_smollm2.fetch(new)
                fetch_smollm2.fetch(new)  # the link stays
            self.assertEqual(said.getvalue().count("is there already"), 2)
            self.assertFalse(os.path.islink(new))
            for path in (old, new):
                with open(os.path.join(path, "model.safetensors")) as file:
                    self.assertEqual(file.read(), "weights")


if __name__ == "__main__":
    unittest.main()
