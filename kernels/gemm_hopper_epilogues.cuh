// The epilogues of gemm_hopper.cuh. A warp owns 16 rows of each 64 of a tile. It rounds its sums in panels of 16 rows
// and 64 or 32 columns, and TMA stores them, or loads what a gradient needs.
//
// Stores have the L2 policy evict_first: out is larger than L2, which should keep a and b.
#pragma once

#include "kernels/cuda/mlp_activation.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/gemm_hopper.cuh"

namespace hopper_gemm_kernel {

// A panel of 16 rows in shared memory, as TMA reads and writes it.
template <int COLUMNS_>
struct Panel {
    static constexpr int COLUMNS = COLUMNS_, TILES = COLUMNS / 8, BYTES = 16 * COLUMNS * 2;
    alignas(SWIZZLE_ALIGNMENT) unsigned char data[BYTES];

    // Where a lane reads or writes matrix k of ldmatrix and stmatrix: 16 columns.
    __device__ __forceinline__ uint32_t address(int k) const {
        const int row = lane_id() % 16, vector = 2 * k + lane_id() / 16;
        const int swizzle = COLUMNS == PANEL_COLUMNS ? row % 8 : row / 2 % 4;
        return shared_address(data) + row * COLUMNS * 2 + (vector ^ swizzle) * 16;
    }
    __device__ __forceinline__ void read(uint32_t (&x)[TILES / 2][4]) const {
#pragma unroll
        for (int k = 0; k < TILES / 2; k++) ldmatrix_x4(x[k], address(k));
    }
    __device__ __forceinline__ void write(const uint32_t (&x)[TILES / 2][4]) {
#pragma unroll
        for (int k = 0; k < TILES / 2; k++) stmatrix_x4(address(k), x[k]);
    }
};

// A lane holds a panel as pairs x[k][i] of neighbouring columns: of accumulator block n = 2k + i / 2 (8 columns),
// elements e and e + 1 with e = 2·(i % 2). Calls f(k, i, n, e).
template <int TILES, typename F>
__device__ __forceinline__ void for_each_pair(F&& f) {
#pragma unroll
    for (int k = 0; k < TILES / 2; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) f(k, i, 2 * k + i / 2, i % 2 * 2);
}
__device__ __forceinline__ float2 unpack(uint32_t two) {
    return {__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u)};
}

__device__ __forceinline__ void store_panel(const CUtensorMap& map, int column, int row, const void* panel) {
    tma_store_evict_first(&map, column, 0, row, panel);
}

// A warp writes panels in turns of two: while TMA stores those of one group, it fills the other's. Before it writes it
// waits until the stores of two groups ago have read theirs.
__device__ __forceinline__ void wait_for_earlier_stores() {
    if (lane_id() == 0) tma_store_wait<1>();
    __syncwarp();
}
// Stores what the warp has written: store() issues the stores of a group.
template <typename Store>
__device__ __forceinline__ void store_group(Store store) {
    fence_async_proxy();
    __syncwarp();
    if (lane_id() > 0) return;
    store();
    tma_store_commit();
}

// The bias of a lane's columns in a panel that begins at `column` of a matrix of N columns; zeros without a bias.
template <int TILES>
__device__ __forceinline__ void load_bias(float2 (&bias)[TILES], const bf16* from, int column, int N) {
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        const int at = column + n * 8 + lane_id() % 4 * 2;
        bias[n] = unpack(from && at < N ? *reinterpret_cast<const uint32_t*>(from + at) : 0);
    }
}

// alpha·c + bias of TILES blocks of 8 columns, from block `first` on, rounded to a panel's pairs.
template <int TILES>
__device__ __forceinline__ void round_biased(uint32_t (&rounded)[TILES / 2][4], const float (&c)[NT][4], int first,
                                             float alpha, const float2 (&bias)[TILES]) {
    for_each_pair<TILES>([&](int k, int i, int n, int e) {
        rounded[k][i] =
            pack_two<bf16>(fmaf(alpha, c[first + n][e], bias[n].x), fmaf(alpha, c[first + n][e + 1], bias[n].y));
    });
}

// Rounded to bf16 as it is stored.
template <typename F>
__device__ __forceinline__ uint32_t map_pair(uint32_t x, F f) {
    const float2 v = unpack(x);
    return pack_two<bf16>(f(v.x), f(v.y));
}

// out = c + bias, or, with an activation function, aux = c + bias and out = F(aux). aux may be null.
template <typename F>
struct StoreActivation : Position {
    static constexpr bool GATED = false, ACTIVATES = !std::is_void_v<F>, FREES_SUMS = ACTIVATES;
    using Panel = hopper_gemm_kernel::Panel<PANEL_COLUMNS>;
    struct Shared {
        Panel out[WARPS][2], aux[ACTIVATES ? WARPS : 1][ACTIVATES ? 2 : 1];
        __device__ void init() {}
    };
    Shared& shared;
    __device__ __forceinline__ StoreActivation(const Position& at, Shared& s) : Position(at), shared(s) {}
    __device__ __forceinline__ void prepare() const {}
    __device__ __forceinline__ void run(const float (&c)[MB][NT][4]) const {
        constexpr int TILES = Panel::TILES;
#pragma unroll
        for (int q = 0; q < NT / TILES; q++) {
            const int first = column + q * PANEL_COLUMNS;
            float2 bias[TILES];
            load_bias(bias, p.bias, first, p.N);
#pragma unroll
            for (int m = 0; m < MB; m++) {
                Panel& out = shared.out[warp][m % 2];
                wait_for_earlier_stores();
                uint32_t x[TILES / 2][4];
                round_biased(x, c[m], q * TILES, p.alpha, bias);
                if constexpr (ACTIVATES) {
                    shared.aux[warp][m % 2].write(x);
                    for_each_pair<TILES>([&](int k, int i, int, int) { x[k][i] = map_pair(x[k][i], F{}); });
                }
                out.write(x);
                store_group([&] {
                    if constexpr (ACTIVATES)
                        if (p.stores_aux) store_panel(p.aux[0], first, row(m), shared.aux[warp][m % 2].data);
                    if (!ACTIVATES || p.stores_out) store_panel(p.out[0], first, row(m), out.data);
                });
            }
        }
    }
};

// out = alpha·c in fp32, straight from registers: a store of a warp writes whole sectors of 32 bytes in 8 rows.
struct StoreFloats : Position {
    static constexpr bool GATED = false, FREES_SUMS = false;
    using Panel = hopper_gemm_kernel::Panel<PANEL_COLUMNS>;  // of maps that are not used
    struct Shared {
        __device__ void init() {}
    };
    __device__ __forceinline__ StoreFloats(const Position& at, Shared&) : Position(at) {}
    __device__ __forceinline__ void prepare() const {}
    __device__ __forceinline__ void run(const float (&c)[MB][NT][4]) const {
        const int first = column + lane_id() % 4 * 2;
#pragma unroll
        for (int m = 0; m < MB; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int n = row(m) + lane_id() / 4 + half * 8;
                if (n >= p.M) continue;
                float* const out = p.floats + n * p.ld_floats + first;
#pragma unroll
                for (int t = 0; t < NT; t++)
                    if (first + t * 8 < p.N)
                        *reinterpret_cast<float2*>(out + t * 8) = {p.alpha * c[m][t][2 * half],
                                                                   p.alpha * c[m][t][2 * half + 1]};
            }
    }
};

// 2^min(x, 100), NaN for NaN.
__device__ __forceinline__ float bounded_exp2(float x) {
    float bounded;
    asm("min.NaN.f32 %0, %1, 0f42C80000;" : "=f"(bounded) : "f"(x));
    return exp2_for<bf16>(bounded);
}

// out = 2^min(log2(e)·c + row_offsets, 100), 0 from column valid_columns on. Its sums over the columns of the tile,
// before rounding, are row_sums [columns of tiles, M]. out may be null: only the sums are computed.
struct StoreExp : Position {
    static constexpr bool GATED = false, FREES_SUMS = true;
    using Panel = hopper_gemm_kernel::Panel<PANEL_COLUMNS>;
    struct Shared {
        Panel out[WARPS][2];
        __device__ void init() {}
    };
    Shared& shared;
    __device__ __forceinline__ StoreExp(const Position& at, Shared& s) : Position(at), shared(s) {}
    __device__ __forceinline__ void prepare() const {}
    __device__ __forceinline__ void run(float (&c)[MB][NT][4]) const {
        constexpr int TILES = Panel::TILES;
        if (column + BN > p.valid_columns) leave_out_padding(c);
        float offsets[MB][2], sums[MB][2] = {};  // of rows lane / 4 and lane / 4 + 8
#pragma unroll
        for (int m = 0; m < MB; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int n = row(m) + lane_id() / 4 + half * 8;
                offsets[m][half] = n < p.M ? p.row_offsets[n] : 0;
            }
#pragma unroll
        for (int q = 0; q < NT / TILES; q++)
#pragma unroll
            for (int m = 0; m < MB; m++) {
                uint32_t x[TILES / 2][4];
                for_each_pair<TILES>([&](int k, int i, int n, int e) {
                    const float* const sum = &c[m][q * TILES + n][e];
                    const float first = bounded_exp2(fmaf(sum[0], LOG2E, offsets[m][i % 2]));
                    const float second = bounded_exp2(fmaf(sum[1], LOG2E, offsets[m][i % 2]));
                    sums[m][i % 2] += first + second;
                    x[k][i] = pack_two<bf16>(first, second);
                });
                if (!p.stores_out) continue;
                Panel& out = shared.out[warp][m % 2];
                wait_for_earlier_stores();
                out.write(x);
                store_group([&] { store_panel(p.out[0], column + q * PANEL_COLUMNS, row(m), out.data); });
            }
#pragma unroll
        for (int m = 0; m < MB; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int n = row(m) + lane_id() / 4 + half * 8;
                const float sum = row_sum(sums[m][half]);
                if (lane_id() % 4 == 0 && n < p.M) p.row_sums[int64_t(column / BN) * p.M + n] = sum;
            }
    }

  private:
    __device__ __forceinline__ void leave_out_padding(float (&c)[MB][NT][4]) const {
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (column + n * 8 + lane_id() % 4 * 2 + e % 2 >= p.valid_columns)
#pragma unroll
                    for (int m = 0; m < MB; m++) c[m][n][e] = -INFINITY;
    }
};

// The first 96 columns of c + bias are gate, the last 96 up. Both are stored to aux if there is one, and out =
// SwiGLU(gate, up).
struct StoreSwiglu : Position {
    static constexpr bool GATED = true, FREES_SUMS = false;
    static constexpr int HALF = NT / 2;
    using Panel = hopper_gemm_kernel::Panel<32>;
    struct Shared {
        Panel panels[WARPS][2][3];  // gate, up, out
        __device__ void init() {}
    };
    Shared& shared;
    __device__ __forceinline__ StoreSwiglu(const Position& at, Shared& s) : Position(at), shared(s) {}
    __device__ __forceinline__ void prepare() const {}
    __device__ __forceinline__ void run(const float (&c)[MB][NT][4]) const {
        constexpr int TILES = Panel::TILES;
#pragma unroll
        for (int q = 0; q < HALF / TILES; q++) {
            const int first = column + q * Panel::COLUMNS;
            float2 gate_bias[TILES], up_bias[TILES];
            load_bias(gate_bias, p.bias, first, p.N);
            load_bias(up_bias, p.bias ? p.bias + p.N : nullptr, first, p.N);
#pragma unroll
            for (int m = 0; m < MB; m++) {
                Panel(&panels)[3] = shared.panels[warp][m % 2];
                wait_for_earlier_stores();
                uint32_t gate[TILES / 2][4], up[TILES / 2][4];
                round_biased(gate, c[m], q * TILES, p.alpha, gate_bias);
                round_biased(up, c[m], HALF + q * TILES, p.alpha, up_bias);
                panels[0].write(gate);
                panels[1].write(up);
                for_each_pair<TILES>([&](int k, int i, int, int) {
                    const float2 g = unpack(gate[k][i]), u = unpack(up[k][i]);
                    const mlp_activation::SwigluForward<bf16> f;
                    gate[k][i] = pack_two<bf16>(f(g.x, u.x), f(g.y, u.y));
                });
                panels[2].write(gate);
                store_group([&] {
                    if (p.stores_aux) {
                        store_panel(p.aux[0], first, row(m), panels[0].data);
                        store_panel(p.aux[1], first, row(m), panels[1].data);
                    }
                    if (p.stores_out) store_panel(p.out[0], first, row(m), panels[2].data);
                });
            }
        }
    }
};

// A warp loads panels, changes them and stores them. A tile has LOADED panels of each of PARTS matrices; they pass
// through a ring of RING panels. The first RING loads are started before the multiplication.
template <int PARTS, int RING, int COLUMNS>
struct PanelRing : Position {
    using Panel = hopper_gemm_kernel::Panel<COLUMNS>;
    static constexpr int LOADED = MB * NT / Panel::TILES;
    static constexpr int USES = LOADED / RING;  // of a panel of the ring by a tile
    static_assert(LOADED % RING == 0);
    struct Shared {
        Panel panels[WARPS][RING][PARTS];
        Mbarrier full[WARPS][RING];
        __device__ void init() {
            for (int i = 0; i < WARPS * RING; i++) mbarrier_init(&full[0][i], 1);
        }
    };
    Shared& shared;
    __device__ __forceinline__ PanelRing(const Position& at, Shared& s) : Position(at), shared(s) {}

    // Panel i covers rows i % MB of columns i / MB.
    __device__ __forceinline__ void load(int i) const {
        Mbarrier* const full = &shared.full[warp][i % RING];
        mbarrier_arrive_expect_tx(full, PARTS * Panel::BYTES);
#pragma unroll
        for (int part = 0; part < PARTS; part++)
            tma_load(shared.panels[warp][i % RING][part].data, &p.aux[part], column + i / MB * COLUMNS, 0, row(i % MB),
                     full);
    }
    __device__ __forceinline__ void prepare() const {
        if (lane_id() == 0) {
            tma_store_wait();
#pragma unroll
            for (int i = 0; i < RING; i++) load(i);
        }
        __syncwarp();
    }
    __device__ __forceinline__ Panel (&wait(int i) const)[PARTS] {
        mbarrier_wait(&shared.full[warp][i % RING], (earlier_tiles * USES + i / RING) & 1);
        return shared.panels[warp][i % RING];
    }
    // Stores panel i, which the warp has overwritten, and loads the next panel over panel i − 1. also()
    // issues further stores of the same group.
    template <typename Also>
    __device__ __forceinline__ void store(int i, Also also) const {
        fence_async_proxy();
        __syncwarp();
        if (lane_id() > 0) return;
        also();
#pragma unroll
        for (int part = 0; part < PARTS; part++)
            store_panel(p.out[part], column + i / MB * COLUMNS, row(i % MB), shared.panels[warp][i % RING][part].data);
        tma_store_commit();
        if (i > 0 && i - 1 + RING < LOADED) {
            tma_store_wait<1>();
            load(i - 1 + RING);
        }
    }
};

// out = c + bias + aux: aux is what is added, such as the residual.
struct StoreSum : PanelRing<1, 3, PANEL_COLUMNS> {
    static constexpr bool GATED = false, FREES_SUMS = true;
    using Ring = PanelRing<1, 3, PANEL_COLUMNS>;
    using Ring::Ring;
    __device__ __forceinline__ void run(const float (&c)[MB][NT][4]) const {
        constexpr int TILES = Panel::TILES;
#pragma unroll
        for (int q = 0; q < NT / TILES; q++) {
            float2 bias[TILES];
            load_bias(bias, p.bias, column + q * PANEL_COLUMNS, p.N);
#pragma unroll
            for (int m = 0; m < MB; m++) {
                Panel& panel = wait(q * MB + m)[0];
                uint32_t x[TILES / 2][4];
                panel.read(x);
                for_each_pair<TILES>([&](int k, int i, int n, int e) {
                    const float* const sum = &c[m][q * TILES + n][e];
                    const float2 aux = unpack(x[k][i]);
                    x[k][i] = pack_two<bf16>(fmaf(p.alpha, sum[0], bias[n].x + aux.x),
                                             fmaf(p.alpha, sum[1], bias[n].y + aux.y));
                });
                __syncwarp();  // all have read the panel
                panel.write(x);
                store(q * MB + m, [] {});
            }
        }
    }
};

// out = F(c, aux), the gradient of an activation function's input aux. Its sums over the rows of the tile, before
// rounding, are column_sums [rows of tiles, N], unless that is null.
template <typename F>
struct StoreGradient : PanelRing<1, 3, PANEL_COLUMNS> {
    static constexpr bool GATED = false, FREES_SUMS = true;
    using Ring = PanelRing<1, 3, PANEL_COLUMNS>;
    using typename Ring::Panel;
    struct Shared : Ring::Shared {
        float column_sums[WARPS][BN];
    };
    float (*const column_sums)[BN];
    __device__ __forceinline__ StoreGradient(const Position& at, Shared& s) : Ring(at, s), column_sums(s.column_sums) {}

    __device__ __forceinline__ void run(const float (&c)[MB][NT][4]) const {
        constexpr int TILES = Panel::TILES;
#pragma unroll
        for (int q = 0; q < NT / TILES; q++) {
            float sums[TILES * 2] = {};
#pragma unroll
            for (int m = 0; m < MB; m++) {
                Panel& panel = wait(q * MB + m)[0];
                uint32_t x[TILES / 2][4];
                panel.read(x);
                for_each_pair<TILES>([&](int k, int i, int n, int e) {
                    const float* const d = &c[m][q * TILES + n][e];
                    const float2 aux = unpack(x[k][i]);
                    const float2 y = {F{}(d[0], aux.x), F{}(d[1], aux.y)};
                    sums[2 * n] += y.x;
                    sums[2 * n + 1] += y.y;
                    x[k][i] = pack_two<bf16>(y.x, y.y);
                });
                __syncwarp();  // all have read the panel
                panel.write(x);
                store(q * MB + m, [] {});
            }
            if (p.column_sums) store_sums_of_rows(&column_sums[warp][q * PANEL_COLUMNS], sums);
        }
        if (p.column_sums) add_warps();
    }

  private:
    // In a fixed order. (Before column_sums is written again, all warps meet at the barrier before multiply().)
    __device__ __forceinline__ void add_warps() const {
        named_barrier_sync(3 + warp / 4, WARPGROUP);
        const float(*const of_group)[BN] = column_sums + warp / 4 * 4;
        if (tile_row * BM >= p.M) return;  // a cluster's tile may be below out
        for (int i = threadIdx.x % WARPGROUP; i < BN && column + i < p.N; i += WARPGROUP)
            p.column_sums[int64_t(tile_row) * p.N + column + i] =
                (of_group[0][i] + of_group[1][i]) + (of_group[2][i] + of_group[3][i]);
    }
};

// out = the gradients of gate and up, the two halves of aux. With ACT also act = SwiGLU(gate, up).
template <bool ACT>
struct StoreSwigluGradient : PanelRing<2, ACT ? 3 : 2, ACT ? 32 : PANEL_COLUMNS> {
    static constexpr bool GATED = false, FREES_SUMS = false;
    using Ring = PanelRing<2, ACT ? 3 : 2, ACT ? 32 : PANEL_COLUMNS>;
    using typename Ring::Panel;
    struct SharedWithAct : Ring::Shared {
        Panel act[WARPS][2];
    };
    using Shared = std::conditional_t<ACT, SharedWithAct, typename Ring::Shared>;
    Panel* act_panels = nullptr;
    __device__ __forceinline__ StoreSwigluGradient(const Position& at, Shared& s) : Ring(at, s) {
        if constexpr (ACT) act_panels = s.act[at.warp];
    }

    __device__ __forceinline__ void run(const float (&c)[MB][NT][4]) const {
        constexpr int TILES = Panel::TILES;
#pragma unroll
        for (int q = 0; q < NT / TILES; q++)
#pragma unroll
            for (int m = 0; m < MB; m++) {
                Panel(&panels)[2] = this->wait(q * MB + m);
                uint32_t gate[TILES / 2][4], up[TILES / 2][4];
                panels[0].read(gate);
                panels[1].read(up);
                if constexpr (ACT) write_act(act_panels[m % 2], gate, up);
                for_each_pair<TILES>([&](int k, int i, int n, int e) {
                    const float* const d = &c[m][q * TILES + n][e];
                    const float2 g = unpack(gate[k][i]), u = unpack(up[k][i]);
                    const mlp_activation::SwigluBackward<bf16> f;
                    const float2 first = f(d[0], g.x, u.x), second = f(d[1], g.y, u.y);
                    gate[k][i] = pack_two<bf16>(first.x, second.x);
                    up[k][i] = pack_two<bf16>(first.y, second.y);
                });
                __syncwarp();
                panels[0].write(gate);
                panels[1].write(up);
                this->store(q * MB + m, [&] {
                    if constexpr (ACT)
                        store_panel(this->p.act, this->column + q * Panel::COLUMNS, this->row(m),
                                    act_panels[m % 2].data);
                });
            }
    }

  private:
    template <int K>
    __device__ __forceinline__ void write_act(Panel& panel, const uint32_t (&gate)[K][4],
                                              const uint32_t (&up)[K][4]) const {
        if (lane_id() == 0) tma_store_wait<1>();  // what the panel held is stored
        __syncwarp();
        uint32_t act[K][4];
        for_each_pair<2 * K>([&](int k, int i, int, int) {
            const float2 g = unpack(gate[k][i]), u = unpack(up[k][i]);
            const mlp_activation::SwigluForward<bf16> f;
            act[k][i] = pack_two<bf16>(f(g.x, u.x), f(g.y, u.y));
        });
        panel.write(act);
    }
};

}  // namespace hopper_gemm_kernel
