// Argument checks of decode_attention, advance and kv_append for both backends: shapes and dtypes, not values.
#pragma once

#include <tuple>

#include "kernels/check.h"
#include "kernels/generation/decode_batch.h"

struct DecodeSizes {
    int64_t N, NH, NKV, HS, slots;
    KvPages pages;
    int64_t rope_pairs;                                           // R/2; 0 without RoPE
    int64_t capacity() const { return pages.columns * KV_PAGE; }  // the longest sequence
};

// Returns the number of rotated channel pairs, R/2; 0 without a table.
inline int64_t check_angles(const char* op, const Tensor& angles, const Tensor& table, int64_t N, int64_t HS) {
    if (!table) return 0;
    require(table.rank == 3, op, ": table is ", shape_string(table), ", expected [T, R/2, 2]");
    check_tensor(op, "table", table, DType::F32, {table.shape[0], table.shape[1], 2});
    check_contiguous(op, "table", table);
    check_tensor(op, "angles", angles, DType::I32, {N});
    require(2 * table.shape[1] <= HS, op, ": the table rotates ", 2 * table.shape[1], " channels, the head has ", HS);
    return table.shape[1];
}

// All but scratch.
inline DecodeSizes check_decode_attention(const char* op, DType dtype, const Tensor& out, const Tensor& qkv,
                                          const Tensor& k_cache, const Tensor& v_cache, const DecodeBatch& batch,
                                          int64_t window, float scale) {
    require(k_cache && k_cache.rank == 4, op, ": k_cache is ", shape_string(k_cache),
            ", expected [pages, KV_PAGE, NKV, HS]");
    DecodeSizes z{};
    const int64_t pages = k_cache.shape[0];
    z.NKV = k_cache.shape[2];
    z.HS = k_cache.shape[3];
    check_tensor(op, "k_cache", k_cache, dtype, {pages, KV_PAGE, z.NKV, z.HS});
    check_tensor(op, "v_cache", v_cache, dtype, {pages, KV_PAGE, z.NKV, z.HS});
    check_contiguous(op, "k_cache", k_cache);
    check_contiguous(op, "v_cache", v_cache);
    require(pages > 0 && z.NKV > 0 && z.HS > 0, op, ": k_cache is ", shape_string(k_cache),
            ", expected [pages, KV_PAGE, NKV, HS]");
    z.pages = check_pages(op, batch.pages, pages * KV_PAGE);
    z.slots = batch.pages.shape[0];
    check_matrix(op, "qkv", qkv, dtype);
    z.N = qkv.shape[0];
    z.NH = qkv.shape[1] / z.HS - 2 * z.NKV;
    require(qkv.shape[1] % z.HS == 0 && z.NH > 0 && z.NH % z.NKV == 0, op, ": qkv has rows of ", qkv.shape[1],
            ", expected (NH + 2*NKV)*HS with ", z.NKV, " KV heads of ", z.HS, " that divide NH");
    check_matrix(op, "out", out, z.N, z.NH * z.HS, Given::Required, dtype);
    check_tensor(op, "slots", batch.slots, DType::I32, {z.N});
    check_tensor(op, "positions", batch.positions, DType::I32, {z.N});
    z.rope_pairs = check_angles(op, batch.angles, batch.table, z.N, z.HS);
    require(window >= 0, op, ": window is ", window, "; it must be 0 (none) or positive");
    require(scale > 0, op, ": scale is ", scale, "; it must be positive");
    return z;
}

struct KvAppendSizes {
    int64_t N, rows, NKV, HS;
    int64_t rope_pairs;  // R/2; 0 without RoPE
};

inline KvAppendSizes check_kv_append(const char* op, DType dtype, const Tensor& k_cache, const Tensor& v_cache,
                                     const Tensor& qkv, const Tensor& rows, const Tensor& angles, const Tensor& table,
                                     int64_t NH) {
    require(k_cache && k_cache.rank == 3, op, ": k_cache is ", shape_string(k_cache), ", expected [rows, NKV, HS]");
    check_matrix(op, "qkv", qkv, dtype);
    KvAppendSizes z{};
    z.N = qkv.shape[0];
    z.rows = k_cache.shape[0];
    z.NKV = k_cache.shape[1];
    z.HS = k_cache.shape[2];
    check_tensor(op, "k_cache", k_cache, dtype, {z.rows, z.NKV, z.HS});
    check_tensor(op, "v_cache", v_cache, dtype, {z.rows, z.NKV, z.HS});
    check_matrix(op, "qkv", qkv, z.N, (NH + 2 * z.NKV) * z.HS, Given::Required, dtype);
    check_contiguous(op, "k_cache", k_cache);
    check_contiguous(op, "v_cache", v_cache);
    check_tensor(op, "rows", rows, DType::I32, {z.N});
    z.rope_pairs = check_angles(op, angles, table, z.N, z.HS);
    return z;
}

struct KvCopySizes {
    int64_t N, rows_to, rows_from, row;  // row: elements
};

inline KvCopySizes check_kv_copy(const char* op, DType dtype, const Tensor& k_to, const Tensor& v_to,
                                 const Tensor& to_rows, const Tensor& k_from, const Tensor& v_from,
                                 const Tensor& from_rows) {
    require(k_to && k_to.rank == 3, op, ": k_to is ", shape_string(k_to), ", expected [rows, NKV, HS]");
    require(k_from && k_from.rank == 3, op, ": k_from is ", shape_string(k_from), ", expected [rows, NKV, HS]");
    const int64_t NKV = k_to.shape[1], HS = k_to.shape[2];
    for (const auto& [name, t, rows] : {std::tuple{"k_to", k_to, k_to.shape[0]},
                                        {"v_to", v_to, k_to.shape[0]},
                                        {"k_from", k_from, k_from.shape[0]},
                                        {"v_from", v_from, k_from.shape[0]}}) {
        check_tensor(op, name, t, dtype, {rows, NKV, HS});
        check_contiguous(op, name, t);
    }
    require(to_rows.rank == 1, op, ": to_rows is ", shape_string(to_rows), ", expected [N]");
    const int64_t N = to_rows.shape[0];
    check_tensor(op, "to_rows", to_rows, DType::I32, {N});
    check_tensor(op, "from_rows", from_rows, DType::I32, {N});
    return {N, k_to.shape[0], k_from.shape[0], NKV * HS};
}

inline void check_advance(const char* op, const Tensor& positions, const Tensor& steps, const Tensor& ids,
                          const Tensor& host_tokens, const Tensor& buffer_index) {
    require(positions && positions.rank == 1, op, ": positions is ", shape_string(positions), ", expected [N]");
    check_tensor(op, "positions", positions, DType::I32, {positions.shape[0]});
    check_tensor(op, "steps", steps, DType::I64, {positions.shape[0]});
    check_tensor(op, "ids", ids, DType::I32, {positions.shape[0]});
    check_tensor(op, "buffer_index", buffer_index, DType::I32, {1});
    require(host_tokens && host_tokens.rank == 2 && host_tokens.shape[1] >= positions.shape[0], op, ": host_tokens is ",
            shape_string(host_tokens), ", expected [2, ", positions.shape[0], "] or wider");
    check_tensor(op, "host_tokens", host_tokens, DType::I32, {2, host_tokens.shape[1]});
}
