// Converts tokenizers of other programs to Hugging Face's tokenizer.json.
//
// llama2.c's tokenizer.bin (tok512.bin …): int32 length of the longest token, then for each token, in the order of ids,
//   float32 score, int32 length and bytes, with plain spaces. It holds a SentencePiece BPE vocabulary: two tokens merge
//   if their concatenation is a token, the best score first. The converted file lists all such pairs by score. The
//   vocabulary does not order the pairs that form the same token: those with the longer left part come first.
// llm.c's gpt2_tokenizer.bin: int32[256] header (20240328, version 1 or 2, number of tokens, version 2: id of
//   end-of-text, else 50256), then for each token its length (one byte) and its bytes. Ids of tokens of more than one
//   byte are in the order of the merges that form them. This recovers each merge: the earlier merges reduce the token's
//   bytes to two tokens, which are its pair.
#pragma once

#include <string>

// The text of a tokenizer.json. path: one of the above, or a tokenizer.json, which is returned unchanged.
// Throws Error with the name of the file if it has none of these formats, is truncated or damaged, holds a token twice
// or a token that no merge of other tokens produces.
std::string import_tokenizer(const std::string& path);
