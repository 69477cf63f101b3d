/* C interface of libtrain_gpt_data.so: text to tokens, for data/make_data.py.
 *
 * Functions that can fail return 0 on success. tgd_error() describes the last failure of the calling thread. An encoder
 * serves one thread at a time. */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tgd_encoder tgd_encoder;

/* What a document is. Of a text every token is a loss token, and end-of-text follows a text but not a TGD_TEXT_PART,
 * which the next document continues. A conversation is JSON (data/conversation_json.h). A preference pair is two of
 * them, the chosen one and then the rejected one. */
enum { TGD_TEXT_PART, TGD_TEXT, TGD_CONVERSATION, TGD_REJECTED_CONVERSATION };

/* Bits of a token's flags, as in mask files (data/token_files.h). */
enum { TGD_LOSS = 1, TGD_EXAMPLE_START = 2, TGD_REJECTED = 4 };

/* model_directory: its chat template writes conversations. If it is null or has no template, a conversation must be a
 * prompt and its response. unix_time: the date that a template may write. Returns null on failure. */
tgd_encoder* tgd_open(const char* tokenizer_json, const char* model_directory, int64_t unix_time);
void tgd_close(tgd_encoder* encoder);
const char* tgd_error(void);

int64_t tgd_vocab_size(const tgd_encoder* encoder);  /* the largest id + 1 */
int32_t tgd_end_of_text(const tgd_encoder* encoder); /* -1: the tokenizer has none */
int tgd_has_chat_template(const tgd_encoder* encoder);
int32_t tgd_end_of_turn(const tgd_encoder* encoder); /* the template's special token after an assistant turn, or -1 */

/* Encodes `documents` documents: kinds and sizes (in bytes), one of each document; data: the documents one after the
 * other. Sets the number of tokens of each document, and how many bytes of its text the vocabulary lacks. On failure
 * *failed is the document's number. */
int tgd_encode(tgd_encoder* encoder, const char* data, const int64_t* sizes, const uint8_t* kinds, int64_t documents,
               int64_t* tokens, int64_t* lost, int64_t* failed);

/* Copies what the last tgd_encode() made: ids of `width` bytes (2 or 4) and, if flags is not null, a byte of flags per
 * token. */
int tgd_copy(const tgd_encoder* encoder, int width, void* ids, uint8_t* flags);

#ifdef __cplusplus
}
#endif
