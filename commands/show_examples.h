// `info --show`: training examples as text, with the loss tokens marked.
#pragma once

#include "data/token_files.h"

// Prints the first `count` examples of the training split, of preference pairs both responses; of the validation split
// if that is all there is. On a terminal loss tokens are coloured, elsewhere they are in brackets. json: one object a
// line, {"tokens": n, "loss_tokens": m, "parts": [{"loss": false, "text": "..."}, ...]}, of pairs with "pair": 1 and
// "response": "chosen" or "rejected" in front. Throws Error for data without examples or without a tokenizer.
void show_examples(const DataDirectory& data, int64_t count, bool json);
