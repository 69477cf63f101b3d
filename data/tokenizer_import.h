// Converts tokenizers of other programs to Hugging Face's tokenizer.json.
//
// llama2.c's tokenizer.bin (tok512.bin …): int32 length of the longest token, then for each token, in the order of ids,
//   float32 score, int32 length and bytes, spaces written as they are. A SentencePiece BPE vocabulary: a pair of tokens
//   merges where their text is a token, the best score first. The merges written are all such pairs in the order of
//   scores, for one token those with the longer left part first (a vocabulary has no order of its own there).
// llm.c's gpt2_tokenizer.bin: int32[256] header (20240328, version 1 or 2, number of tokens, version 2: id of
//   end-of-text, else 50256), then for each token a byte of length and its bytes. Ids of tokens of more than one byte
//   are in the order of the merges that made them, so that each merge can be found again: the last step of merging a
//   token's bytes by the merges before it.
#pragma once

#include <string>

// The text of a tokenizer.json. path: one of the above, or a tokenizer.json, which is returned unchanged.
// Throws Error with the name of the file: none of these formats, truncated, damaged, a token that occurs twice or that
// no merge of other tokens produces.
std::string import_tokenizer(const std::string& path);
