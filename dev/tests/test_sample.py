#!/usr/bin/env python3
"""`sample`: seeds, stops, filters, batches, models without text for some ids."""
import json
import os
import shutil
import unittest

from harness import BaseRunTest, checkpoints, run


class SampleTest(BaseRunTest):
    def test_sample(self):
        args = ["sample", "--model", self.base, "--prompt", "The ", "--max-tokens", 20, "--ignore-eos",
                "--num-samples", 2]
        first, again, other = run(*args), run(*args), run(*args, "--seed", 7)
        self.assertEqual(first.returncode, 0, first.stderr)
        self.assertEqual(first.stdout, again.stdout)
        self.assertNotEqual(first.stdout, other.stdout)
        texts = first.stdout.split("\n---\n")
        self.assertEqual(len(texts), 2)
        self.assertNotEqual(texts[0], texts[1].rstrip("\n"))
        self.assertTrue(all(text.startswith("The ") for text in texts))
        greedy = json.loads(run(*args[:-2], "--temperature", 0, "--json").stdout)["samples"][0]
        self.assertEqual(len(greedy["tokens"]), 20)
        self.assertEqual(greedy["finish"], "length")
        stop = greedy["text"][5:7]
        stopped = json.loads(run(*args[:-2], "--temperature", 0, "--json", "--stop", stop).stdout)["samples"][0]
        self.assertEqual(stopped["text"], greedy["text"][:greedy["text"].index(stop)])
        self.assertEqual(stopped["finish"], "stop")
        # Past the position table it slides.
        beyond = run("sample", "--model", self.base, "--max-tokens", 80, "--ignore-eos")
        self.assertEqual(beyond.returncode, 0, beyond.stderr)

    def test_prompt_longer_than_the_context(self):
        """An error that names both lengths; a note where sliding was asked for, and the model reads what it says."""
        args = ["sample", "--model", self.base, "--max-tokens", 4, "--ignore-eos", "--temperature", 0, "--json"]
        once, twice = (json.loads(run(*args, "--prompt", "\n" * n).stdout)["statistics"]["prompt_tokens"] for n in (10, 20))
        self.assertEqual(twice, 2 * once)
        long, read = "\n" * 200, 20 * once
        for more in [], ["--context-full", "stop"], ["--context", 20]:
            limit = 20 if "--context" in more else 64
            self.refused(1, [f"a prompt of {read} tokens exceeds the context of {limit}; shorten the prompt"],
                         *args, "--prompt", long, *more)
        slid = run(*args, "--prompt", long, "--context", 20, "--context-full", "slide")
        self.assertEqual(slid.returncode, 0, slid.stderr)
        self.assertIn(f"sample: prompt 1: a prompt of {read} tokens exceeds the context of 20: the model reads the last 10 "
                      "of them", slid.stderr)
        self.assertEqual(json.loads(slid.stdout)["statistics"]["prompt_tokens"], 10)

    def test_sample_a_batch(self):
        """Prompts of a file run as a batch and give the same completions as each alone."""
        prompts = ["The ", "It was a", "x", "And then he"]
        path = os.path.join(self.top, "prompts.txt")
        with open(path, "w") as file:
            file.write("\n---\n".join(prompts) + "\n")
        args = ["sample", "--model", self.base, "--max-tokens", 12, "--ignore-eos", "--temperature", 0]
        together = run(*args, "--prompt-file", path).stdout
        alone = "---\n".join(run(*args, "--prompt", prompt).stdout for prompt in prompts)
        self.assertEqual(together, alone)
        # A file of one prompt is that prompt: without the newline at its end and a byte order mark.
        with open(path, "wb") as file:
            file.write(b"\xef\xbb\xbfThe \r\n")
        one = json.loads(run(*args, "--prompt-file", path, "--json").stdout)
        self.assertEqual((one["samples"][0]["prompt"], one["statistics"]["completion_tokens"]), ("The ", 12))
        self.assertEqual(one["samples"], json.loads(run(*args, "--prompt", "The ", "--json").stdout)["samples"])
        with open(path, "w") as file:
            file.write("\n---\n".join(prompts) + "\n")
        two_at_a_time = run(*args, "--prompt-file", path, "--batch-size", 2)
        self.assertEqual(two_at_a_time.stdout, alone)
        self.assertIn("tokens/s", two_at_a_time.stderr)

    def test_sampling_that_the_model_declares(self):
        """generation_config.json has the defaults of the options; a line says so. A typed option wins."""
        model = os.path.join(self.top, "declares")
        shutil.copytree(os.path.join(self.base, checkpoints(self.base)[-1]), model)
        args = ["sample", "--model", model, "--prompt", "The ", "--max-tokens", 16, "--ignore-eos"]
        free, first = run(*args), run(*args, "--top-k", 1)
        with open(os.path.join(model, "generation_config.json"), "w") as file:
            json.dump({"top_k": 1, "num_beams": 4}, file)
        declared, typed = run(*args), run(*args, "--top-k=0")
        self.assertEqual((declared.stdout, typed.stdout), (first.stdout, free.stdout))
        self.assertIn("generation_config.json: sets --top-k 1; options on the command line win; not supported and "
                      "ignored: num_beams", declared.stderr)
        self.assertNotIn("sets", typed.stderr)
        with open(os.path.join(model, "generation_config.json"), "w") as file:
            json.dump({"top_p": 2}, file)
        self.refused(1, ["generation_config.json: key 'top_p' is 2, expected a number from 1e-06 to 1; correct it, or "
                         "give --top-p"], *args)

    def test_sample_filters(self):
        args = ["sample", "--model", self.base, "--prompt", "The ", "--max-tokens", 16, "--ignore-eos"]
        greedy = run(*args, "--temperature", 0).stdout
        for one in (["--top-k", 1], ["--top-p", "0.000001"], ["--min-p", 1]):
            self.assertEqual(run(*args, *one).stdout, greedy, one)
        self.assertNotEqual(run(*args, "--temperature", 0, "--repeat-penalty", 50).stdout, greedy)
        sample = json.loads(run(*args, "--top-p", "0.9", "--logprobs", "--json").stdout)["samples"][0]
        self.assertEqual(len(sample["logprobs"]), 16)
        self.assertTrue(all(p < 0 for p in sample["logprobs"]))
        lines = run(*args, "--logprobs", "--temperature", 0).stdout.splitlines()
        self.assertEqual(len(lines[-1].split(" ", 2)), 3)
        # A token that the completion has is not sampled again; the prompt's tokens are.
        for penalty in "--presence-penalty", "--frequency-penalty":
            tokens = json.loads(run(*args, penalty, 900, "--json").stdout)["samples"][0]["tokens"]
            self.assertEqual(len(set(tokens)), 16, penalty)
        top = json.loads(run(*args, "--temperature", 0, "--top-logprobs", 3, "--json").stdout)["samples"][0]
        for token, logprob, most_likely in zip(top["tokens"], top["logprobs"], top["top_logprobs"], strict=True):
            self.assertEqual([set(t) for t in most_likely], [{"token", "logprob", "text"}] * 3)
            self.assertEqual(most_likely[0]["token"], token)
            self.assertAlmostEqual(most_likely[0]["logprob"], logprob, delta=1e-5)
            self.assertGreaterEqual(most_likely[1]["logprob"], most_likely[2]["logprob"])
        stopped = json.loads(run(*args, "--context", 8, "--context-full", "stop", "--json").stdout)["samples"][0]
        self.assertEqual((stopped["finish"], len(stopped["tokens"])), ("context", 5))
        slid = json.loads(run(*args, "--context", 8, "--keep-tokens", 2, "--json").stdout)["samples"][0]
        self.assertEqual((slid["finish"], len(slid["tokens"])), ("length", 16))

    def test_random_weights(self):
        done = run("sample", "--model", "gpt2-tiny", "--random-weights", "--max-tokens", 4)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(done.stdout.split()), 4)

    def test_vocabulary_larger_than_the_tokenizer_s(self):
        # An untrained model mostly samples ids that the tokenizer does not have: they have no text.
        other = self.train("padded", "--steps", 2, "--vocab-size", 8000, "--sample-every", 1)
        done = run("sample", "--model", other, "--max-tokens", 20, "--ignore-eos", "--temperature", 10)
        self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    unittest.main()
